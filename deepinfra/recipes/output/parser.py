"""The incremental engine: ids to events, one id at a time, so that the cut of the stream cannot matter.

Order: id or bytes, UTF-8, markers, channel. Work is linear in the output; a marker costs a search in the text held.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence

from deepinfra.core.events import Event, ReasoningDelta, TextDelta, TokenLogprobs
from deepinfra.core.request import FinishReason
from deepinfra.recipes.output.grammar import Edge, Grammar, State

__all__ = ("GrammarParser",)


class GrammarParser:
    """See `deepinfra.interfaces.OutputParser`.

    Args:
        grammar: The family's states.
        start: Name of the state to begin in.
        token_bytes: Bytes of an id.
        choice: Number of the answer, for its events.
    """

    def __init__(self, grammar: Grammar, start: str, token_bytes: Callable[[int], bytes], choice: int = 0) -> None:
        self._states, self._token_bytes, self._choice = grammar.states, token_bytes, choice
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._decoded = self._emitted = 0  # characters so far
        self._blank = True
        self._pending: deque[tuple[int, TokenLogprobs]] = deque()
        self._events: list[Event] = []
        self._enter(grammar.states[start], led=start != "text")

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Sequence[Event]:
        """See `OutputParser.feed`."""
        for index, token in enumerate(ids):
            edge = self._by_id.get(token)
            if edge is not None and (self._blank or not edge.first):
                self._follow(edge)
                continue
            if logprobs:
                self._pending.append((self._decoded, logprobs[index]))
            text = self._decoder.decode(self._token_bytes(token))
            if text:
                self._decoded += len(text)
                self._held += text
                self._scan()
        return self._take()

    def finish(self, reason: FinishReason) -> Sequence[Event]:
        """See `OutputParser.finish`."""
        self._flush_decoder()
        self._emit(len(self._held))
        if self._pending:  # the last tokens had no text of their own
            self._delta("", tuple(entry for _, entry in self._pending))
            self._pending.clear()
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _enter(self, state: State, led: bool) -> None:
        self._state = state
        self._by_id = {edge.token: edge for edge in state.edges if edge.token is not None}
        self._by_text = [edge for edge in state.edges if edge.token is None]
        self._strip = state.lstrip if led else ""

    def _follow(self, edge: Edge) -> None:
        """Leave a state by an id."""
        self._flush_decoder()
        self._emit(len(self._held.rstrip(self._state.rstrip) if self._state.rstrip else self._held))
        self._drop(len(self._held))
        self._enter(self._states[edge.to], led=True)

    def _flush_decoder(self) -> None:
        text = self._decoder.decode(b"", True)
        if text:
            self._decoded += len(text)
            self._held += text
            self._scan()

    def _scan(self) -> None:
        """Emit what no marker can begin in; follow markers spelled in text."""
        while True:
            if self._strip:
                self._drop(len(self._held) - len(self._held.lstrip(self._strip)))
                if not self._held:
                    return
                self._strip = ""
            edges = [edge for edge in self._by_text if self._blank or not edge.first]
            found = min(
                ((at, edge) for edge in edges if (at := self._held.find(edge.marker)) >= 0),
                key=lambda pair: pair[0],
                default=None,
            )
            if found is None:
                break
            at, edge = found
            if edge.first and self._held[:at].strip():
                self._emit(at)
                continue
            self._emit(len(self._held[:at].rstrip(self._state.rstrip) if self._state.rstrip else self._held[:at]))
            self._drop(self._held.index(edge.marker) + len(edge.marker))
            self._enter(self._states[edge.to], led=True)
        keep = max((_overlap(self._held, edge.marker) for edge in edges), default=0)
        free = len(self._held) - keep
        if self._state.rstrip:
            free = len(self._held[:free].rstrip(self._state.rstrip))
        self._emit(free)

    def _emit(self, count: int) -> None:
        """Send the first characters held, with the tokens that begin in them."""
        if count:
            text, self._held = self._held[:count], self._held[count:]
            self._emitted += count
            self._blank = self._blank and not text.strip()
            tokens = []
            while self._pending and self._pending[0][0] < self._emitted:
                tokens.append(self._pending.popleft()[1])
            self._delta(text, tuple(tokens))

    def _drop(self, count: int) -> None:
        """Forget the first characters held, and the tokens that have no other text."""
        self._held = self._held[count:]
        self._emitted += count
        pending = self._pending
        while pending and pending[0][0] < self._emitted:
            if (pending[1][0] if len(pending) > 1 else self._decoded) > self._emitted:
                break
            pending.popleft()

    def _delta(self, text: str, tokens: tuple[TokenLogprobs, ...]) -> None:
        kind = TextDelta if self._state.channel == "text" else ReasoningDelta
        self._events.append(kind(choice=self._choice, text=text, tokens=tokens))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
