"""The kernels compute what transformers does, and stored weights nearly what the same weights give when decoded."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfra_kernels.library import Library, load
from numpy.typing import NDArray

from deepinfra.executors.torch.choice import packed_nbytes
from deepinfra.executors.torch.config import decoder_config
from deepinfra.executors.torch.native import Native, load_native
from deepinfra.executors.torch.rows import Rows
from deepinfra.executors.torch.weights.pack import Packer
from deepinfra.models import open_model
from deepinfra.models.cache import kernel_cache_dir

WIDE = ("llama", "llama-tied", "llama-biases", "llama3", "linear", "yarn", "yarn-scaled", "qwen2", "qwen3", "mistral")


@pytest.fixture
def library(path_of_kernels: str) -> Library:
    return load(path_of_kernels, kernel_cache_dir())


class Pass:
    """A model and one sequence of it; gives logits of every row."""

    def __init__(self, library: Library, path: Path, *, dtype: str = "float32", stored: bool = False) -> None:
        model = open_model(str(path))
        self.native: Native
        self.native, _ = load_native(
            library,
            model.tensors,
            decoder_config(model.config),
            dtype=dtype,
            stored=stored,
            num_blocks=64,
            block_size=4,
            threads=2,
            max_rows=256,
            checkpoint=lambda: None,
        )
        self.table = random.Random(1).sample(range(64), 64)

    def __call__(self, tokens: Sequence[int], start: int = 0) -> NDArray[np.float32]:
        rows = Rows(np.array(tokens, np.int64), start, 0, self.table, wanted=len(tokens))
        assert self.native.compute([rows]) == [True]
        assert self.native._logits is not None
        return self.native._logits.copy()


def prompt(length: int, vocab: int = 320) -> list[int]:
    draw = random.Random(5)
    return [draw.randrange(vocab) for _ in range(length)]


@pytest.mark.parametrize("name", WIDE)
def test_logits_of_every_position_equal_those_of_transformers(name: str, made: Any, library: Library) -> None:
    path, reference = made(f"{name}-wide")
    tokens = prompt(150)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0].numpy()
    assert theirs.std() > 0.5, "logits so flat that nothing is shown"
    for cuts in ([150], [1, 70, 71, 150]):
        run = Pass(library, path)
        ours = [run(tokens[start:end], start) for start, end in zip([0, *cuts], cuts, strict=False)]
        assert np.abs(np.concatenate(ours) - theirs).max() <= 1e-3, cuts


def test_stored_weights_give_nearly_what_they_give_decoded(mixed: Path, library: Library) -> None:
    tokens = prompt(200)
    exact, stored = Pass(library, mixed)(tokens), Pass(library, mixed, stored=True)(tokens)
    assert not np.array_equal(exact, stored), "nothing was rounded: activations were not integers"
    half = Pass(library, mixed, dtype="bfloat16")(tokens)
    errors = [float(np.sqrt(np.mean((exact - other) ** 2)) / exact.std()) for other in (half, stored)]
    # Random layers blow errors up, so one is the measure of the other: 8 bits with a scale for each 32 values err about
    # twice as much as bfloat16 does.
    assert errors[1] < 3 * errors[0] < 0.3


def test_decoded_blocks_are_those_of_the_gguf_package(mixed: Path, library: Library) -> None:
    tokens, model = prompt(50), open_model(str(mixed))
    given = Pass(library, mixed)(tokens)
    whole = _Decoded(model.tensors)
    native, _ = load_native(
        library,
        whole,
        decoder_config(model.config),
        dtype="float32",
        stored=False,
        num_blocks=64,
        block_size=4,
        threads=1,
        max_rows=256,
        checkpoint=lambda: None,
    )
    native.compute([Rows(np.array(tokens, np.int64), 0, 0, list(range(64)), wanted=len(tokens))])
    assert native._logits is not None
    assert np.abs(native._logits - given).max() <= 1e-4


class _Decoded:
    """A model's tensors, all decoded to float32 by the gguf package."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors
        self.names, self.read, self.release = tensors.names, tensors.read, tensors.release

    def info(self, name: str) -> Any:
        info = self._tensors.info(name)
        return type(info)("F32", info.shape, int(np.prod(info.shape)) * 4)

    def raw(self, name: str) -> memoryview:
        return self.read(name).reshape(-1).view(np.uint8).data


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_of_weights_is_what_they_take(mixed: Path, library: Library, dtype: str, stored: bool) -> None:
    model = open_model(str(mixed))
    config = decoder_config(model.config)
    packer = Packer(library, model.tensors, dtype=dtype, stored=stored, threads=2, checkpoint=lambda: None)
    shapes = config.shapes()
    linears = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    packed = sum(matrix.nbytes for matrix in packer.matrices(linears).values())
    norms = sum(4 * shape[0] for name, shape in shapes.items() if name.endswith("norm.weight"))
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    table = model.tensors.info("model.embed_tokens.weight").nbytes
    assert packed_nbytes(config, model.tensors, stored=stored, itemsize=itemsize) == packed + norms + table


def test_a_process_that_computes_by_kernels_never_loads_torch(mixed: Path) -> None:
    script = f"""
import sys, anyio
from deepinfra.core.sampling import SamplingParams
from deepinfra.executors.torch import TorchExecutor
from deepinfra.testing.host import Host

async def main():
    async with TorchExecutor({str(mixed)!r}, num_blocks=64) as executor:
        line = Host(executor).line([1, 2, 3], sampling=SamplingParams(top_p=0.9, logprobs=2), seed=1)
        await Host(executor).generate(line, 4)
        assert executor.computing.path != "torch"
    print([name for name in ("torch", "gguf", "transformers") if name in sys.modules])

anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
