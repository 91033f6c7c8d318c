"""Old bytes are found by what wrote them and by nothing else: one folder on disk, run after run, one thing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deepinfra.core import kv
from deepinfra.core.kv import KVLayout, Namespace, root_key
from deepinfra.core.model import ExecutorIdentity
from deepinfra.engine import Engine, Pool
from deepinfra.engine.sources import namespace_of
from deepinfra.executors.toy import ToyExecutor
from deepinfra.kvstores import SsdStore
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.asking import ask, end_of, events_of, tokens_of
from deepinfra.testing.textmodel import CHATML, TrainedTextModel
from deepinfra.testing.tiny import TinyRecipe

PROMPT = tuple(range(1, 64))


class Toy(ToyExecutor):
    """Says other things of itself than it is: what a changed model would say."""

    def __init__(self, identity: dict[str, str], layout: dict[str, Any], **options: Any) -> None:
        super().__init__(**{"block_size": 4, **options})
        self._identity, self._changes = identity, layout

    @property
    def identity(self) -> ExecutorIdentity:
        return super().identity._replace(**self._identity)

    @property
    def layout(self) -> KVLayout:
        return replace(super().layout, **self._changes)


class Recipe(TinyRecipe):
    """The tiny recipe under the version of another."""

    def __init__(self, version: str) -> None:
        super().__init__()
        self._version = version

    @property
    def version(self) -> str:
        return self._version


@cache
def version(**changes: Any) -> str:
    """Of a real recipe over a real tokenizer."""
    return ChatTemplate(TrainedTextModel(**changes)).version


class World:
    """Everything that decides what KV means and whose it is."""

    def __init__(
        self,
        *,
        identity: dict[str, str] | None = None,
        layout: dict[str, Any] | None = None,
        recipe: dict[str, Any] | None = None,
        tenant: str = "a",
        salt: str = "",
        **options: Any,
    ) -> None:
        self.executor = Toy(identity or {}, layout or {}, **options)
        self.recipe = Recipe(version(**(recipe or {})))
        self.tenant, self.salt = tenant, salt

    @property
    def namespace(self) -> Namespace:
        return namespace_of(self.executor, self.recipe.version, self.tenant, self.salt)

    async def hit(self, folder: Path) -> tuple[list[int], int, int]:
        """Run once over a folder: tokens of the answer, cached tokens, and records the store found."""
        store = SsdStore(folder)
        async with Engine(self.recipe, Pool(Fcfs(), self.executor, store=store)) as engine:
            events = await events_of(engine, ask(PROMPT, 6, tenant=self.tenant, salt=self.salt))
            assert await engine.drain(10)
            hits = store.stats().hits
        return tokens_of(events), end_of(events).usage.cached.total, hits


CHANGES: dict[str, dict[str, Any]] = {
    "the weights": {"seed": 1},
    "an adapter": {"identity": {"adapter": "lora"}},
    "another adapter": {"identity": {"adapter": "lora-2"}},
    "the element type": {"identity": {"kv_dtype": "digest32"}},
    "the numerics": {"identity": {"numerics": "batch-invariant"}},
    "the replay": {"identity": {"numerics": "ordinary+bounded"}},
    "an adapter spelled as numerics": {"identity": {"adapter": "ordinary", "numerics": ""}},
    "the block size": {"block_size": 8},
    "the layout's element type": {"layout": {"dtype": "digest32"}},
    "the layer it is of": {"layout": {"groups": (replace(ToyExecutor().layout.groups[0], layers=(1,)),)}},
    "a space in the template": {"recipe": {"template": CHATML + " "}},
    "the tokenizer": {"recipe": {"kind": "sentencepiece"}},
    "a marker of the tokenizer": {"recipe": {"markers": ("<|begin|>", "<|im_end|>", "<|im_start|>", "<|more|>")}},
    "the tenant": {"tenant": "b"},
    "the public tenant": {"tenant": "public"},
    "a salt": {"salt": "s"},
    "another salt": {"salt": "s2"},
    "a tenant that ends like a salt": {"tenant": "as"},
}


async def test_no_change_of_what_bytes_mean_finds_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder gathers the records of all of them, so each is also run over the records of all before it."""
    base = World()
    text, cached, _ = await base.hit(tmp_path)
    assert cached == 0
    for what, change in CHANGES.items():
        told, cached, hits = await World(**change).hit(tmp_path)
        assert (cached, hits) == (0, 0), what
        assert (told == text) == (what != "the weights"), what
    with monkeypatch.context() as patch:
        patch.setattr(kv, "FORMAT_VERSION", kv.FORMAT_VERSION + 1)
        assert (await World().hit(tmp_path))[1:] == (0, 0)
    assert await World().hit(tmp_path) == (text, len(PROMPT) // 4 * 4, len(PROMPT) // 4)
    for what, change in CHANGES.items():
        assert (await World(**change).hit(tmp_path))[1] > 40, what


def test_every_change_has_a_root_of_its_own() -> None:
    namespaces = [World(**change).namespace for change in ({}, *CHANGES.values())]
    assert len({root_key(namespace) for namespace in namespaces}) == len(namespaces)


def test_no_piece_of_one_field_can_move_into_its_neighbour() -> None:
    """Every field is tried with every other: what one loses at its end the other gains at its beginning."""
    names = [field.name for field in fields(Namespace)]
    base = Namespace(**{name: f"{name}-12" for name in names})
    roots = {root_key(base)}
    moves: list[Callable[[str, str], tuple[str, str]]] = [
        lambda one, other: (one[:-1], one[-1] + other),
        lambda one, other: (one + other[0], other[1:]),
        lambda one, other: (one + other, ""),
        lambda one, other: ("", one + other),
        lambda one, other: (other, one),
        lambda one, other: (one + "\0", other[1:]),
    ]
    count = 1
    for first in names:
        for second in names:
            if first != second:
                for move in moves:
                    one, other = move(getattr(base, first), getattr(base, second))
                    roots.add(root_key(replace(base, **{first: one, second: other})))
                    count += 1
    symmetric = len(names) * (len(names) - 1) // 2  # swapping is tried from both sides
    assert len(roots) == count - symmetric
