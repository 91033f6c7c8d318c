"""A sequence while it lives in a pool: the one mutable record that planner, loader, saver and pool share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepinfra.core.drafts import Draft
from deepinfra.core.ids import BlockId, BlockKey, Epoch
from deepinfra.core.kv import PublicBlocks, RecordRef, block_keys, parent_key
from deepinfra.core.request import PUBLIC, CachedTokens, SeqSpec
from deepinfra.core.step import TokenProbs
from deepinfra.engine.explain import Miss
from deepinfra.engine.matcher import Matcher
from deepinfra.engine.stream import Signal
from deepinfra.interfaces.kvstore import KVStore

__all__ = ("Delta", "Ending", "Live", "Owner", "Source")


class Source(NamedTuple):
    """Where blocks of a prompt can be loaded from: a store (or a handoff), its refs in key order, tier names.

    `ages_s` are seconds since the oldest of a tier's records was saved; `snapshots` are indices of blocks at whose end
    there is said to be one.
    """

    store: KVStore
    refs: tuple[RecordRef, ...]
    tiers: tuple[str, ...]
    ages_s: Mapping[str, float]
    snapshots: tuple[int, ...] = ()


class Owner(NamedTuple):
    """Whose a block is: its tenant, the root of the chain of keys it is in, and the key it is chained from."""

    tenant: str
    namespace: BlockKey
    parent: BlockKey


class Ending(NamedTuple):
    """Why a sequence is over: `stop`, `length`, `handoff`, or the code of an error with its sentence.

    `retry_after_s` is when it is worth asking again, where waiting helps.
    """

    reason: str
    message: str = ""
    retry_after_s: float | None = None

    @property
    def failed(self) -> bool:
        """Whether this is an error."""
        return self.reason not in ("stop", "length", "handoff")


class Delta(NamedTuple):
    """New tokens of a sequence, merged since it was last read; `ending` is set on the last one.

    `ends` say when the last so many of them were computed, in clock seconds, if a repeated step gave them.
    """

    tokens: tuple[int, ...]
    probs: tuple[TokenProbs, ...]
    ending: Ending | None
    ends: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class Live:
    """One sequence in one pool.

    Attributes:
        spec: What was asked.
        root: Root key of its tenant's namespace.
        public: Its leading blocks that are no tenant's own, if any.
        tokens: Known tokens, append-only; all but the last sampled one will have KV.
        keys: Keys of the full blocks of `tokens`, extended when needed.
        table: Its blocks in order; empty while it waits.
        computed: Positions `0 .. computed-1` have valid KV in `table`, and windows at their end; behind a replay, more
            blocks of `table` have it.
        reached: Behind the furthest row computed in this epoch, rejected drafts included.
        right_from: From this position on, windows are right.
        published: Leading blocks of `table` that are in the prefix index.
        epoch: Counts openings on the executor.
        running: Holds blocks and is open on the executor.
        drafts: Proposed next tokens, for the next step only.
        prefill_only: Ends after the first sampled token, keeping its blocks for a handoff.
        over: Takes no part in further steps.
        cached: Prompt tokens that were not computed, fixed at the first opening.
        approximate: It began again behind windows that are approximations, or began with such: no cached token says so.
        written: Prompt tokens that were computed and can be found again, fixed at the first opening.
        matcher: Where it stands in its constraint: behind the last of `tokens`.
        miss: Where the search for its blocks ended, if it is to be explained.
        found: Its leading blocks that were last seen on the device.
        fetched: Whether its load was started, on this executor.
        bringing: Whether that has still blocks to bring.
    """

    spec: SeqSpec
    root: BlockKey
    tokens: list[int]
    prefill_only: bool = False
    keys: list[BlockKey] = field(default_factory=list)
    table: list[BlockId] = field(default_factory=list)
    computed: int = 0
    reached: int = 0
    right_from: int = 0
    published: int = 0
    epoch: Epoch = Epoch(0)
    running: bool = False
    opened_before: bool = False
    over: bool = False
    losses: int = 0
    drafts: Draft | None = None
    source: Source | None = None
    loaded_tiers: dict[BlockKey, str] = field(default_factory=dict)
    cached: CachedTokens = field(default_factory=CachedTokens)
    written: int = 0
    opened_at: float | None = None
    matcher: Matcher | None = None
    public: PublicBlocks | None = None
    miss: Miss | None = None
    approximate: bool = False
    found: int = 0
    fetched: bool = False
    bringing: bool = False
    _tokens_out: list[int] = field(default_factory=list)
    _probs_out: list[TokenProbs] = field(default_factory=list)
    _ends: tuple[float, ...] = ()
    _ending: Ending | None = None
    _signal: Signal = field(default_factory=Signal)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._ending is not None and self._ending.failed

    @property
    def todo(self) -> int:
        """Known tokens without KV; 1 means it decodes."""
        return len(self.tokens) - self.computed

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return self.spec.max_tokens - (len(self.tokens) - self.spec.prompt_len)

    def extend_keys(self, block_size: int) -> list[BlockKey]:
        """Keys of all full blocks of the known tokens."""
        if len(self.keys) < len(self.tokens) // block_size:
            self.keys = block_keys(self.root, self.tokens, block_size, known=self.keys, public=self.public)
        return self.keys

    def owner(self, index: int) -> Owner:
        """Whose block `index` is."""
        public = self.public
        parent = parent_key(self.root, self.keys, index, public)
        if public is None:
            return Owner(self.spec.tenant, self.root, parent)
        if index < public.blocks:
            return Owner(PUBLIC, public.root, parent)
        return Owner(self.spec.tenant, parent_key(self.root, self.keys, public.blocks, public), parent)

    def reset(self) -> None:
        """Forget device state (preempted, or the executor was lost); blocks are the caller's business."""
        self.table, self.computed, self.published = [], 0, 0
        self.reached = self.right_from = 0
        self.running, self.drafts = False, None

    def push(
        self,
        tokens: Sequence[int],
        probs: Sequence[TokenProbs],
        ending: Ending | None,
        ends: tuple[float, ...] = (),
    ) -> None:
        """Hand tokens to the sequence's own task; never waits."""
        if tokens:
            self._tokens_out.extend(tokens)
            self._probs_out.extend(probs)
            self._ends = (*self._ends, *ends) if ends else ()
        if ending is not None and self._ending is None:
            self._ending, self.over = ending, True
        self._signal.set()

    async def next(self) -> Delta:
        """Wait for tokens or the end."""
        while not self._tokens_out and self._ending is None:
            await self._signal.wait()
        return self.take()

    def take(self) -> Delta:
        """What is there now."""
        delta = Delta(tuple(self._tokens_out), tuple(self._probs_out), self._ending, self._ends)
        self._tokens_out, self._probs_out, self._ends = [], [], ()
        return delta
