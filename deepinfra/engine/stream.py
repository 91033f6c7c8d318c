"""Streams of events between a request's tasks and whoever reads them: merging, never blocking the writer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from deepinfra.core.events import Event, Failed, Finished, ReasoningDelta, TextDelta, ToolArgumentsDelta
from deepinfra.core.request import CachedTokens, Prompt, Usage
from deepinfra.engine.explain import Explanation

if TYPE_CHECKING:
    from deepinfra.engine.receipts.record import Receipt

__all__ = ("Mailbox", "Signal", "Stream")


class Signal:
    """An event that can be waited for again and again; `set` before `wait` is not lost."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None
        self._flag = False

    def set(self) -> None:
        """Wake the waiter, or let the next `wait` return at once."""
        self._flag = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Return when `set` was called since the last `wait` returned. One waiter at a time."""
        if not self._flag:
            self._event = anyio.Event()
            try:
                await self._event.wait()
            finally:
                self._event = None
        else:
            await anyio.lowlevel.checkpoint()
        self._flag = False


def _merged(first: Event, second: Event) -> Event | None:
    """One event that says both, or `None`."""
    if type(first) is not type(second) or first.choice != second.choice:
        return None
    if isinstance(first, TextDelta) and isinstance(second, TextDelta):
        return TextDelta(choice=first.choice, text=first.text + second.text, tokens=first.tokens + second.tokens)
    if isinstance(first, ReasoningDelta) and isinstance(second, ReasoningDelta):
        return ReasoningDelta(choice=first.choice, text=first.text + second.text, tokens=first.tokens + second.tokens)
    if isinstance(first, ToolArgumentsDelta) and isinstance(second, ToolArgumentsDelta) and first.index == second.index:
        return ToolArgumentsDelta(choice=first.choice, index=first.index, arguments=first.arguments + second.arguments)
    return None


class Mailbox:
    """Events of one request: written by its sequences' tasks, read by one reader.

    What is unread is merged, so that its size is bounded by the answer's own, however slow the reader is.
    """

    def __init__(self) -> None:
        self._cells: deque[list[Event]] = deque()
        self._newest: dict[int, list[Event]] = {}
        self._signal = Signal()
        self.unread_since: float | None = None

    def put(self, events: Iterable[Event], now: float) -> None:
        """Add events; never waits. `now` is when, in clock seconds. Order is kept within a choice only."""
        for event in events:
            cell = self._newest.get(event.choice)
            if cell is not None and (both := _merged(cell[0], event)) is not None:
                cell[0] = both
            else:
                self._newest[event.choice] = cell = [event]
                self._cells.append(cell)
        if self._cells:
            if self.unread_since is None:
                self.unread_since = now
            self._signal.set()

    async def get(self) -> Event:
        """Wait for the next event."""
        while not self._cells:
            await self._signal.wait()
        return self._pop()

    def get_nowait(self) -> Event | None:
        """The next event if there is one."""
        return self._pop() if self._cells else None

    def _pop(self) -> Event:
        self.unread_since = None
        cell = self._cells.popleft()
        (event,) = cell
        if self._newest.get(event.choice) is cell:
            del self._newest[event.choice]
        return event


class Stream:
    """An answer under way: iterate over its events; it ends when every choice is `Finished` or `Failed`.

    Attributes:
        prompt: What was rendered.
        seed: The seed in use, given or drawn.
        n: Number of choices.
        explanation: Why no more of the prompt was found, if the request asked for it; there with the first event.
        receipt: What decided the tokens, if the request asked for it; there behind the last event, unless one failed.
    """

    def __init__(self, prompt: Prompt, seed: int, n: int, mailbox: Mailbox) -> None:
        self.prompt, self.seed, self.n = prompt, seed, n
        self.explanation: Explanation | None = None
        self._mailbox = mailbox
        self._receipt: Callable[[], Receipt | None] = lambda: None
        self._logprobs: Callable[[int, int], str] = lambda choice, tokens: ""
        self._usage: dict[int, Callable[[], Usage]] = {}
        self._open = n

    @property
    def usage(self) -> Usage:
        """Tokens so far over all choices; the prompt counts once, cached and written as choice 0 found it.

        One choice that is an approximation makes the answer one.
        """
        by_choice = {choice: usage() for choice, usage in self._usage.items()}
        usages = by_choice.values()
        if not usages:
            return Usage(prompt_tokens=len(self.prompt.ids))
        cached = by_choice[0].cached if 0 in by_choice else CachedTokens()
        return Usage(
            prompt_tokens=len(self.prompt.ids),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
            cached=replace(cached, approximate=any(usage.cached.approximate for usage in usages)),
            cache_write_tokens=by_choice[0].cache_write_tokens if 0 in by_choice else 0,
        )

    @property
    def receipt(self) -> Receipt | None:
        """See the class."""
        return None if self._open else self._receipt()

    def logprobs_digest(self, choice: int, tokens: int) -> str:
        """What a receipt would say of the log-probabilities of a choice's first `tokens`; empty if it says nothing."""
        return self._logprobs(choice, tokens)

    def certify(self, receipt: Callable[[], Receipt | None], logprobs: Callable[[int, int], str]) -> None:
        """Note who writes the receipt, and who knows digests; called by the engine."""
        self._receipt, self._logprobs = receipt, logprobs

    def count(self, choice: int, usage: Callable[[], Usage]) -> None:
        """Note who knows a choice's tokens so far; called by the engine."""
        self._usage[choice] = usage

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        if self._open == 0:
            raise StopAsyncIteration
        return self._seen(await self._mailbox.get())

    def next_nowait(self) -> Event | None:
        """The next event if it is there already: lets a writer put what is ready into one chunk."""
        if self._open == 0:
            return None
        event = self._mailbox.get_nowait()
        return None if event is None else self._seen(event)

    def _seen(self, event: Event) -> Event:
        if isinstance(event, Finished | Failed):
            self._open -= 1
        return event
