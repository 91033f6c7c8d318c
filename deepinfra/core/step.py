"""One step of a pool: what a Scheduler sees and chooses, what an Executor is told, what comes back.

Rows are NamedTuples of plain values, so that a plan crosses a process as msgpack. Read them by name only: new fields
are appended with a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from deepinfra.core.experts import ExpertLoad, Placement
from deepinfra.core.ids import BlockId, BlockKey, Epoch, SeqId
from deepinfra.core.sampling import SamplingParams

__all__ = (
    "Backlog",
    "BucketStats",
    "Choice",
    "DoneRow",
    "Fill",
    "Grant",
    "Job",
    "MaskRows",
    "Prefix",
    "RunRow",
    "SchedulerStats",
    "SeqFailure",
    "SeqOpen",
    "SeqOutput",
    "Snapshot",
    "StepPlan",
    "StepReport",
    "StepResult",
    "StepView",
    "TenantStats",
    "TokenProbs",
    "WorkItem",
)


# -- scheduler ------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A sequence that asks to be scheduled.

    `tokens` are known tokens (all need KV but the last sampled one); `cached` of them are expected from device or
    store; `max_new` more may be generated. Times are seconds of the injected clock. A stream that has `begun`, in
    another pool, is neither refused nor shed. The same `prompt` that comes again has the same number; 0 is unknown.
    """

    seq: SeqId
    tokens: int
    cached: int
    max_new: int
    arrived_at: float
    tenant: str = "public"
    priority: int = 0
    deadline: float | None = None
    begun: bool = False
    prompt: int = 0

    @property
    def uncached(self) -> int:
        """Prompt tokens that must be computed, at least 1."""
        return max(1, self.tokens - self.cached)


class RunRow(NamedTuple):
    """A sequence that holds blocks: `todo` known tokens lack KV (1 = it decodes), `drafts` are ready to verify."""

    seq: SeqId
    todo: int
    length: int
    blocks: int
    drafts: int = 0


class Prefix(NamedTuple):
    """What a waiting sequence would begin behind if it were opened now.

    Attributes:
        cached: Tokens that need not be computed, once what the store has of them is loaded.
        next: The first block that the device lacks; `None` if it lacks no full one. Sequences with the same `next`
            would compute the same block, side by side.
        under_way: Whether a running sequence is about to compute that block, or a load to bring it.
    """

    cached: int
    next: BlockKey | None = None
    under_way: bool = False


class StepView(NamedTuple):
    """What a Scheduler may know when it chooses.

    `fetchable` are waiting sequences with blocks in the store whose load has not been started; `loading` ones are
    best left alone until their load arrives (planned all the same, they compute those tokens instead). So are those
    whose `Prefix.next` is under way, or is what another one that is chosen to be opened will compute. A chunk that is
    not a prompt's last ends on a multiple of `grid`, so a smaller grant may come to nothing.

    `waiting` says what waiting sequences would find. It is looked up when it is read, in about a microsecond: read a
    few of it in a plan, not all. It and the two sets hold until the plan returns.
    """

    now: float
    step: int
    max_step_tokens: int
    max_seqs: int
    block_size: int
    num_blocks: int
    free_blocks: int
    running: tuple[RunRow, ...]
    fetchable: Set[SeqId] = frozenset()
    loading: Set[SeqId] = frozenset()
    grid: int = 1
    waiting: Mapping[SeqId, Prefix] = {}


class Grant(NamedTuple):
    """A sequence and the most tokens it may compute in this step, drafts included."""

    seq: SeqId
    max_tokens: int


class Choice(NamedTuple):
    """A Scheduler's decision.

    `run` in order of claim on blocks and budget; waiting sequences in it are opened. `preempt` are running sequences
    that may lose their blocks if a running one's claim does not fit, first victim first; a sequence that is being
    opened never preempts. `fetch` starts loads. `shed` ends waiting
    sequences with `overloaded`.

    `repeat` says for how many steps in a row the choice would be the same if nothing happened but that every sequence
    in it decoded one token per step: nobody waits who could be opened, no load, no deadline, no draft. A Scheduler
    that does not know says 1. The engine uses it with executors that provide `repeat`.
    """

    run: tuple[Grant, ...] = ()
    preempt: tuple[SeqId, ...] = ()
    fetch: tuple[SeqId, ...] = ()
    shed: tuple[SeqId, ...] = ()
    repeat: int = 1


class DoneRow(NamedTuple):
    """What one sequence did in a step: `length` positions from `start`, `drafts` of them unverified, `sampled` kept."""

    seq: SeqId
    start: int
    length: int
    drafts: int
    sampled: int
    opened: bool


class StepReport(NamedTuple):
    """What became of a Choice; `rows` of sequences that are over are included, `seconds` is the executor's time."""

    step: int
    seconds: float
    rows: tuple[DoneRow, ...]
    preempted: tuple[SeqId, ...] = ()
    loaded: tuple[SeqId, ...] = ()


class BucketStats(NamedTuple):
    """One length bucket of a Scheduler.

    Attributes:
        least: Uncached prompt tokens from which a sequence belongs to it.
        waiting: Sequences that wait.
        waiting_tokens: Their prompt tokens without cache.
        oldest_s: Seconds that the one waits which has waited longest; 0 if none does.
        opened: Sequences opened so far, each once however often it was preempted.
        overtaken: How often sequences of it were passed while they waited, in all.
        overtaken_most: How often the one was passed that was passed most often.
        tokens: Prompt tokens computed so far.
        predicted_s: Seconds that these were predicted to take.
    """

    least: int
    waiting: int = 0
    waiting_tokens: int = 0
    oldest_s: float = 0.0
    opened: int = 0
    overtaken: int = 0
    overtaken_most: int = 0
    tokens: int = 0
    predicted_s: float = 0.0


class TenantStats(NamedTuple):
    """One tenant's numbers; those of all that are not told alone have the name `*`.

    Attributes:
        waiting: Sequences that wait.
        waiting_tokens: Their prompt tokens without cache.
        running: Sequences that run.
        opened: Sequences opened so far, each once however often it was preempted.
        refused: Sequences not admitted, by a limit of its own or because everything was full.
        shed: Waiting sequences ended so that others had room.
        served_s: Predicted seconds of work of those that were opened.
    """

    tenant: str
    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    opened: int = 0
    refused: int = 0
    shed: int = 0
    served_s: float = 0.0


class SchedulerStats(NamedTuple):
    """A Scheduler's numbers, for whoever exports them.

    Attributes:
        learned: Steps from which it learned how long steps take.
        error_median: Relative error of the latest predictions, each made before its step was learned from; `None`
            before there was one.
        error_p95: The error that 95 % of them do not exceed.
        backlog_tokens: Prompt tokens without cache of sequences that wait.
        backlog_s: Seconds that computing these is predicted to take.
        refused: Sequences not admitted.
        shed: Waiting sequences ended so that others had room.
        buckets: Of each length bucket, shortest first.
        budget_s: Seconds that steps were allowed to take by its aims, over steps that had an aim.
        predicted_s: Seconds that these were predicted to take.
        measured_s: Seconds that they took.
        max_overtakes: How often a sequence may be passed; `None`: no bound is kept.
        max_wait_steps: Steps after which a sequence, of the lowest priority too, is opened before all that came later
            once there is a seat and room for it; `None`: no bound is kept. Of a tenant that may not run more, a
            sequence is passed and has waited, for both bounds, only from when the tenant may run it.
        tenants: Of each tenant that is told alone, and of the others together, by name; their number is bounded.
        refused_by_tenant: Of `refused`, those that met a limit of their own tenant.
        expired: Waiting sequences ended because their deadline had passed.
    """

    learned: int = 0
    error_median: float | None = None
    error_p95: float | None = None
    backlog_tokens: int = 0
    backlog_s: float = 0.0
    refused: int = 0
    shed: int = 0
    buckets: tuple[BucketStats, ...] = ()
    budget_s: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    max_overtakes: int | None = None
    max_wait_steps: int | None = None
    tenants: tuple[TenantStats, ...] = ()
    refused_by_tenant: int = 0
    expired: int = 0


class Backlog(NamedTuple):
    """What waits: prompt tokens without cache, and the seconds that computing these is predicted to take."""

    tokens: int = 0
    seconds: float = 0.0


# -- executor -------------------------------------------------------------------------------------


class Fill(NamedTuple):
    """Copy a staging slot's payload into a block, before anything of this step reads it."""

    slot: int
    block: BlockId


class SeqOpen(NamedTuple):
    """A whole record of a sequence, told once per epoch.

    `blocks` are the first entries of its block table: published blocks to read only, then filled ones. `restore` is
    the staging slot with the snapshot of its windows and states at the position where its first item starts; without
    one (-1) that item and those after it see nothing of windows below that position.
    """

    seq: SeqId
    epoch: Epoch
    tokens: tuple[int, ...]
    prompt_len: int
    blocks: tuple[BlockId, ...]
    seed: int
    choice: int = 0
    sampling: SamplingParams = SamplingParams()
    restore: int = -1


class WorkItem(NamedTuple):
    """Positions to compute for one sequence.

    Computes `start .. start+length-1`; the last `len(drafts)` of them are unverified drafts proposed by the host.
    Positions below `write_from` are computed without writing KV of full groups (their blocks are published).
    `blocks` are appended to the block table. `samples` is false for a prefill chunk that is not the last.
    """

    seq: SeqId
    epoch: Epoch
    start: int
    length: int
    write_from: int
    samples: bool
    blocks: tuple[BlockId, ...] = ()
    drafts: tuple[int, ...] = ()
    head_drafts: int = 0


class Snapshot(NamedTuple):
    """Copy a sequence's windows and states as they were behind `position` positions into a staging slot's payload.

    Taken before anything else of its step, so after all steps before it. `position` is a block boundary that the
    sequence has computed, at most `KVLayout.snapshot_reach` positions back.
    """

    seq: SeqId
    epoch: Epoch
    position: int
    slot: int


class StepPlan(NamedTuple):
    """One step, told as differences. Order of meaning: `snapshots`, `closed`, `opened`, `fills`, `items`.

    With `repeat` over 1 (only to executors that provide `repeat`) the items are single rows that sample, without
    drafts and masks, and the executor goes on by itself: it computes them so many times in a row, each time one
    position further, with blocks that they have. `StepHandle.cut` ends it early.
    """

    step: int
    items: tuple[WorkItem, ...]
    opened: tuple[SeqOpen, ...] = ()
    closed: tuple[SeqId, ...] = ()
    fills: tuple[Fill, ...] = ()
    masked: bool = False
    placement: Placement | None = None
    snapshots: tuple[Snapshot, ...] = ()
    repeat: int = 1


class MaskRows(NamedTuple):
    """Token masks for rows that sample: bit `t` of a row allows token `t`; rows are `ceil(vocab/8)` bytes each."""

    seqs: tuple[SeqId, ...]
    rows_per_seq: tuple[int, ...]
    bits: bytes


class TokenProbs(NamedTuple):
    """Natural logarithm of the chosen token's probability, and (token, logprob) of the likeliest, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SeqOutput(NamedTuple):
    """What a sequence got: nothing (chunk), or accepted drafts and one more token.

    `probs` has one entry per token if the sequence asked for logprobs. `head_drafts` and `confidences` come from a
    draft head inside the executor.
    """

    seq: SeqId
    epoch: Epoch
    tokens: tuple[int, ...]
    probs: tuple[TokenProbs, ...] = ()
    head_drafts: int = 0
    confidences: tuple[float, ...] = ()


class SeqFailure(NamedTuple):
    """A sequence whose rows failed alone (for example NaN logits); the step's others are good."""

    seq: SeqId
    why: str


class StepResult(NamedTuple):
    """Outputs of one step; `seconds` is time inside the executor.

    Of a repeated step `each_s` are the seconds of each time it was computed, and every output has as many tokens.
    """

    step: int
    outputs: tuple[SeqOutput, ...]
    seconds: float
    failed: tuple[SeqFailure, ...] = ()
    expert_load: ExpertLoad | None = None
    each_s: tuple[float, ...] = ()
