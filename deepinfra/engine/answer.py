"""One answer: the task that follows a sequence through its pools and turns tokens into events."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio

from deepinfra.core.events import Event, Failed, Finished, ReasoningDelta, TokenLogprobs, ToolStart, TopLogprob
from deepinfra.core.request import CachedTokens, FinishReason, GenerateRequest, SeqSpec, Usage
from deepinfra.engine.explain import Miss, explanation_of
from deepinfra.engine.live import Delta, Ending, Live
from deepinfra.engine.meters import Meters
from deepinfra.engine.receipts.digest import LogprobDigest
from deepinfra.engine.receipts.record import Answered
from deepinfra.engine.stops import StopFilter
from deepinfra.engine.stream import Mailbox, Stream
from deepinfra.errors import ClientTimeoutError, DeadlineExceededError, EngineError
from deepinfra.interfaces.given import Clock
from deepinfra.interfaces.recipe import OutputParser, Recipe, Tokenizer

__all__ = ("Answer", "AnswerSettings")

_log = logging.getLogger("deepinfra.engine")


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What every answer of an engine shares."""

    recipe: Recipe
    clock: Clock
    meters: Meters
    client_timeout_s: float


class Answer:
    """Follows one choice of one request: tokens in, events into the request's mailbox.

    Runs in a task of its own and never waits for the client.
    """

    def __init__(
        self, settings: AnswerSettings, request: GenerateRequest, spec: SeqSpec, stream: Stream, mailbox: Mailbox
    ) -> None:
        self._settings, self._request, self.spec = settings, request, spec
        self._stream, self._mailbox = stream, mailbox
        self._tokenizer: Tokenizer = settings.recipe.tokenizer
        self._parser: OutputParser = settings.recipe.parser(stream.prompt, spec.choice)
        self._stops = StopFilter(request.stop, spec.choice)
        self._ids: list[int] = []
        self._logprob_digest: LogprobDigest | None = None
        if request.receipt and spec.sampling.logprobs is not None:
            self._logprob_digest = LogprobDigest()
        self._reason: FinishReason | None = None
        self._reasoning = self._undecided = 0
        self._called_tool = False
        self._cached = CachedTokens()
        self._written = 0
        self._last_at: float | None = None
        self.over = False

    async def follow(self, live: Live) -> Ending:
        """Read a sequence until it ends in this pool; a stop string ends it here."""
        while True:
            delta = await live.next()
            if not self._ids:
                self._cached = live.cached
                self._written = live.written if delta.tokens else 0
                if live.miss is not None and delta.tokens:
                    self._explain(live.miss)
            if live.approximate and not self._cached.approximate:
                self._cached = replace(self._cached, approximate=True)
            self._measure(live, delta)
            hit = self._take(delta)
            if hit:
                return Ending("stop")
            if delta.ending is not None:
                return delta.ending
            self._check_reader()

    def _explain(self, miss: Miss) -> None:
        recipe = self._settings.recipe
        try:
            explanation = explanation_of(miss, self.spec.tokens, recipe, cached=self._cached.total)
        except Exception:  # a door: no answer is failed by what is said about it
            _log.exception("a miss could not be explained")
        else:
            self._stream.explanation = explanation

    def _measure(self, live: Live, delta: Delta) -> None:
        if not delta.tokens:
            return
        now, meters = self._settings.clock.now(), self._settings.meters
        if self._last_at is None:
            meters.ttft.add(now - self.spec.arrived_at)
            if live.opened_at is not None:
                meters.queue_wait.add(live.opened_at - self.spec.arrived_at)
            meters.prompt_tokens += self.spec.prompt_len
            meters.cached(self._cached)
        else:
            self._measure_gaps(self._last_at, now, delta)
        self._last_at = delta.ends[-1] if delta.ends else now
        meters.generated_tokens += len(delta.tokens)

    def _measure_gaps(self, last: float, now: float, delta: Delta) -> None:
        """Count the times between tokens: what is known of each, and else the same for all since the last one."""
        itl, merged = self._settings.meters.itl, len(delta.tokens) - len(delta.ends)
        if merged:
            itl.add((now - last) / len(delta.tokens), merged)
            last = delta.ends[0] if delta.ends else now
        for end in delta.ends:
            itl.add(end - last)
            last = end

    def take_rest(self, live: Live) -> None:
        """Take what is there of a sequence that nobody follows any more."""
        delta = live.take()
        self._measure(live, delta)
        self._take(delta)

    def _take(self, delta: Delta) -> bool:
        """Parse a delta's tokens; returns whether a stop string ended the answer."""
        entries = self._logprobs(delta)
        shown: list[Event] = []
        # One by one, so that ids, logprobs and usage are cut at the token that completes a stop string, and every
        # token is counted as what it became, however the tokens were merged on their way here.
        for index, token in enumerate(delta.tokens):
            shown += self._feed(token, entries[index : index + 1])
            if self.stopped():
                break
        if delta.tokens:
            self._put(shown)
        return self.stopped()

    def _feed(self, token: int, entries: Sequence[TokenLogprobs]) -> Sequence[Event]:
        """Events of one token, cut at a stop string."""
        self._ids.append(token)
        if self._logprob_digest is not None:
            self._logprob_digest.add(entries)
        # A stop id ends the answer and is no part of it.
        if token in self.spec.stop_ids:
            return []
        self._undecided += 1
        events = self._parser.feed((token,), entries)
        self._count(events)
        if not self._request.stop:
            return events
        return [*self._stops.feed(events), *self._stops.peek(self._parser.space)]

    def _count(self, events: Sequence[Event]) -> None:
        """Count tokens, those that were held back included, as what the first event after them says they are."""
        if events:
            if isinstance(events[0], ReasoningDelta):
                self._reasoning += self._undecided
            self._undecided = 0
            self._called_tool = self._called_tool or any(isinstance(event, ToolStart) for event in events)

    def _logprobs(self, delta: Delta) -> Sequence[TokenLogprobs]:
        if not delta.probs:
            return ()
        data = self._tokenizer.token_bytes
        size = self._tokenizer.vocab_size

        def shown(token: int) -> bytes:
            return data(token) if token < size else b""

        return [
            TokenLogprobs(
                token,
                shown(token),
                probs.logprob,
                tuple(TopLogprob(other, shown(other), logprob) for other, logprob in probs.top),
            )
            for token, probs in zip(delta.tokens, delta.probs, strict=False)
        ]

    def _put(self, events: Sequence[Event]) -> None:
        self._stream.count(self.spec.choice, self._used)
        self._mailbox.put(events, self._settings.clock.now())

    def _check_reader(self) -> None:
        since = self._mailbox.unread_since
        timeout = self._settings.client_timeout_s
        if since is not None and self._settings.clock.now() - since > timeout:
            raise ClientTimeoutError(timeout)

    def stopped(self) -> bool:
        """Whether a stop string ended the answer."""
        return self._stops.stopped is not None

    def _used(self) -> Usage:
        return self.usage

    @property
    def usage(self) -> Usage:
        """Tokens of this answer so far."""
        return Usage(
            prompt_tokens=self.spec.prompt_len,
            completion_tokens=len(self._ids),
            reasoning_tokens=self._reasoning,
            cached=self._cached,
            cache_write_tokens=self._written,
        )

    def finish(self, ending: Ending) -> None:
        """Say the last word; only the first call counts."""
        if self.over:
            return
        self.over = True
        reason: FinishReason = "stop"
        if ending.reason == "length":
            reason = "context" if self._limited_by_context else "length"
        self._settings.meters.ended(ending.reason if ending.failed else reason)
        if ending.failed:
            failed = Failed(
                choice=self.spec.choice,
                code=ending.reason,
                message=ending.message,
                usage=self.usage,
                retry_after_s=ending.retry_after_s,
            )
            self._put([failed])
            return
        last: list[Event] = []
        if not self.stopped():
            held = self._parser.finish(reason)
            self._count(held)
            last = self._stops.feed(held)
            if self.stopped():
                reason = "stop"
            else:
                last += self._stops.flush()
        if self._called_tool and reason == "stop":
            reason = "tool_calls"
        self._reason = reason
        last.append(
            Finished(
                choice=self.spec.choice, reason=reason, usage=self.usage, stop=self._stops.stopped, seed=self.spec.seed
            )
        )
        self._put(last)

    @property
    def told(self) -> Answered | None:
        """What a receipt says of it; `None` unless it is complete."""
        if self._reason is None:
            return None
        return Answered(
            tokens=tuple(self._ids),
            finish=self._reason,
            stop=self._stops.stopped or "",
            logprobs=self.logprobs_digest(len(self._ids)),
        )

    def logprobs_digest(self, tokens: int) -> str:
        """Digest of the log-probabilities of its first tokens; empty where there is none."""
        return "" if self._logprob_digest is None else self._logprob_digest.hex(tokens)

    @property
    def _limited_by_context(self) -> bool:
        """Whether the model's context ends this answer before the request's own limit does."""
        wanted = self._request.max_tokens
        return wanted is None or wanted > self.spec.max_tokens

    def fail(self, error: EngineError) -> None:
        """End with an error event."""
        self.finish(Ending(error.code, str(error)))

    def handed_off(self, tokens: tuple[int, ...]) -> SeqSpec:
        """The sequence as the decode pool gets it."""
        return replace(self.spec, tokens=tokens)

    def deadline_scope(self) -> anyio.CancelScope:
        """A scope that ends with the request's own deadline."""
        if self.spec.deadline is None:
            return anyio.CancelScope()
        return anyio.move_on_after(max(0.0, self.spec.deadline - self._settings.clock.now()))

    def deadline_error(self) -> DeadlineExceededError:
        """The error of that deadline."""
        return DeadlineExceededError(self._request.deadline_s or 0.0)
