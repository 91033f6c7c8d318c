"""Stop strings: matched in answer text only, never returned, held back while a piece of one may be under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepinfra.core.events import Event, TextDelta, TokenLogprobs

__all__ = ("StopFilter",)


class StopFilter:
    """Cuts one answer's events at the first completed stop string.

    Text that could be the beginning of a stop string waits until that is decided. The earliest completed match wins;
    of two that complete at the same character the one that began earlier. After `stopped` is set nothing more comes.
    """

    def __init__(self, stops: Sequence[str], choice: int = 0) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._choice = choice
        self._held = ""
        self._tokens: list[tuple[int, TokenLogprobs]] = []
        self.stopped: str | None = None

    def feed(self, events: Iterable[Event]) -> list[Event]:
        """Events that may be shown now."""
        if not self._stops:
            return list(events)
        shown: list[Event] = []
        for event in events:
            if self.stopped is not None:
                break
            if isinstance(event, TextDelta):
                shown.extend(self._text(event))
            else:
                shown.extend(self.flush())
                shown.append(event)
        return shown

    def flush(self) -> list[Event]:
        """What was held back, at the end of the answer or where other than text follows."""
        return self._release(len(self._held))

    def peek(self, space: str) -> list[Event]:
        """End the answer if a stop string completes in `space`: what was written, but may be no text of the answer.

        Nothing of it is kept: what becomes text comes again.
        """
        start = len(self._held)
        if self.stopped is not None or not space or not self._stops:
            return []
        self._held += space
        cut = self._first_match(start)
        if cut is not None:
            return self._cut(*cut)
        self._held = self._held[:start]
        return []

    def _text(self, event: TextDelta) -> list[Event]:
        start = len(self._held)
        self._tokens.extend((start, token) for token in event.tokens)
        self._held += event.text
        cut = self._first_match(start)
        return self._release(len(self._held) - self._pending()) if cut is None else self._cut(*cut)

    def _cut(self, position: int, stop: str) -> list[Event]:
        """The text before a stop string is the last of the answer."""
        self.stopped = stop
        self._tokens = [(at, token) for at, token in self._tokens if at < position]
        shown = self._release(position)
        self._held, self._tokens = "", []
        return shown

    def _first_match(self, start: int) -> tuple[int, str] | None:
        """(position, stop) of the match that completes first; only matches that end after `start` are new."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = self._held.find(stop, max(0, start - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return None if best is None else (best[1], best[2])

    def _pending(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int) -> list[Event]:
        text, self._held = self._held[:length], self._held[length:]
        ready = tuple(token for at, token in self._tokens if at < length or not self._held)
        self._tokens = [(at - length, token) for at, token in self._tokens if at >= length and self._held]
        if not text and not ready:
            return []
        return [TextDelta(choice=self._choice, text=text, tokens=ready)]
