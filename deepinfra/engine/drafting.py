"""Drafts: asks the Speculator between steps, gates what it proposes, and tells it what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from deepinfra.core.drafts import CostCurve, Draft, DraftOutcome, RowConfidence, TokenView
from deepinfra.core.ids import SeqId
from deepinfra.core.model import ExecutorLimits
from deepinfra.engine.live import Live
from deepinfra.interfaces.speculator import Speculator

__all__ = ("Drafting",)

_SAMPLES = 3


class Drafting:
    """One pool's use of its Speculator. Whatever it proposes, only speed can change."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._verified = self._accepted = 0
        self._seconds: dict[int, tuple[int, float]] = {}

    @property
    def counts(self) -> tuple[int, int]:
        """(verified, accepted) drafts so far."""
        return self._verified, self._accepted

    def propose(self, running: Mapping[SeqId, Live], limits: ExecutorLimits) -> None:
        """Give every decoding sequence its drafts for the next step."""
        views = [
            TokenView(live.spec.seq, live.tokens, limit)
            for live in running.values()
            if not live.over
            and live.todo == 1
            and (limit := min(self._speculator.max_drafts, live.room - 1, limits.max_context - len(live.tokens))) > 0
        ]
        if not views:
            return
        most = {view.seq: view.limit for view in views}
        drafts = [draft for draft in self._speculator.propose(views) if draft.seq in most]
        rows = [RowConfidence(draft.seq, draft.confidences[: most[draft.seq]]) for draft in drafts]
        lengths = self._speculator.allot(rows, self._curve()).lengths
        for draft, length in zip(drafts, lengths, strict=False):
            length = max(0, min(length, most[draft.seq]))
            # No model can verify what is no token of its own, nor what comes behind it.
            tokens = tuple(takewhile(lambda token: 0 <= token < limits.vocab_size, draft.tokens[:length]))
            if (matcher := running[draft.seq].matcher) is not None:
                tokens = tokens[: matcher.admits(tokens)]
            kept = Draft(draft.seq, tokens, draft.confidences[: len(tokens)]) if tokens else None
            running[draft.seq].drafts = kept

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Pass outcomes on."""
        if outcomes:
            self._verified += sum(outcome.verified for outcome in outcomes)
            self._accepted += sum(outcome.accepted for outcome in outcomes)
            self._speculator.observe(outcomes)

    def timed(self, tokens: int, seconds: float) -> None:
        """Learn what a step with only decoding rows cost."""
        count, mean = self._seconds.get(tokens, (0, seconds))
        weight = max(0.1, 1 / (count + 1))
        self._seconds[tokens] = (count + 1, mean + weight * (seconds - mean))

    def forget(self, live: Live) -> None:
        """A sequence is over."""
        self._speculator.forget(live.spec.seq)

    def _curve(self) -> CostCurve:
        """Measured seconds by step size, made non-decreasing; empty until two sizes are known.

        A size counts after `_SAMPLES` steps only: one unlucky first step must not keep it from being tried again.
        """
        sizes = sorted(size for size, (count, _) in self._seconds.items() if count >= _SAMPLES)
        if len(sizes) < 2:
            return CostCurve((), ())
        times: list[float] = []
        for size in sizes:
            times.append(max(self._seconds[size][1], times[-1] if times else 0.0))
        return CostCurve(tuple(sizes), tuple(times))
