from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from deepinfra.core.events import Failed, TextDelta
from deepinfra.core.ids import BlockId, Epoch, SeqId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import SeqOpen, StepPlan, WorkItem
from deepinfra.engine import Engine, Pool
from deepinfra.engine.receipts import Obstacle, replay
from deepinfra.engine.sources import namespace_of
from deepinfra.errors import ExecutorLost, ModelError, StepFailed, UnsupportedModelError
from deepinfra.executors.process import ProcessExecutor
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.executor import ExecutorConformance
from deepinfra.testing.host import Host
from deepinfra.testing.tiny import TinyRecipe
from deepinfra.testing.window_laws import WindowLaws

CHILD = Path(__file__).with_name("toy_child.py")
PROMPT = (5, 6, 7, 8, 9, 10, 11)


def process(
    fault: str = "", at: int = 0, *, child: dict[str, Any] | None = None, windows: tuple[int, ...] = (), **settings: Any
) -> ProcessExecutor:
    options: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_seqs": 4, "windows": windows}
    faults = {"fault": fault, "at": at, **(child or {})}
    command = [sys.executable, str(CHILD), json.dumps(options | faults)]
    return ProcessExecutor(ToyExecutor(**options), command, **settings)


async def reference(new: int) -> list[int]:
    async with ToyExecutor(num_blocks=32, block_size=4) as toy:
        return await generate(toy, new)


async def generate(executor: ToyExecutor | ProcessExecutor, new: int) -> list[int]:
    host = Host(executor)
    return await host.generate(host.line(PROMPT), new)


def open_fds() -> dict[str, str]:
    fds = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            pass
    return fds


def children() -> list[str]:
    """Command lines of this process's children; empty for zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(stat.with_name("cmdline").read_text())
        except OSError:
            pass
    return found


def shared_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("deepinfra-staging")


class TestConformance(ExecutorConformance):
    rounds = 200

    def make(self) -> ProcessExecutor:
        return process(num_slots=4)


async def test_windows_go_out_to_shared_memory_and_come_back() -> None:
    class Kit(WindowLaws):
        def make(self) -> ProcessExecutor:
            return process(num_slots=4, windows=(7, 7))

    await Kit().test_behind_a_snapshot_it_goes_on_as_before()


async def test_the_text_is_that_of_the_executor_inside() -> None:
    async with process() as executor:
        assert await generate(executor, 20) == await reference(20)


async def test_no_other_process_does_the_work() -> None:
    async with process() as executor:
        assert executor.pid != os.getpid()
        assert Path(f"/proc/{executor.pid}/cmdline").read_bytes().split(b"\0")[1] == str(CHILD).encode()


async def test_limits_are_the_childs_and_slots_the_parents() -> None:
    async with process(num_slots=5) as executor:
        assert executor.limits.num_slots == executor.memory.num_slots == 5
        assert executor.limits.num_blocks == 32


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("exit", "ended with exit code 7"),
        ("garbage", "sent nonsense"),
        ("long", "sent nonsense: a message of 4294967295 bytes"),
        ("unasked", "sent nonsense"),
        ("lost", "the device fell off the bus"),
    ],
)
async def test_a_child_that_fails_is_lost_with_everything_that_waits(fault: str, why: str) -> None:
    async with process(fault, at=4) as executor:
        host = Host(executor)
        line = host.line(PROMPT)
        await host.generate(line, 3)
        pid = executor.pid
        handle = executor.submit(StepPlan(4, ()))
        with pytest.raises(ExecutorLost, match=why):
            await executor.memory.drain(line.blocks[:1], [0])
        with pytest.raises(ExecutorLost, match=why):
            await handle.result()
        later = executor.submit(StepPlan(5, ()))
        with pytest.raises(ExecutorLost, match=why):
            await later.result()
    assert not Path(f"/proc/{pid}").exists()


async def test_a_step_that_takes_too_long_loses_the_executor() -> None:
    async with process("hang", at=2, step_timeout_s=0.2) as executor:
        await generate(executor, 1)
        pid = executor.pid
        with pytest.raises(ExecutorLost, match=r"a step took longer than 0.2 s"):
            await executor.submit(StepPlan(2, ())).result()
    assert not Path(f"/proc/{pid}").exists()


async def test_a_killed_child_is_named_and_a_fresh_one_serves_the_same_text() -> None:
    executor = process()
    pids = set()
    for _ in range(2):
        async with executor:
            pids.add(executor.pid)
            assert await generate(executor, 5) == await reference(5)
            os.kill(executor.pid, signal.SIGKILL)
            with pytest.raises(ExecutorLost, match="killed by SIGKILL"):
                await executor.submit(StepPlan(99, ())).result()
    assert len(pids) == 2


async def test_a_refusal_at_start_is_raised_as_itself() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^model field rope_scaling = 'wild' is not implemented$"):
        async with process("refuse"):
            pass


async def test_a_crash_at_start_names_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExecutorLost, match="ended with exit code 1 while it started"):
        async with process("crash-at-start"):
            pass
    out, err = capfd.readouterr()
    assert "RuntimeError: a bug" in err
    assert "what a library prints" in err
    assert out == ""


async def test_how_it_computes_is_what_the_child_says() -> None:
    async with process() as executor:
        assert executor.computing.path == "child"
        assert executor.computing.dtype == executor.identity.kv_dtype


async def test_numerics_of_a_child_that_falls_back_are_its_own_while_it_runs() -> None:
    executor = process("falls-back")
    assert executor.identity.numerics == "ordinary"
    async with executor:
        assert executor.identity == ToyExecutor().identity._replace(numerics="ordinary slow")
        assert namespace_of(executor, "r", "t").numerics == "ordinary slow"
    assert executor.identity.numerics == "ordinary"


async def test_a_child_of_other_weights_is_refused() -> None:
    with pytest.raises(ModelError, match=r"runs .* was expected; restart the server"):
        async with process(child={"seed": 5}):
            pass


async def test_a_receipt_says_what_the_child_is_and_is_replayed_by_another_child() -> None:
    request = GenerateRequest(input=PROMPT, n=2, max_tokens=6, receipt=True)
    async with Engine(TinyRecipe(), Pool(Fcfs(), process())) as engine:
        async with engine.generate(request) as stream:
            async for _ in stream:
                pass
        receipt = stream.receipt
        assert receipt is not None
    async with Engine(TinyRecipe(), Pool(Fcfs(), process())) as engine:
        again = await replay(engine, receipt)
    async with Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor(num_blocks=32, block_size=4))) as engine:
        here = await replay(engine, receipt)
        forced = await replay(engine, receipt, anyway=True)
    assert [facts.path for facts in receipt.executors] == ["child"]
    assert (again.verdict, again.promised) == ("same", True)
    assert (here.verdict, here.obstacles) == ("incomparable", (Obstacle("path", "child", ""),))
    assert (forced.verdict, forced.promised) == ("same", False)


async def test_a_child_that_never_gets_ready_is_given_up() -> None:
    with pytest.raises(ExecutorLost, match=r"not ready within 0.5 s"):
        async with process("slow-start", start_timeout_s=0.5):
            pass


async def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FileNotFoundError):
        async with ProcessExecutor(ToyExecutor(), ["/nonexistent/program"]):
            pass


async def test_a_child_that_built_something_else_is_refused() -> None:
    with pytest.raises(ModelError, match="toy-3"):
        async with process(child={"seed": 3}):
            pass


async def test_an_error_of_the_body_leaves_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with process():
            raise ZeroDivisionError


async def test_a_failed_step_is_a_message_and_not_a_loss() -> None:
    async with process() as executor:
        with pytest.raises(StepFailed, match="sequence 9 is not open") as caught:
            await executor.submit(StepPlan(1, (WorkItem(SeqId(9), Epoch(0), 0, 1, 0, True),))).result()
        assert caught.value.seqs == (9,)
        assert await generate(executor, 3) == await reference(3)


async def test_a_plan_larger_than_the_sockets_buffer_arrives() -> None:
    async with process(child={"max_context": 10**7}) as executor:
        tokens = tuple(range(200)) * 5000
        opened = SeqOpen(SeqId(1), Epoch(0), tokens, len(tokens), (), 0)
        handles = [executor.submit(StepPlan(step, (), (opened,), (SeqId(1),))) for step in range(1, 4)]
        assert [(await handle.result()).step for handle in handles] == [1, 2, 3]


@pytest.mark.parametrize("seed", [2**64, -(2**70)])
async def test_a_seed_of_any_size_draws_what_it_draws_here(seed: int) -> None:
    texts = []
    for executor in (ToyExecutor(num_blocks=32, block_size=4), process()):
        async with executor:
            host = Host(executor)
            line = host.line(PROMPT, sampling=SamplingParams(temperature=1.0), seed=seed)
            texts.append(await host.generate(line, 5))
    assert texts[0] == texts[1]


async def test_replies_find_those_who_wait_in_any_order() -> None:
    async with process() as executor:
        host = Host(executor)
        line = host.line(PROMPT)
        await host.generate(line, 1)
        blocks: dict[int, bytes] = {}

        async def drain(slot: int) -> None:
            await executor.memory.drain(line.blocks[:1], [slot])
            blocks[slot] = bytes(executor.memory.slot(slot)[FRAME_NBYTES:])

        async with anyio.create_task_group() as tasks:
            for slot in range(8):
                tasks.start_soon(drain, slot)
            assert await host.generate(line, 10) == await reference(10)
        assert len(blocks) == 8
        assert len(set(blocks.values())) == 1


async def kill_after(pid: int, turns: int) -> None:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    os.kill(pid, signal.SIGKILL)


async def serve_until_lost(executor: ProcessExecutor, truth: list[int]) -> int:
    """Texts, saved all the while; returns the tokens got before the end, all of them right."""
    host, got = Host(executor), 0
    async with anyio.create_task_group() as tasks:
        try:
            while True:
                line = host.line(PROMPT)
                while len(line.output) < len(truth):
                    await host.step((line, host.work(line, 4)))
                    got += 1
                    assert line.output == truth[: len(line.output)]
                    tasks.start_soon(drain_or_lose, executor, line.blocks[0], got % executor.memory.num_slots)
                host.close(line)
        except ExecutorLost:
            return got


async def drain_or_lose(executor: ProcessExecutor, block: BlockId, slot: int) -> None:
    try:
        await executor.memory.drain([block], [slot])
    except ExecutorLost:
        pass


async def test_killing_at_any_moment_under_load_loses_no_file_and_tells_no_lie() -> None:
    draw = random.Random(3)
    truth = await reference(30)
    executor = process()
    before, mapped = open_fds(), shared_mappings()
    got: list[int] = []
    most = 1000
    while len(got) < 10 or not sum(got):  # later and later, where the child has a slow processor
        async with executor, anyio.create_task_group() as tasks:
            tasks.start_soon(kill_after, executor.pid, draw.randrange(most))
            got.append(await serve_until_lost(executor, truth))
        most += most // 4
    assert open_fds().keys() == before.keys()
    assert shared_mappings() == mapped


async def test_nothing_is_left_open_after_use() -> None:
    executor = process()
    before, mapped = open_fds(), shared_mappings()
    for _ in range(3):
        async with executor:
            await generate(executor, 2)
    assert open_fds().keys() == before.keys()
    assert shared_mappings() == mapped


async def test_a_slot_that_somebody_still_holds_stays_readable_and_hides_no_error() -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with process() as executor:
            slot = executor.memory.slot(1)
            slot[:3] = b"abc"
            raise ZeroDivisionError
    assert slot[:3] == b"abc"


async def test_leaving_while_it_starts_ends_the_child() -> None:
    before = open_fds()
    with anyio.move_on_after(0.3) as scope:
        async with process("slow-start"):
            pass
    assert scope.cancelled_caught
    assert open_fds().keys() == before.keys()
    assert not [child for child in children() if str(CHILD) in child]


async def test_an_engine_goes_on_with_the_same_text_when_the_child_is_killed() -> None:
    request = GenerateRequest(input=PROMPT, sampling=SamplingParams(temperature=0.0), max_tokens=60, ignore_eos=True)
    texts, pids = [], set()
    for kill_at in (None, 1, 7, 20):
        executor = process()
        async with Engine(TinyRecipe(), Pool(Fcfs(), executor), name="toy") as engine:
            async with engine.generate(request) as stream:
                text, seen = "", 0
                async for event in stream:
                    assert not isinstance(event, Failed)
                    if isinstance(event, TextDelta):
                        text, seen = text + event.text, seen + 1
                        pids.add(executor.pid)
                        if seen == kill_at:
                            os.kill(executor.pid, signal.SIGKILL)
            texts.append(text)
            assert engine.stats().pools[0].executor_losses == (kill_at is not None)
    assert len(set(texts)) == 1
    assert len(pids) == 7


async def test_a_child_at_work_dies_with_a_killed_parent() -> None:
    parent = await anyio.open_process([sys.executable, str(Path(__file__)), "hang"], stderr=None)
    async with parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(await parent.stdout.receive()))
        try:
            parent.kill()
            with anyio.fail_after(20):
                await anyio.wait_readable(child)
        finally:
            os.close(child)


async def test_signals_meant_for_the_parent_do_not_stop_the_child() -> None:
    async with process() as executor:
        await generate(executor, 1)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(executor.pid, number)
        assert os.getsid(executor.pid) != os.getsid(0)
        assert (await executor.submit(StepPlan(99, ())).result()).step == 99


async def test_leaving_waits_for_a_step_in_flight_and_ends_the_child() -> None:
    async with process() as executor:
        pid = executor.pid
        executor.submit(StepPlan(1, ()))
    assert not Path(f"/proc/{pid}").exists()


async def test_a_step_under_way_is_answered_although_everything_around_it_is_cancelled() -> None:
    with anyio.CancelScope() as scope:
        async with process("slow", at=1, step_timeout_s=5) as executor:
            handle = executor.submit(StepPlan(1, ()))
            scope.cancel()
            with anyio.CancelScope(shield=True):
                result = await handle.result()
    assert result.step == 1


def test_neither_side_loads_torch() -> None:
    code = "import sys, deepinfra.executors.process as p; assert 'torch' not in sys.modules and p.ProcessExecutor"
    subprocess.run([sys.executable, "-c", code], check=True)


async def _hang() -> None:
    async with process("hang", at=1) as executor:
        handle = executor.submit(StepPlan(1, ()))
        print(executor.pid, flush=True)
        await handle.result()


if __name__ == "__main__":
    anyio.run(_hang)
