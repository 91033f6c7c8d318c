from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfra.core.events import Event, ReasoningDelta, TextDelta, TokenLogprobs
from deepinfra.engine.stops import StopFilter
from deepinfra.recipes.output.family import output_grammar
from deepinfra.recipes.output.grammar import Edge, Grammar, State
from deepinfra.recipes.output.parser import GrammarParser
from deepinfra.testing.recipe import merged

OPEN, CLOSE = 256, 257
THINK = ("<think>", "</think>")
BY_ID = output_grammar({"<think>": OPEN, "</think>": CLOSE}, THINK)
BY_TEXT = output_grammar({}, THINK)
GRAMMARS = {"id": BY_ID, "text": BY_TEXT}


def token_bytes(token: int) -> bytes:
    return bytes((token,)) if token < 256 else b""


def ids_of(text: str) -> list[int]:
    """Bytes, with `⟨` and `⟩` for the marker ids."""
    ids: list[int] = []
    for char in text:
        ids += [OPEN] if char == "⟨" else [CLOSE] if char == "⟩" else char.encode()
    return ids


def parse(
    grammar: Grammar,
    start: str,
    ids: list[int],
    cuts: list[int] | None = None,
    probs: bool = False,
    stops: Sequence[str] = (),
) -> list[Event]:
    parser, stop = GrammarParser(grammar, start, token_bytes), StopFilter(stops)
    entries = [TokenLogprobs(token, token_bytes(token), -float(at)) for at, token in enumerate(ids)] if probs else []
    events: list[Event] = []
    for begin, end in itertools.pairwise((0, *(cuts or ()), len(ids))):
        events += stop.feed(parser.feed(ids[begin:end], entries[begin:end]))
    events += stop.feed(parser.finish("stop"))
    return [*events, *stop.flush()]


def said(events: list[Event]) -> list[tuple[str, str]]:
    kinds = {TextDelta: "text", ReasoningDelta: "reasoning"}
    return [(kinds[type(event)], event.text) for event in merged(events)]  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    ("grammar", "start", "text", "expected"),
    [
        ("id", "text", "hi", [("text", "hi")]),
        ("id", "text", "⟨\nwhy\n⟩\n\nhi\n", [("reasoning", "why"), ("text", "hi\n")]),
        ("id", "reasoning", "\nwhy\n\nso\n⟩hi", [("reasoning", "why\n\nso"), ("text", "hi")]),
        ("id", "reasoning", "why", [("reasoning", "why")]),
        ("id", "reasoning", "why\n", [("reasoning", "why\n")]),
        ("id", "reasoning", "</think>⟩hi", [("reasoning", "</think>"), ("text", "hi")]),
        ("id", "text", "leak⟩hi", [("text", "leakhi")]),
        ("id", "reasoning", "⟩hi", [("text", "hi")]),
        ("text", "text", "<think>why</think>\nhi", [("reasoning", "why"), ("text", "hi")]),
        ("text", "text", "the tag <think> is", [("text", "the tag <think> is")]),
        ("text", "text", "a</think>b", [("text", "a</think>b")]),
        ("text", "reasoning", "2 < 3 </thin </think>hi", [("reasoning", "2 < 3 </thin "), ("text", "hi")]),
        ("text", "reasoning", "why</thi", [("reasoning", "why</thi")]),
        ("text", "text", "<thi", [("text", "<thi")]),
        ("text", "text", "\n<think>why</think>", [("text", "\n"), ("reasoning", "why")]),
    ],
)
def test_reasoning_and_text_are_told_apart(grammar, start, text, expected) -> None:
    assert said(parse(GRAMMARS[grammar], start, ids_of(text))) == expected


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "⟨", "⟩", "<", "</th", "ink>", "\n", "\n\n", "a", "é", "🙂", " "])
)


@settings(max_examples=300)
@given(pieces, st.sampled_from(sorted(GRAMMARS)), st.sampled_from(["text", "reasoning"]), st.data())
def test_every_cut_gives_the_same_events_with_and_without_stop_strings(words, grammar, start, data) -> None:
    ids = ids_of("".join(words))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    stops = data.draw(st.sampled_from([(), ("a",), ("\n", "é🙂"), (" a", "aa\n"), ("<th",)]))
    whole = parse(GRAMMARS[grammar], start, ids, probs=True, stops=stops)
    assert parse(GRAMMARS[grammar], start, ids, cuts, probs=True, stops=stops) == whole
    assert parse(GRAMMARS[grammar], start, ids, list(range(len(ids))), probs=True, stops=stops) == whole


def test_a_grammar_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(ValueError, match="'<a' is the beginning of '<ab>'"):
        Grammar({"text": State(channel="text", edges=(Edge(marker="<a", to="text"), Edge(marker="<ab>", to="text")))})
    with pytest.raises(ValueError, match=r"'text' leads to .'nowhere'"):
        Grammar({"text": State(channel="text", edges=(Edge(marker="<a", to="nowhere"),))})


def test_random_bytes_decode_as_the_whole_does() -> None:
    draw = random.Random(3)
    for _ in range(400):
        data = bytes(draw.choice((draw.randrange(256), draw.randrange(0x80, 0xF8))) for _ in range(draw.randrange(40)))
        if draw.random() < 0.5:
            data = "é日🙂한".encode() + data + "🤷🏽‍♀️".encode()[: draw.randrange(17)]
        cuts = sorted(draw.choices(range(len(data) + 1), k=4))
        events = parse(BY_ID, "text", list(data), cuts)
        assert "".join(event.text for event in events) == data.decode(errors="replace")  # type: ignore[union-attr]


def test_a_tokens_logprobs_come_with_the_text_it_begins() -> None:
    ids = [*b"a", *"é".encode(), OPEN, *b"b"]
    events = parse(BY_ID, "text", ids, probs=True)
    assert [(event.text, [entry.token for entry in event.tokens]) for event in events] == [  # type: ignore[union-attr]
        ("a", [97]),
        ("é", [0xC3, 0xA9]),
        ("b", [98]),
    ]


def test_no_logprobs_of_answer_text_are_lost_and_none_of_a_marker_is_kept() -> None:
    ids = ids_of("why</think>\n\nhi < there")
    events = merged(parse(BY_TEXT, "reasoning", ids, probs=True))
    assert [bytes(entry.token for entry in event.tokens) for event in events] == [b"why", b"hi < there"]  # type: ignore[union-attr]


def test_a_token_costs_the_same_in_a_long_answer() -> None:
    def cost(lines: int) -> float:
        parser = GrammarParser(BY_TEXT, "reasoning", token_bytes)
        ids = ids_of("some < words </th and more\n" * lines)
        begun = time.process_time()
        for token in ids:
            parser.feed((token,))
        return (time.process_time() - begun) / len(ids)

    assert min(cost(1600) for _ in range(3)) < 4 * min(cost(100) for _ in range(5))  # in quadratic time 16 times
