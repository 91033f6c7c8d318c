"""KVStore: bytes by key. The part people replace with Redis, S3, Mooncake or a peer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from anyio.lowlevel import checkpoint

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import (
    Forgotten,
    KVRecord,
    KVStats,
    Loaded,
    Match,
    NamespaceFilter,
    RecordRef,
    Retention,
)
from deepinfra.interfaces.component import Component

__all__ = ("KVStore",)


class KVStore(Component):
    """Moves records; the engine frames them before `save` and checks the frame after `load`.

    A cache: losing anything at any time is allowed and counted, delivering other bytes than were saved under a key is
    what the frame catches. No method raises for damage, absence, a full disk or an unreachable server: those are
    misses. All methods may be called concurrently; a cancelled call leaks nothing.
    """

    durable: bool = True
    """Whether records leave this process's RAM, for a disk or a network, and are there when the store is entered again.

    A durable store leaves records whose `Retention.disk` is false.
    """

    promotes: bool = False
    """Whether blocks that were loaded should be given to `save` once more, so that a faster tier can keep them."""

    @abstractmethod
    async def match(self, keys: Sequence[BlockKey]) -> Match:
        """Longest leading run of `keys` held (kind `block`). Reads no payload; answers from an index where it can."""

    @abstractmethod
    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        """Read records into buffers.

        Args:
            refs: From `match`, in order, any leading or inner slice of it.
            into: One writable buffer per ref, `ref.nbytes` long; owned by the caller, valid until this returns (also
                when cancelled: a store that cannot stop a read waits for it before it lets go).

        Returns:
            How many leading records were delivered whole; buffers behind them hold anything.
        """

    @abstractmethod
    async def save(self, records: Sequence[KVRecord]) -> None:
        """Take records, parents before children; returns when their `data` may be reused.

        A record already held is not written again. What cannot be written is dropped and counted in `stats`.
        """

    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        """Tell that records were used above (in RAM or on the device), so that their life slides; default: nothing.

        Args:
            keys: Of one sequence, in order: of the snapshots at their ends, only the last one is used.
            retention: How they would be kept if they were saved now.

        Returns:
            Those whose blocks the store would like to be given (once more) now that they were used, parents first. They
            come with a `save` if they are still on the device; nothing is promised.
        """
        await checkpoint()
        return ()

    async def successors(self, parent: BlockKey, most: int = 64) -> Sequence[tuple[int, ...]]:
        """Token ids of some held blocks that continue `parent` (a namespace's root: first blocks); default: none.

        To explain a miss in text. May read much; the caller bounds the time.
        """
        await checkpoint()
        return ()

    @abstractmethod
    async def forget(self, which: NamespaceFilter) -> Forgotten:
        """Remove every record that `which.matches`; when this returns none of them can be matched or loaded."""

    @abstractmethod
    def stats(self) -> KVStats:
        """Accounting, from memory; `nbytes` equals the live and dead bytes actually held."""
