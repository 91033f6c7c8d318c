"""The block pool: which device blocks are free, who reads them, and which prefix each published one holds.

A block is *owned* (one reference, being written), *published* (its key is in the prefix index; read-only, any number
of references) or *free*. A published block without references stays in the index until its memory is needed; the
least recently released goes first, and a sequence releases its tail first, so that what is left of a prefix is usable.
One that is only *held* for a copy keeps its place in that order, and its memory.

Source: reference counts, prefix index and LRU of unreferenced blocks are vLLM's block pool in idea.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice

from deepinfra.core.ids import BlockId, BlockKey

__all__ = ("BlockPool",)


class BlockPool:
    """Device blocks `0 .. num_blocks - 1` of `block_size` positions each. Not thread-safe; private to a pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._refs = [0] * num_blocks
        self._free: deque[BlockId] = deque(BlockId(i) for i in range(num_blocks))
        self._idle: OrderedDict[BlockId, None] = OrderedDict()
        self._held: set[BlockId] = set()
        self._held_idle = 0
        self._key_of: dict[BlockId, BlockKey] = {}
        self._block_of: dict[BlockKey, BlockId] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken now: never used ones, and published ones nobody reads."""
        return len(self._free) + len(self._idle) - self._held_idle

    @property
    def cached_blocks(self) -> int:
        """Blocks in the prefix index, read or not."""
        return len(self._key_of)

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Blocks of the longest leading run of `keys` in the index; takes no reference."""
        found: list[BlockId] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def reach(self, keys: Sequence[BlockKey]) -> int:
        """How long `match` would be, by a look at a few keys: a prefix is forgotten from its tail, nearly always."""
        return bisect_left(keys, True, key=lambda key: key not in self._block_of)

    def find(self, key: BlockKey) -> BlockId | None:
        """The block that holds `key`, if any; takes no reference."""
        return self._block_of.get(key)

    def take(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one reference each, or `None` and no change. Forgets the oldest idle prefixes."""
        if not count:
            return []
        if count > self.free_blocks:
            return None
        taken = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        oldest = (block for block in self._idle if block not in self._held)
        for block in list(islice(oldest, count - len(taken))):
            del self._idle[block]
            del self._block_of[self._key_of.pop(block)]
            taken.append(block)
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Take one more reference on published blocks."""
        for block in blocks:
            self._wake(block)
            self._refs[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give back one reference each, last block first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                    self._held_idle += block in self._held
                elif block not in self._held:
                    self._free.append(block)

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Keep published blocks from being taken while they are copied, which is no use of them; none twice."""
        self._held.update(blocks)
        self._held_idle += sum(block in self._idle for block in blocks)

    def let_go(self, blocks: Sequence[BlockId]) -> None:
        """End a `hold`."""
        for block in blocks:
            self._held_idle -= block in self._idle
            self._held.discard(block)
            if not self._refs[block] and block not in self._key_of:
                self._free.append(block)

    def publish(self, block: BlockId, key: BlockKey) -> bool:
        """Put a completely written block into the index; `False` if the key or the block is there already."""
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def unpublish(self, block: BlockId) -> None:
        """Take a block out of the index (its bytes are not trusted any more); no effect if it is not in it."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            if self._wake(block) and block not in self._held:
                self._free.append(block)

    def _wake(self, block: BlockId) -> bool:
        """Take a block out of the idle ones, if it is one."""
        if block not in self._idle:
            return False
        del self._idle[block]
        self._held_idle -= block in self._held
        return True
