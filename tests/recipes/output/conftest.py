"""Every family by control tokens and by characters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from deepinfra.core.conversation import ToolDefinition
from deepinfra.core.events import Event
from deepinfra.core.request import FinishReason
from deepinfra.engine.stops import StopFilter
from deepinfra.recipes.output.families import FAMILIES
from deepinfra.recipes.output.family import output_grammar
from deepinfra.recipes.output.parser import GrammarParser
from deepinfra.testing.answers import WRITERS, Answer, Bytes, answer_of

_MARKERS = re.compile(
    r"<[^<>]*:opensource>|<\|[^|<>]*\|?>|<[a-z_]+\|>|<｜[^｜<>]+｜>|\[[A-Z_]+\]|｜DSML｜|</?(?:tool_call|arg_key|arg_value|seed:tool_call)>"
)

TOOLS = (
    ToolDefinition(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "ok": {"type": "boolean"},
                "where": {"type": "object"},
                "tags": {"type": "array"},
                "ratio": {"type": "number"},
                "note": {"type": ["string", "null"]},
            },
        },
    ),
    ToolDefinition(name="f", parameters={"type": "object", "properties": {"s": {"type": "string"}, "x": {}}}),
    ToolDefinition(name="none"),
)


class Reader:
    """A family's answers, parsed with tools declared.

    Args:
        name: The family.
        tokens: Its markers are control tokens, as far as its models have them.
    """

    def __init__(self, name: str, tokens: bool) -> None:
        self.name, self.family = name, FAMILIES[name]
        text = WRITERS[name]([("f", {"s": "a", "x": 1})])
        self.markers = sorted({*_MARKERS.findall(text), "<think>", "</think>"})
        self.vocabulary = Bytes(self.markers if tokens else ())
        self.whole = not self.family.entries
        """The family's states are how whole answers are written."""
        reasoning = None if self.whole else ("<think>", "</think>")
        self.grammar = output_grammar(self.vocabulary.control, reasoning, self.family)
        self.start = "header" if self.whole else "text"

    def ids(self, text: str) -> list[int]:
        """The answer's ids."""
        return self.vocabulary.encode(text)

    def in_tokens(self, text: str, sizes: Sequence[int], reason: FinishReason = "stop") -> Answer:
        """What the answer says if its bytes come in tokens of these sizes, and as the last size goes on."""
        table: list[bytes] = []
        ids, run = [], bytearray()
        for token in [*self.ids(text), -1]:
            if 0 <= token < 256:
                run.append(token)
                continue
            while run:
                size = max(sizes[min(len(table), len(sizes) - 1)], 1)
                table.append(bytes(run[:size]))
                ids.append(1000 + len(table) - 1)
                del run[:size]
            if token >= 0:
                ids.append(token)
        parser = GrammarParser(
            self.grammar, self.start, lambda token: table[token - 1000] if token >= 1000 else b"", 0, TOOLS
        )
        return answer_of([*parser.feed(ids), *parser.finish(reason)])

    def parser(self, choice: int = 0, start: str = "") -> GrammarParser:
        """A parser of one answer."""
        return GrammarParser(self.grammar, start or self.start, self.vocabulary.token_bytes, choice, TOOLS)

    def events(
        self,
        ids: Sequence[int],
        cuts: Sequence[int] = (),
        stops: Sequence[str] = (),
        reason: FinishReason = "stop",
        start: str = "",
    ) -> list[Event]:
        """Its events, fed in pieces, behind a filter of stop strings."""
        parser = self.parser(start=start)
        stop = StopFilter(stops)
        events: list[Event] = []
        for begin, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
            events += stop.feed(parser.feed(ids[begin:end]))
        events += stop.feed(parser.finish(reason))
        return [*events, *stop.flush()]


@pytest.fixture(scope="session")
def reader() -> Callable[[str, bool], Reader]:
    """Readers by family and by whether markers are control tokens; each is built once."""
    built: dict[tuple[str, bool], Reader] = {}

    def get(name: str, tokens: bool) -> Reader:
        if (name, tokens) not in built:
            built[name, tokens] = Reader(name, tokens)
        return built[name, tokens]

    return get


@pytest.fixture(
    params=[(name, tokens) for name in FAMILIES for tokens in (False, True)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def each(request: pytest.FixtureRequest, reader: Callable[[str, bool], Reader]) -> Reader:
    """A test that takes `each` runs for every family, by characters and by tokens."""
    return reader(*request.param)
