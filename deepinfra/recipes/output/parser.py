"""The incremental engine: ids to events, one id at a time, so that the cut of the stream cannot matter.

Order: id or bytes, UTF-8, markers, channel. Work is linear in the output; a marker costs a search in the text held.

What it makes of output that follows no grammar:
- Scaffolding that leads to no call (a block that is broken before a name, or that holds none) comes out as text,
  markers spelled, whenever that is known, at the latest where the model ended the answer. Where a limit cut a call that
  was only beginning, it is dropped, unless it may as well be an answer (`State.declared`).
- A call has a name, but not always one of the tools declared: that is for the client to judge. Where nothing but the
  name tells a call from an answer (`State.declared`), it must be declared.
- A call whose arguments stop being JSON, or that the answer's end cuts, gets no `ToolEnd`; what follows is parsed on.
  The arguments of a call that has its `ToolEnd` are a JSON object.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Sequence

from deepinfra.core.conversation import ToolDefinition
from deepinfra.core.events import Event, ReasoningDelta, TextDelta, TokenLogprobs, ToolStart
from deepinfra.core.request import FinishReason
from deepinfra.recipes.output.calls import CallWriter, types_of
from deepinfra.recipes.output.envelope import Envelope
from deepinfra.recipes.output.grammar import SPOKEN, TOKENS, Edge, Grammar

__all__ = ("GrammarParser",)

_HEADER = 512
"""Characters that a header may have; longer ones are no header."""


class GrammarParser:
    """See `deepinfra.interfaces.OutputParser`.

    Args:
        grammar: The family's states.
        start: Name of the state to begin in.
        token_bytes: Bytes of an id.
        choice: Number of the answer, for its events.
        tools: The tools declared: what an untyped parameter is, and what is a call where only the name can tell.
    """

    def __init__(
        self,
        grammar: Grammar,
        start: str,
        token_bytes: Callable[[int], bytes],
        choice: int = 0,
        tools: Sequence[ToolDefinition] = (),
    ) -> None:
        self._grammar, self._token_bytes, self._choice, self._tools = grammar, token_bytes, choice, tools
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._at = 0  # characters held in which no marker begins
        self._decoded = self._emitted = 0  # characters so far
        self._blank = True
        self._pending: deque[tuple[int, TokenLogprobs]] = deque()
        self._events: list[Event] = []
        self._call: CallWriter | None = None
        self._envelope: Envelope | None = None
        self._calls = 0
        self._home, self._before = "text", 0  # where the block under way was opened, and after how many calls
        self._aside: list[str] = []  # scaffolding since the last event
        self._aside_tokens: list[TokenLogprobs] = []
        self._value: list[str] = []
        self._types: frozenset[str] | None = None
        self._enter(start, led=start != "text")

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Sequence[Event]:
        """See `OutputParser.feed`."""
        for index, token in enumerate(ids):
            marker = self._by_id.get(token)
            if marker is not None:
                self._flush_decoder()
            if logprobs:
                self._pending.append((self._decoded, logprobs[index]))
            text = self._decoder.decode(self._token_bytes(token)) if marker is None else marker
            if text:
                self._decoded += len(text)
                self._held += text
                self._scan()
        return self._take()

    def finish(self, reason: FinishReason) -> Sequence[Event]:
        """See `OutputParser.finish`."""
        self._flush_decoder()
        call = self._call
        if self._state.channel == "arguments":
            assert call is not None
            if call.arguments_ended() and (reason in ("stop", "tool_calls") or not call.arguments_empty):
                self._end_call()
        elif self._state.channel not in SPOKEN and self._calls == self._before and not self._state.quiet:
            cut = reason not in ("stop", "tool_calls")
            if not cut or self._state.declared:
                self._break()
        if self._state.channel in SPOKEN:
            self._emit(len(self._held))
            if self._pending:  # the last tokens had no text of their own
                self._delta("", tuple(entry for _, entry in self._pending))
        self._pending.clear()
        return self._take()

    @property
    def space(self) -> str:
        """See `OutputParser.space`."""
        if self._state.channel != "text" or self._strip:
            return ""
        return self._held[: len(self._held) - len(self._held.lstrip(self._state.rstrip or "\0"))]

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _flush_decoder(self) -> None:
        text = self._decoder.decode(b"", True)
        if text:
            self._decoded += len(text)
            self._held += text
            self._scan()

    # -- states -----------------------------------------------------------------------------------

    def _enter(self, name: str, led: bool) -> None:
        self._marked = self._grammar.marked[name]
        state = self._state = self._marked.state
        self._name, self._at = name, 0
        self._by_id = {} if state.channel in SPOKEN and not state.edges else self._grammar.by_id
        self._strip = state.lstrip if led else ""
        self._lead = state.lead
        call = self._call
        if call is not None and call.name and state.channel != "header":
            call.start()
        if state.channel in SPOKEN:
            self._call = None
        elif state.channel == "envelope":
            self._call = self._new_call()
            self._envelope = Envelope(self._call, {tool.name for tool in self._tools} if state.declared else None)
        elif state.channel == "value":
            self._open_value()
        elif state.notation is not None and self._call is not None:
            self._call.written_in(state.notation)

    def _follow(self, edge: Edge, at: int, size: int) -> None:
        """Leave a state by a marker; `at` characters before it are scaffolding."""
        spoken, next_spoken = self._state.channel in SPOKEN, self._grammar.states[edge.to].channel in SPOKEN
        self._blank = self._blank or self._state.channel == "reasoning"
        if spoken and not next_spoken:
            self._home, self._before = self._name, self._calls
        self._drop(at + (0 if edge.keep else size), aside=not edge.quiet and not (spoken and next_spoken))
        if edge.quiet:
            self._forget_aside()
        if edge.ends and self._call is not None:
            self._end_call()
        self._enter(edge.to, led=True)
        if next_spoken:
            if self._calls == self._before:
                self._tell()
            self._forget_aside()

    def _break(self) -> None:
        """What was read since the last event is no tool call: it is text, and parsing goes on behind it."""
        self._call = None
        self._enter(self._home, led=self._calls > self._before)
        self._tell()

    def _tell(self) -> None:
        """Send scaffolding as text."""
        text = "".join(self._aside)
        text = TOKENS.sub(lambda found: self._grammar.spelling[found.group()], text)
        if self._calls > self._before:
            text = text.lstrip()
        if text:
            self._strip = ""
            self._blank = self._blank and not text.strip()
            self._delta(text, tuple(self._aside_tokens))
        self._forget_aside()

    def _forget_aside(self) -> None:
        self._aside.clear()
        self._aside_tokens.clear()

    # -- scanning ---------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Follow markers and ends; let go of what no marker can begin in."""
        more = True
        while more:
            if self._strip:
                self._drop(len(self._held) - len(self._held.lstrip(self._strip)), aside=False)
                if not self._held:
                    return
                self._strip = ""
            if self._lead:
                if len(self._held) < len(self._lead) and self._lead.startswith(self._held):
                    return
                if self._held.startswith(self._lead):
                    self._drop(len(self._lead), aside=False)
                self._lead = ""
            channel = self._state.channel
            if channel == "arguments":
                more = self._scan_arguments()
            elif channel == "envelope":
                more = self._scan_envelope()
            else:
                more = self._scan_markers()

    def _scan_arguments(self) -> bool:
        call = self._call
        assert call is not None, f"the state {self._name!r} has arguments of no call"
        self._drop(call.arguments(self._held), aside=False)
        if call.arguments_done or (call.arguments_bad and call.arguments_empty):
            self._end_call()
        elif not call.arguments_bad:
            return False
        self._call = None
        self._enter(self._state.after, led=True)
        return True

    def _scan_envelope(self) -> bool:
        call, envelope = self._call, self._envelope
        assert call is not None
        assert envelope is not None
        self._drop(envelope.feed(self._held), aside=True)
        if call.started:
            self._forget_aside()
        if envelope.bad and not call.started:
            self._break()
        elif envelope.bad or envelope.done:
            self._call = None
            self._enter(self._state.after, led=True)
        else:
            return False
        return True

    def _scan_markers(self) -> bool:
        """Whether there is more to scan."""
        marked, held = self._marked, self._held
        pattern = marked.early if self._blank else marked.late
        found = pattern.search(held, self._at) if pattern is not None else None
        if found is None:
            return self._pass(len(held) - self._overlap(held))
        at, edges = found.start(), marked.edges[found.group()]
        channel, edge = self._state.channel, edges[0]
        if channel in SPOKEN:
            if edge.first and held[:at].strip():
                self._emit(at)
                self._at = 0
                return True
            shown = len(held[:at].rstrip(self._state.rstrip)) if self._state.rstrip else at
            self._emit(shown)
            at -= shown
        elif channel == "header":
            matching = self._read_header(held[:at], edges)
            if matching is None:
                self._break()
                return True
            edge = matching
        elif channel == "value":
            self._take_value(at)
            self._close_value()
            at = 0
        elif self._broken_by(held[:at]):
            return True
        self._follow(edge, at, len(found.group()))
        return True

    def _pass(self, limit: int) -> bool:
        """No marker begins in the first `limit` characters held; whether there is more to scan."""
        channel = self._state.channel
        if channel in SPOKEN:
            new = self._held[self._at : limit]
            kept = len(new) - len(new.rstrip(self._state.rstrip)) if self._state.rstrip else 0
            if kept == len(new):
                self._at = max(self._at, limit)
            else:
                self._emit(limit - kept)
                self._at = kept
        elif channel == "header":
            if limit > _HEADER:
                self._break()
                return True
            self._at = max(self._at, limit)
        elif channel == "value":
            self._take_value(limit)
        elif self._broken_by(self._held[:limit]):
            return True
        else:
            self._drop(limit, aside=True)
        return False

    def _broken_by(self, text: str) -> bool:
        """Leave a gap that is broken: by anything but white space, outside a call."""
        if (self._call is not None and self._call.started) or not text.strip():
            return False
        self._drop(len(text) - len(text.lstrip()), aside=True)
        self._break()
        return True

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a marker."""
        prefixes = self._marked.prefixes
        for size in range(min(len(text), self._marked.longest), 0, -1):
            if text[-size:] in prefixes:
                return size
        return 0

    def _read_header(self, text: str, edges: tuple[Edge, ...]) -> Edge | None:
        """The edge whose pattern the header matches; what the pattern found is noted."""
        text = TOKENS.sub(lambda found: self._grammar.spelling[found.group()], text)
        for edge in edges:
            match = re.fullmatch(edge.when or ".*", text, re.DOTALL)
            if match is None:
                continue
            groups = match.groupdict()
            if edge.quoted:
                groups = {name: text.replace("&quot;", '"') for name, text in groups.items()}
            if "name" in groups or "id" in groups:
                if self._call is None or self._call.started:
                    self._call = self._new_call()
                self._call.name = groups.get("name") or self._call.name
                self._call.id = groups.get("id") or self._call.id
            if "key" in groups and self._call is not None:
                self._call.key = groups["key"]
            return edge
        return None

    # -- calls ------------------------------------------------------------------------------------

    def _new_call(self) -> CallWriter:
        return CallWriter(self._choice, self._calls, self._tool_event)

    def _tool_event(self, event: Event) -> None:
        self._calls += isinstance(event, ToolStart)
        self._events.append(event)
        self._forget_aside()

    def _end_call(self) -> None:
        assert self._call is not None
        self._call.end()
        self._call = None

    def _open_value(self) -> None:
        call, typed = self._call, self._state.typed
        assert call is not None, f"the state {self._name!r} is a parameter of no call"
        call.parameter(call.key)
        self._types = None
        self._string = typed == "string"
        if typed == "schema":
            self._types = types_of(self._tools, call.name, call.key)
            self._string = self._types == {"string"}
        if self._string:
            call.open_string()

    def _take_value(self, count: int) -> None:
        """The first characters held belong to the value."""
        assert self._call is not None
        text = self._plain(self._held[:count])
        self._drop(count, aside=False)
        if self._string:
            self._call.string(text)
        else:
            self._value.append(text)

    def _close_value(self) -> None:
        assert self._call is not None
        if self._string:
            self._call.close_string()
        else:
            self._call.value("".join(self._value), self._types)
            self._value.clear()

    # -- the stream -------------------------------------------------------------------------------

    def _plain(self, text: str) -> str:
        """Control tokens that are no markers here become the text they have."""
        if self._by_id and TOKENS.search(text):
            tokens = self._grammar.tokens
            return TOKENS.sub(lambda found: self._token_bytes(tokens[found.group()]).decode(errors="replace"), text)
        return text

    def _emit(self, count: int) -> None:
        """Send the first characters held, with the tokens that begin in them."""
        if count:
            text, self._held = self._plain(self._held[:count]), self._held[count:]
            self._emitted += count
            self._blank = self._blank and not text.strip()
            tokens = []
            while self._pending and self._pending[0][0] < self._emitted:
                tokens.append(self._pending.popleft()[1])
            self._delta(text, tuple(tokens))

    def _drop(self, count: int, aside: bool) -> None:
        """Take away the first characters held, and the tokens that have no other text; keep both `aside` or not."""
        if aside and count:
            self._aside.append(self._held[:count])
        self._held, self._at = self._held[count:], 0
        self._emitted += count
        pending = self._pending
        while pending and pending[0][0] < self._emitted:
            if (pending[1][0] if len(pending) > 1 else self._decoded) > self._emitted:
                break
            entry = pending.popleft()[1]
            if aside:
                self._aside_tokens.append(entry)

    def _delta(self, text: str, tokens: tuple[TokenLogprobs, ...]) -> None:
        if text or tokens:
            kind = TextDelta if self._state.channel == "text" else ReasoningDelta
            self._events.append(kind(choice=self._choice, text=text, tokens=tokens))
