"""What the conformance kit does not ask: bad numbers, masks, failures, leaving early, bfloat16."""

from __future__ import annotations

import gc
import inspect
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
import safetensors.torch
from deepinfra_kernels.cpu import paths
from pydantic import ValidationError

from deepinfra.core.ids import BlockId, Epoch, SeqId
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import Fill, MaskRows, StepPlan, WorkItem
from deepinfra.errors import ConfigError, ExecutorError, ExecutorLost, StepFailed
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.options import TorchOptions
from deepinfra.testing.host import Host

PROMPT = [5, 9, 200, 31, 77, 6, 1, 300, 12]


class Case(NamedTuple):
    """A model, and what computes it."""

    path: Path
    kernels: str


def executor(case: Case, **changes: Any) -> TorchExecutor:
    settings = {"dtype": "float32", "num_blocks": 24, "block_size": 4, "threads": 1, "num_slots": 3}
    return TorchExecutor(str(case.path), **{**settings, "kernels": case.kernels, **changes})


@pytest.fixture
def path(made: Any, computes: str) -> Case:
    return Case(made("llama-wide")[0], computes)


@pytest.fixture(
    scope="module", params=[("llama", "torch"), ("gpt-oss", "torch"), *(("llama-wide", p) for p in paths())]
)
def poisoned(request: pytest.FixtureRequest, made: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Models whose token 13 is not a number."""
    name, kernels = request.param
    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(made(name)[0], folder, dirs_exist_ok=True)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][13] = float("nan")
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return Case(folder, kernels)


def test_options_are_the_constructor_s() -> None:
    parameters = inspect.signature(TorchExecutor).parameters
    assert list(TorchOptions.model_fields) == list(parameters)
    for name, field in TorchOptions.model_fields.items():
        if not field.is_required():
            assert field.default == parameters[name].default, name


def test_more_context_than_the_model_has_is_refused(path: Case) -> None:
    with pytest.raises(ConfigError, match="257"):
        executor(path, max_context=257)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.6, logit_bias=((7, 2.0),)),
        SamplingParams(temperature=1.5, top_k=20, min_p=0.02),
    ],
    ids=["penalties", "nucleus", "top-k"],
)
async def test_drafts_change_no_text_under_filters_and_penalties(path: Case, sampling: SamplingParams) -> None:
    async with executor(path, num_blocks=64) as ex:
        host = Host(ex)
        alone = host.line(PROMPT, sampling=sampling, seed=3)
        text = await host.generate(alone, 16)
        for wrong_from in (0, 1, 4):
            line = host.line(PROMPT, sampling=sampling, seed=3)
            while len(line.output) < 16:
                known = len(line.output)
                drafts = [*text[known : known + wrong_from], 2**40, -1][:4]
                await host.step((line, host.work(line, 64, drafts)))
            assert line.output[:16] == text
            host.close(line)


async def test_numbers_that_are_not_finite_fail_their_sequence_alone(poisoned: Case) -> None:
    async with executor(poisoned) as ex:
        host = Host(ex)
        truth = await host.generate(reference := host.line(PROMPT), 6)
        host.close(reference)
        good, bad = host.line(PROMPT), host.line([4, 13, 8, 9, 10, 11])
        chunk = host.work(bad, 4)  # does not even sample: the blocks it leaves are not to be trusted
        plan = host.plan([(good, host.work(good, 64)), (bad, chunk)])
        result = await ex.submit(plan).result()
        assert [failure.seq for failure in result.failed] == [bad.seq]
        good.blocks += plan.items[0].blocks
        good.tokens += result.outputs[0].tokens
        good.done = len(PROMPT)
        bad.blocks += chunk.blocks
        host.close(bad)
        host.free.reverse()  # the blocks just freed are the next to be used
        heirs = [host.line(PROMPT[:3]) for _ in range(3)]
        for line in heirs:
            await host.generate(line, 6)
            assert line.output[:6] == heirs[0].output[:6]
        assert await host.generate(good, 6) == truth


async def test_masks_decide_what_may_be_sampled(path: Case) -> None:
    async with executor(path) as ex:
        host = Host(ex)
        first, second = host.line(PROMPT), host.line(PROMPT, sampling=SamplingParams(), seed=1)
        allowed = np.zeros((2, ex.limits.vocab_size), np.uint8)
        allowed[0, 250] = allowed[1, [3, 4]] = 1
        work = [(line, host.work(line, 64)) for line in (first, second)]
        handle = ex.submit(host.plan(work)._replace(masked=True))
        bits = np.packbits(allowed, axis=1, bitorder="little").tobytes()
        handle.masks(MaskRows((first.seq, second.seq), (1, 1), bits))
        host.commit(work, await handle.result())
        assert first.output == [250]
        assert second.output[0] in (3, 4)


async def test_a_failure_inside_a_step_names_its_sequences(path: Case) -> None:
    async with executor(path) as ex:
        host = Host(ex)
        line = host.line(PROMPT)
        text = await host.generate(line, 2)
        item = host.work(line, 1)
        with pytest.raises(StepFailed, match="out of range") as failure:
            await ex.submit(StepPlan(9, (item,), fills=(Fill(99, BlockId(20)),))).result()
        assert failure.value.seqs == (line.seq,)
        line.blocks += item.blocks
        fresh = host.line(PROMPT)
        assert (await host.generate(line, 6))[:2] == text
        assert await host.generate(fresh, 6) == line.output


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("llama", "torch"), ("gemma3", "torch"), ("gpt-oss", "torch"), *(("qwen3-wide", p) for p in paths())],
)
async def test_bfloat16_says_nearly_the_same(name: str, kernels: str, made: Any) -> None:
    path, probs = Case(made(name)[0], kernels), []
    for dtype in ("float32", "bfloat16"):
        async with executor(path, dtype=dtype) as ex:
            assert ex.layout.dtype == ex.identity.kv_dtype == dtype
            host = Host(ex)
            line = host.line(PROMPT, sampling=SamplingParams(temperature=0.0, logprobs=3))
            await host.generate(line, 1)
            probs.append(line.probs[0])
    assert probs[0].top[0][0] == probs[1].top[0][0]
    assert abs(probs[0].logprob - probs[1].logprob) < 0.2


async def test_a_payload_has_positions_before_heads(path: Case) -> None:
    async with executor(path) as ex:
        host = Host(ex)
        line = host.line(PROMPT)
        await host.generate(line, 1)
        await ex.memory.drain(line.blocks[:1], [0])
        whole = np.frombuffer(ex.memory.slot(0), np.float32, offset=FRAME_NBYTES).reshape(3, 2, 4, 2, 32)
        # Values of the first layer depend on their token alone: equal tokens at two positions show the order.
        other = host.line([PROMPT[1], PROMPT[0], *PROMPT[2:]])
        await host.generate(other, 1)
        await ex.memory.drain(other.blocks[:1], [1])
        swapped = np.frombuffer(ex.memory.slot(1), np.float32, offset=FRAME_NBYTES).reshape(3, 2, 4, 2, 32)
        np.testing.assert_allclose(whole[0, 1, [1, 0, 2, 3]], swapped[0, 1], atol=1e-5)


def test_staging_that_is_no_whole_number_of_slots_is_refused(path: Case) -> None:
    with pytest.raises(ExecutorError, match="whole number"):
        executor(path).use_staging(memoryview(bytearray(1000)))


async def test_leaving_while_a_step_waits_for_masks_ends_the_step(path: Case) -> None:
    async with executor(path) as ex:
        host = Host(ex)
        line = host.line(PROMPT)
        masked = ex.submit(host.plan([(line, host.work(line, 64))])._replace(masked=True))
        behind = ex.submit(StepPlan(2, ()))
        memory = ex.memory
    with pytest.raises(ExecutorLost):
        await masked.result()
    with pytest.raises(ExecutorLost):
        await behind.result()
    with pytest.raises(ExecutorLost):
        await memory.drain([BlockId(0)], [0])


async def test_entering_can_be_given_up(path: Case) -> None:
    ex = executor(path)
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with ex:
            raise AssertionError("entered in spite of the cancellation")
    async with ex:
        result = await ex.submit(StepPlan(1, ())).result()
    assert result.step == 1


async def test_a_token_outside_the_vocabulary_fails_its_sequence(path: Case) -> None:
    async with executor(path) as ex:
        host = Host(ex)
        line = host.line([1, 10**6])
        with pytest.raises(StepFailed, match="vocabulary"):
            await host.step((line, host.work(line, 64)))
        with pytest.raises(StepFailed, match="not open"):
            await ex.submit(StepPlan(3, (WorkItem(SeqId(77), Epoch(0), 0, 1, 0, True),))).result()


@pytest.mark.parametrize("num_blocks", [0, -1, "many"])
def test_a_number_of_blocks_that_is_none_is_refused_by_name(num_blocks: object) -> None:
    with pytest.raises(ValidationError, match="num_blocks"):
        TorchOptions.model_validate({"model": "x", "num_blocks": num_blocks})


@pytest.mark.parametrize("fails", [False, True])
async def test_what_it_held_goes_with_it_and_waits_for_no_garbage_collector(path: Case, fails: bool) -> None:
    """An executor that was lost is entered again at once: its model must not be there twice."""

    async def used() -> weakref.ref[object]:
        async with executor(path) as ex:
            host = Host(ex)
            await host.generate(host.line(PROMPT), 3)
            if fails:
                with suppress(StepFailed):
                    await ex.submit(StepPlan(99, (WorkItem(SeqId(7), Epoch(0), 0, 1, 0, True),))).result()
            return weakref.ref(ex._runner)

    gc.collect()
    gc.disable()
    try:
        assert (await used())() is None
    finally:
        gc.enable()
