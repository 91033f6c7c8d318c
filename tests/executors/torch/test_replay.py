"""Windows rebuilt behind a prefix that was found: exactly, and as an approximation whose error is known.

The oracle of the approximation is its definition in mask form, computed by transformers: all rows of the text in one
pass, where rows from the first replayed one see no window key below it, and keys of layers that see everything are, for
rows of the prefix, those of a pass without any such mask.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import Cache

SIZE = 4


class FromAnotherPass(Cache):  # type: ignore[misc]
    """Gives layers that see everything the keys and values that another pass had, as far as the prefix goes.

    Args:
        full: Which layers these are.
        prefix: Positions.
        other: The pass whose keys and values to take; without it they are remembered.
    """

    def __init__(self, full: list[int], prefix: int, other: FromAnotherPass | None = None) -> None:
        self.full, self.prefix, self.other = full, prefix, other
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, keys: Any, values: Any, layer_idx: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.full and self.other is not None:
            stored = self.other.seen[layer_idx]
            keys, values = (
                torch.cat((old[:, :, : self.prefix], new[:, :, self.prefix :]), 2)
                for old, new in zip(stored, (keys, values), strict=True)
            )
        self.seen[layer_idx] = keys, values
        return keys, values


def masks(length: int, window: int, first: int) -> dict[str, torch.Tensor]:
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    future = columns > rows
    hidden = future | (columns <= rows - window) | ((rows >= first) & (columns < first))
    both = {"full_attention": future, "sliding_attention": hidden}
    return {
        kind: torch.zeros(1, 1, length, length).masked_fill(mask, torch.finfo(torch.float32).min)
        for kind, mask in both.items()
    }


def mask_form(model: Any, text: list[int], prefix: int, first: int) -> torch.Tensor:
    """Logits of all rows, by the definition."""
    kinds, window = model.config.layer_types, model.config.sliding_window
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    ids, positions = torch.tensor([text]), torch.arange(len(text))[None]
    with torch.inference_mode():
        whole = FromAnotherPass(full, prefix)
        model(ids, attention_mask=masks(len(text), window, 0), position_ids=positions, cache=whole)
        again = FromAnotherPass(full, prefix, whole)
        out = model(ids, attention_mask=masks(len(text), window, first), position_ids=positions, cache=again)
    logits: torch.Tensor = out.logits[0]
    return logits


def tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(320) for _ in range(count)]


def exact_rows(config: Any) -> int:
    rows: int = config.window + (len(config.sliding) - 1) * (config.window - 1)
    return rows


def behind(passes: Any, path: Any, text: list[int], prefix: int, rows: int, cuts: list[int]) -> torch.Tensor:
    """Logits of `text` from the first replayed row on, in chunks that end at `cuts`, behind a whole pass's blocks."""
    owner = passes(path)
    owner(text[:prefix])
    heir = passes(path, kv=owner.kv)
    first = max(0, prefix - rows)
    ends = sorted({cut for cut in cuts if first < cut < len(text)} | {len(text)})
    return torch.cat(
        [heir(text[at:end], at, prefix) for at, end in zip([first, *ends[:-1]], ends, strict=True) if end > at]
    )


def test_the_mask_form_that_clamps_nothing_is_the_model_itself(hybrid: str, made: Any) -> None:
    _, model = made(hybrid)
    text = tokens(60)
    with torch.inference_mode():
        plain = model(torch.tensor([text])).logits[0]
    assert (mask_form(model, text, 40, 0) - plain).abs().max() <= 1e-4


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_exact_replay_gives_the_logits_of_no_cache(hybrid: str, made: Any, passes: Any, data: st.DataObject) -> None:
    path, _ = made(hybrid)
    whole = passes(path)
    text = tokens(data.draw(st.integers(50, 110)), data.draw(st.integers(0, 3)))
    prefix = data.draw(st.integers(1, (len(text) - 1) // SIZE)) * SIZE
    cuts = data.draw(st.lists(st.integers(1, 110), max_size=5))
    ours = behind(passes, path, text, prefix, exact_rows(whole.config), cuts)
    expected = whole(text)
    # The row before the prefix's end is right as well: a hit that goes to the end of a prompt samples from it.
    behind_prefix = len(text) - prefix + 1
    assert (ours[-behind_prefix:] - expected[-behind_prefix:]).abs().max() <= 1e-4


def test_one_row_less_than_exact_replay_is_not_exact(hybrid: str, made: Any, passes: Any) -> None:
    path, _ = made(hybrid)
    whole = passes(path)
    text, prefix = tokens(110), 100
    expected = whole(text)[-11]
    wrong = behind(passes, path, text, prefix, exact_rows(whole.config) - 1, [])[-11]
    assert (wrong - expected).abs().max() > 1e-5


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_bounded_replay_is_what_its_mask_form_says(hybrid: str, made: Any, passes: Any, data: st.DataObject) -> None:
    """Hits that end inside, at and past a window, cut into any chunks."""
    path, model = made(hybrid)
    window = model.config.sliding_window
    text = tokens(data.draw(st.integers(5 * window, 110)), data.draw(st.integers(0, 3)))
    prefix = data.draw(st.integers(1, (len(text) - 1) // SIZE)) * SIZE
    cuts = data.draw(st.lists(st.integers(1, 110), max_size=5))
    ours = behind(passes, path, text, prefix, window, cuts)
    first = max(0, prefix - window)
    expected = mask_form(model, text, prefix, first)[first:]
    assert (ours - expected).abs().max() <= 1e-4


def test_hits_that_end_inside_at_and_past_a_window_replay_as_said(hybrid: str, made: Any, passes: Any) -> None:
    path, model = made(hybrid)
    whole, window = passes(path), model.config.sliding_window
    text = tokens(6 * window)
    expected = whole(text)
    inside, at = (window - 1) // SIZE * SIZE, window + -window % SIZE
    for prefix in (SIZE, inside, at, at + SIZE, 2 * at, 4 * at + SIZE):
        ours = behind(passes, path, text, prefix, exact_rows(whole.config), [])
        left = len(text) - prefix + 1
        assert (ours[-left:] - expected[-left:]).abs().max() <= 1e-4, prefix
        first = max(0, prefix - window)
        masked = mask_form(model, text, prefix, first)[first:]
        assert (behind(passes, path, text, prefix, window, []) - masked).abs().max() <= 1e-4, prefix


@pytest.mark.parametrize("rows", ["exact", "bounded"])
def test_the_error_of_replay_is_that_of_its_name(rows: str, hybrid: str, made: Any, passes: Any) -> None:
    """Exact replay changes no greedy token; bounded replay moves logits, which is what makes it an approximation."""
    path, _ = made(hybrid)
    whole = passes(path)
    count = exact_rows(whole.config) if rows == "exact" else whole.config.window
    differences, equal, seen = [], 0, 0
    for seed in range(8):
        text, prefix = tokens(120, seed), 80
        expected = whole_text(passes, path, text)[prefix:]
        ours = behind(passes, path, text, prefix, count, [])[-40:]
        differences.append((ours - expected).abs())
        equal += int((ours.argmax(-1) == expected.argmax(-1)).sum())
        seen += len(ours)
    worst, mean = torch.cat(differences).max().item(), torch.cat(differences).mean().item()
    said = f"{rows} on {hybrid}: largest {worst:.2g}, mean {mean:.2g}, {equal} of {seen} greedy tokens equal"
    print(said)
    if rows == "exact":
        assert worst <= 1e-4, said
        assert equal == seen, said
    else:
        assert worst > 1e-3, said
        assert equal >= 0.5 * seen, said


def whole_text(passes: Any, path: Any, text: list[int]) -> torch.Tensor:
    logits: torch.Tensor = passes(path)(text)
    return logits
