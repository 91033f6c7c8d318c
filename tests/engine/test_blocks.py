from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deepinfra.core.ids import BlockId, BlockKey
from deepinfra.engine.blocks import BlockPool

SIZE = 6


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 32)


class BlockMachine(RuleBasedStateMachine):
    """Plays sequences that take, publish, share and release blocks, against a model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE, 2)
        self.held: list[list[BlockId]] = []
        self.holds: dict[BlockKey, BlockId] = {}
        self.copied: list[BlockId] = []

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        before = self.pool.free_blocks
        taken = self.pool.take(count)
        if count > before:
            assert taken is None
            assert self.pool.free_blocks == before
        else:
            assert taken is not None
            assert len(set(taken)) == count
            assert not set(taken) & {block for blocks in (*self.held, self.copied) for block in blocks}
            self.held.append(taken)
            self.holds = {k: b for k, b in self.holds.items() if b not in taken}

    @rule(number=st.integers(0, 9), data=st.data())
    def publish(self, number: int, data: st.DataObject) -> None:
        owned = [block for blocks in self.held for block in blocks]
        if owned:
            block = data.draw(st.sampled_from(owned))
            fresh = key(number) not in self.holds and block not in self.holds.values()
            assert self.pool.publish(block, key(number)) == fresh
            if fresh:
                self.holds[key(number)] = block

    @rule(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def share(self, numbers: list[int]) -> None:
        found = self.pool.match([key(number) for number in numbers])
        self.pool.share(found)
        self.held.append(list(found))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(numbers=st.sets(st.integers(0, 9), max_size=4))
    def copy(self, numbers: set[int]) -> None:
        self.pool.let_go(self.copied)
        self.copied = [self.holds[name] for number in numbers if (name := key(number)) in self.holds]
        self.pool.hold(self.copied)

    @rule(number=st.integers(0, 9))
    def unpublish(self, number: int) -> None:
        if (block := self.holds.pop(key(number), None)) is not None:
            self.pool.unpublish(block)

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        used = {block for blocks in (*self.held, self.copied) for block in blocks}
        assert self.pool.free_blocks == SIZE - len(used)

    @invariant()
    def the_index_finds_what_was_published(self) -> None:
        for name, block in self.holds.items():
            assert self.pool.find(name) == block
        assert self.pool.cached_blocks == len(self.holds)


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=150, deadline=None)


def test_the_tail_of_a_released_prefix_goes_before_its_head() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.take(3)
    assert blocks is not None
    for number, block in enumerate(blocks):
        pool.publish(block, key(number))
    pool.release(blocks)
    pool.take(1)
    assert pool.match([key(0), key(1), key(2)]) == blocks[:2]


def test_copying_a_prefix_in_batches_leaves_its_tail_to_go_first() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.take(4)
    assert blocks is not None
    for number, block in enumerate(blocks):
        pool.publish(block, key(number))
    pool.release(blocks)
    for batch in (blocks[:2], blocks[2:]):
        pool.hold(batch)
        pool.let_go(batch)
    pool.take(2)
    assert pool.match([key(number) for number in range(4)]) == blocks[:2]


def test_an_unpublished_block_is_free_again() -> None:
    pool = BlockPool(1, 2)
    blocks = pool.take(1)
    assert blocks is not None
    pool.publish(blocks[0], key(1))
    pool.release(blocks)
    pool.unpublish(blocks[0])
    assert pool.find(key(1)) is None
    assert pool.free_blocks == 1
