"""Windows of sequences: where they are kept, how long, and that a snapshot is what it says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfra.core.ids import Epoch, SeqId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.step import SeqOpen, Snapshot, StepPlan
from deepinfra.errors import StepFailed
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.config import decoder_config
from deepinfra.executors.torch.plan import window_pages, window_reach
from deepinfra.executors.torch.windows import Windows
from deepinfra.testing.host import Host

SIZE = 4


def executor(made: Any, name: str, **changes: Any) -> TorchExecutor:
    settings = {"dtype": "float32", "num_blocks": 48, "block_size": SIZE, "threads": 1, "num_slots": 3, "max_seqs": 4}
    return TorchExecutor(str(made(name)[0]), **{**settings, **changes})


def tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(320) for _ in range(count)]


def test_a_layout_has_a_window_for_layers_that_slide_beside_others(made: Any) -> None:
    layout = executor(made, "gemma3").layout
    full, window = layout.groups
    layer = 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 in float32
    assert (full.kind, full.layers, full.nbytes_per_token) == ("full", (2, 5), 2 * layer)
    assert (window.kind, window.layers, window.nbytes_per_token) == ("window", (0, 1, 3, 4), 4 * layer)
    assert window.window == 8
    assert layout.block_nbytes == SIZE * full.nbytes_per_token
    assert layout.snapshot_nbytes == 8 * window.nbytes_per_token
    assert layout.snapshot_reach >= 2 * SIZE + 32
    assert layout.slot_nbytes == FRAME_NBYTES + layout.snapshot_nbytes


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_model_whose_layers_are_all_alike_needs_no_snapshots(name: str, made: Any) -> None:
    layout = executor(made, name).layout
    assert [group.kind for group in layout.groups] == ["full"]
    assert layout.groups[0].layers == (0, 1, 2)
    assert layout.snapshot_nbytes == layout.snapshot_reach == 0


def test_windows_are_part_of_the_sum_of_memory(made: Any) -> None:
    few, many = (executor(made, "gemma3", max_seqs=count).memory_plan() for count in (4, 40))
    page = SIZE * 4 * 2 * 2 * 16 * 4
    assert few.windows_nbytes == few.num_pages * page
    assert many.total_nbytes - few.total_nbytes >= many.windows_nbytes - few.windows_nbytes == 36 * 14 * page
    assert "windows" in str(few)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
@torch.inference_mode()
def test_a_restored_sequence_goes_on_bit_for_bit(hybrid: str, made: Any, passes: Any, data: st.DataObject) -> None:
    path, _ = made(hybrid)
    boundary = data.draw(st.integers(1, 25)) * SIZE
    text = tokens(boundary + 100)
    first, third, at = passes(path), passes(path), 0
    while at < boundary:
        end = data.draw(st.integers(at + 1, boundary))
        for one in (first, third):
            one(text[at:end], at)
        at = end
    ahead = data.draw(st.integers(0, window_reach(SIZE)))
    if ahead:
        first(tokens(ahead, 5), boundary)
    slot = memoryview(bytearray(b"\x7f" * (FRAME_NBYTES + 64 * 1024)))
    assert first.windows.snapshot(first.window, boundary, slot) == ""
    second = passes(path, kv=first.kv)
    foreign = second.windows.open(0)  # what pages hold that others leave behind
    second.windows.reserve(foreign, 100)
    second.windows.kv.put(torch.arange(100), torch.full((len(first.config.sliding), 2, 100, 2, 16), 9.0))
    second.windows.close(foreign, clear=False)
    second.window = second.windows.restore(boundary, slot)
    while at < len(text):
        end = data.draw(st.integers(at + 1, len(text)))
        assert torch.equal(second(text[at:end], at), third(text[at:end], at))
        at = end


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_there_are_pages_for_every_step_within_the_limits(data: st.DataObject) -> None:
    """Any sequences, rows and rejected drafts: no step lacks pages, and none is lost or held twice."""
    config = decoder_config(TINY)
    seqs, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    context = data.draw(st.integers(1, 150))
    count = window_pages(config, SIZE, seqs, rows, context)
    windows = Windows(config, torch.float32, count, SIZE)
    live: list[Any] = []
    for _ in range(data.draw(st.integers(1, 12))):
        while len(live) < seqs:
            start = data.draw(st.integers(0, min(50, context - 1)))
            if start and data.draw(st.booleans()):
                slot = memoryview(bytearray(FRAME_NBYTES + 8 * 2 * 2 * 4 * 4))
                live.append(windows.restore(start, slot))
            else:
                live.append(windows.open(start))
        budget = rows
        step = []
        for window in live:
            if length := data.draw(st.integers(0, min(budget, context - window.end))):
                budget -= length
                assert not windows.why_not(window, window.end)
                windows.reserve(window, window.end + length)
                step.append((window, data.draw(st.integers(1, length))))
        held = [page for window in live for page in window.pages]
        assert len(set(held)) == len(held) == count - windows.free_pages
        for window, kept in step:
            windows.trim(window, window.end + kept)
        for window in data.draw(st.lists(st.sampled_from(live), unique_by=id)):
            windows.close(window, clear=False)
            live.remove(window)
    for window in live:
        windows.close(window, clear=True)
    assert windows.free_pages == count


TINY = {
    "model_type": "gpt_oss",
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


async def test_what_is_no_snapshot_of_the_sequence_is_refused_by_name(made: Any) -> None:
    async with executor(made, "gpt-oss") as ex:
        host = Host(ex)
        line = host.line(tokens(70))
        text = await host.generate(line, 2)
        plan = StepPlan(99, ())
        for snapshot in (
            Snapshot(line.seq, line.epoch, 72, 0),
            Snapshot(line.seq, line.epoch, 28, 0),
            Snapshot(line.seq, Epoch(3), 64, 0),
            Snapshot(SeqId(77), Epoch(0), 0, 0),
        ):
            with pytest.raises(StepFailed) as caught:
                await ex.submit(plan._replace(snapshots=(snapshot,))).result()
            assert list(caught.value.seqs) == [snapshot.seq]
        assert not any(ex.memory.slot(0))
        longer = await host.generate(line, 6)
        assert longer[:2] == text


async def test_a_snapshot_is_refused_where_replay_left_a_hole(made: Any) -> None:
    """Behind a bounded replay the windows of the first rows are not all there, and a snapshot would tell others so."""
    async with executor(made, "gemma3") as ex:
        host = Host(ex, "bounded")
        first = host.line(tokens(40))
        await host.generate(first, 1)
        again = host.line(tokens(40), published=first.blocks[:10])
        assert host.work(again, 64).start == 32
        await host.generate(again, 1)
        with pytest.raises(StepFailed, match="nothing below 32"):
            await ex.submit(StepPlan(99, (), snapshots=(Snapshot(again.seq, again.epoch, 36, 0),))).result()
        await ex.submit(StepPlan(99, (), snapshots=(Snapshot(again.seq, again.epoch, 40, 0),))).result()


@pytest.mark.parametrize("start", [0, 40, 92])
async def test_rows_that_do_not_follow_the_window_are_refused(start: int, made: Any) -> None:
    """Neither behind a hole nor where the window is gone."""
    async with executor(made, "gemma3") as ex:
        host = Host(ex)
        line = host.line(tokens(100))
        await host.step((line, host.work(line, 90)))
        moved = host.work(line, 9)._replace(start=start, length=4)
        with pytest.raises(StepFailed, match=f"position {start} does not follow"):
            await ex.submit(StepPlan(99, (moved,))).result()


async def test_a_model_without_windows_refuses_to_restore_one(made: Any) -> None:
    async with executor(made, "llama") as ex:
        host = Host(ex)
        work = [(line := host.line(tokens(9)), host.work(line, 64))]
        plan = host.plan(work)
        opened: SeqOpen = plan.opened[0]._replace(restore=0)
        with pytest.raises(StepFailed, match="snapshot is restored"):
            await ex.submit(plan._replace(opened=(opened,))).result()
