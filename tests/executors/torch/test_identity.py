"""A real model changed in one place never reads what it wrote before: two runs over one folder on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from deepinfra_kernels import cpu
from safetensors.torch import load_file, save_file

from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine, Pool
from deepinfra.executors.torch import TorchExecutor
from deepinfra.kvstores import SsdStore
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.asking import ask, end_of, events_of, tokens_of
from deepinfra.testing.tiny import TinyRecipe

PROMPT = tuple(range(1, 60))
BYTES = SamplingParams(temperature=0.0, logprobs=0, logit_bias=tuple((token, -100.0) for token in range(260, 320)))
"""Only tokens that the tiny recipe has; the models have some more."""


def one_element(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})


def rotary_base(folder: Path) -> None:
    configured(folder, rope_parameters={"rope_type": "default", "rope_theta": 20_000.0})


def norm_epsilon(folder: Path) -> None:
    configured(folder, rms_norm_eps=1e-3)


def configured(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class Change(NamedTuple):
    """What is done to the model's files, and what the executor is told."""

    files: Callable[[Path], None] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    block_size: int = 4


SAME = Change()

CHANGES = {
    "one element of one tensor": Change(one_element),
    "the base of the rotation": Change(rotary_base),
    "the epsilon of the norms": Change(norm_epsilon),
    "the element type": Change(dtype="bfloat16"),
    "the block size": Change(block_size=8),
}


def asked() -> GenerateRequest:
    return GenerateRequest(input=PROMPT, max_tokens=8, sampling=BYTES, receipt=True)


async def run(folder: Path, kv: Path | None, change: Change = SAME) -> tuple[list[int], dict[str, int]]:
    """Tokens of an answer, and what of its prompt was cached."""
    executor = TorchExecutor(
        str(folder), dtype=change.dtype, block_size=change.block_size, num_blocks=64, threads=1, max_seqs=2
    )
    async with Engine(TinyRecipe(), Pool(Fcfs(), executor, store=SsdStore(kv) if kv else None)) as engine:
        events = await events_of(engine, ask(PROMPT, 8, sampling=BYTES))
        assert await engine.drain(10)
    usage = end_of(events).usage
    assert usage.cached.device == 0
    return tokens_of(events), usage.cached.store


@pytest.mark.parametrize("what", CHANGES)
async def test_a_changed_model_finds_none_of_the_old_bytes(
    made: Callable[[str], tuple[Path, Any]], tmp_path: Path, what: str
) -> None:
    change, kv = CHANGES[what], tmp_path / "kv"
    before, after = made("llama")[0], tmp_path / "model"
    shutil.copytree(before, after)
    if change.files is not None:
        change.files(after)
    first, cached = await run(before, kv)
    assert cached == {}
    assert await run(after, kv, change) == (await run(after, None, change))
    assert await run(before, kv) == (first, {"ssd": len(PROMPT) // 4 * 4})
    assert (await run(after, kv, change))[1] == {"ssd": len(PROMPT) // change.block_size * change.block_size}


async def test_kv_of_stored_weights_is_none_of_dense_ones_and_paths_share_what_is_the_same(
    mixed: Path, tmp_path: Path
) -> None:
    paths = cpu.paths()
    ways = [(path, weights) for weights in ("stored", "dense") for path in paths] + [("torch", "dense")]
    told: dict[tuple[str, str], tuple[int, str]] = {}
    for kernels, weights in ways:
        executor = TorchExecutor(
            str(mixed),
            dtype="float32",
            block_size=4,
            num_blocks=64,
            threads=1,
            kernels=kernels,  # type: ignore[arg-type]
            weights=weights if kernels != "torch" else "auto",  # type: ignore[arg-type]
        )
        async with Engine(TinyRecipe(), Pool(Fcfs(), executor, store=SsdStore(tmp_path / "kv"))) as engine:
            async with engine.generate(asked()) as stream:
                events = [event async for event in stream]
            assert await engine.drain(10)
            assert stream.receipt is not None
            (facts,) = stream.receipt.executors
        assert facts.form == weights
        told[kernels, weights] = end_of(events).usage.cached.total, facts.numerics
    whole = len(PROMPT) // 4 * 4
    assert told == {
        (kernels, weights): (0 if kernels == paths[0] else whole, f"ordinary {weights}") for kernels, weights in ways
    }


async def test_the_same_model_in_another_folder_finds_them(
    made: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    first, _ = await run(made("llama")[0], tmp_path / "kv")
    shutil.copytree(made("llama")[0], tmp_path / "copy")
    assert await run(tmp_path / "copy", tmp_path / "kv") == (first, {"ssd": len(PROMPT) // 4 * 4})
