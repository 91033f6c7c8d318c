"""Whatever is asked for, kernels compute it, refuse it, or say what is missing: the process lives on."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from deepinfra_kernels import cpu
from deepinfra_kernels.attention import attend, rotate
from deepinfra_kernels.decoder import Decoder, Layer, Spec, Step
from deepinfra_kernels.library import Library
from deepinfra_kernels.linear import Compute, PackedMatrix, embed, gate, linear, multiply, norm, packed_nbytes, prepare
from deepinfra_kernels.sampling import Sampler, blank_draws
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

HIDDEN, INNER, VOCAB, KV_HEADS, DIM = 64, 96, 50, 2, 32
BLOCKS, BLOCK_SIZE, ROWS = 8, 4, 16


@pytest.fixture(scope="module", params=cpu.paths())
def library(request: pytest.FixtureRequest, kernels: Callable[[str], Library]) -> Library:
    return kernels(request.param)


def cells(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros((BLOCKS, 1, KV_HEADS, 2, BLOCK_SIZE, DIM), dtype=dtype)


def made(library: Library, *, fill: float | None = None, **changes: Any) -> Decoder:
    """A small decoder; `fill` stands in one weight of each of its matrices."""
    random = np.random.default_rng(1)

    def matrix(out: int, inputs: int) -> PackedMatrix:
        weight = random.standard_normal((out, inputs), np.float32)
        if fill is not None:
            weight[out // 2, inputs // 3] = fill
        return PackedMatrix.pack(library, 0, Compute.BF16, out, inputs, weight.view(np.uint8).reshape(-1))

    ones, width = np.ones(HIDDEN, np.float32), KV_HEADS * DIM
    layer = Layer(
        query=matrix(2 * width, HIDDEN),
        key=matrix(width, HIDDEN),
        value=matrix(width, HIDDEN),
        output=matrix(HIDDEN, 2 * width),
        gate=matrix(INNER, HIDDEN),
        up=matrix(INNER, HIDDEN),
        down=matrix(HIDDEN, INNER),
        before=ones,
        between=ones,
    )
    spec = Spec(
        hidden_size=HIDDEN,
        num_heads=2 * KV_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        inner_size=INNER,
        vocab_size=VOCAB,
        eps=1e-5,
        query_scale=0.2,
        inv_freq=np.linspace(1, 0.01, DIM // 2, dtype=np.float32),
    )
    arguments: dict[str, Any] = {
        "spec": dataclasses.replace(spec, **changes.pop("spec", {})),
        "layers": [layer],
        "head": matrix(VOCAB, HIDDEN),
        "norm": ones,
        "embedding": random.standard_normal((VOCAB, HIDDEN), np.float32).view(np.uint8).reshape(-1),
        "embedding_source": 0,
        "kv": cells(),
        "threads": 2,
        "max_rows": ROWS,
    }
    return Decoder(library, **(arguments | changes))


# -- steps --------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 7, 15, 49, 50, -1, -5, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1])
ARRAYS = st.lists(NUMBERS, max_size=20).map(lambda numbers: np.array(numbers, np.int64))


@settings(max_examples=300, deadline=None)
@given(step=st.builds(Step, **{field.name: ARRAYS for field in dataclasses.fields(Step)}))
def test_a_step_of_any_numbers_is_computed_or_refused(library: Library, step: Step) -> None:
    with closing(made(library)) as decoder:
        assert answered(lambda: decoder.step(step))
    queries = np.ones((len(step.tokens), 2 * KV_HEADS, DIM), np.float32)
    assert answered(lambda: attend(library, cells(), 0, queries, step))


def answered(ask: Callable[[], Any]) -> bool:
    """That something was computed, or refused as it should be."""
    try:
        ask()
    except ValueError as error:
        return bool(str(error))
    return True


GOOD = Step.of([([1, 2, 3], 5, 5, [0, 3]), ([4], 0, 0, [5])], [2, 3])

BROKEN: dict[str, dict[str, Any]] = {
    "no rows": {"tokens": [], "counts": [], "starts": [], "write_froms": [], "ends": [], "blocks": [], "wanted": []},
    "a negative token": {"tokens": [1, 2, -1, 4]},
    "a token beyond the vocabulary": {"tokens": [1, 2, VOCAB, 4]},
    "an empty sequence": {"counts": [4, 0]},
    "counts of more rows than there are": {"counts": [3, 2]},
    "counts that overflow": {"counts": [2**63 - 1, 5]},
    "a negative start": {"starts": [-1, 0]},
    "a start beyond the blocks": {"starts": [6, 0]},
    "a start that overflows": {"starts": [2**63 - 3, 0]},
    "a block that does not exist": {"blocks": [0, BLOCKS, 5]},
    "a negative block": {"blocks": [0, -1, 5]},
    "tables that go backwards": {"ends": [3, 2]},
    "a table beyond the blocks": {"ends": [2, 4]},
    "a table before the blocks": {"ends": [-1, 3]},
    "a row that nobody has": {"wanted": [4]},
    "a negative row": {"wanted": [-1]},
    "more wanted than rows": {"wanted": [0] * (ROWS + 1)},
    "too few starts": {"starts": [5]},
    "integers of 32 bits": {"tokens": np.array([1, 2, 3, 4], np.int32)},
    "gaps": {"tokens": np.arange(8)[::2]},
    "two dimensions": {"tokens": np.ones((4, 1), np.int64)},
    "askew": {"tokens": np.frombuffer(bytes(33), np.uint8)[1:].view(np.int64)},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_step_is_refused_and_the_next_one_computed(library: Library, what: str) -> None:
    changes = {name: np.asarray(value, getattr(value, "dtype", np.int64)) for name, value in BROKEN[what].items()}
    with closing(made(library)) as decoder:
        wanted = decoder.step(GOOD)[0].tobytes()
        with pytest.raises(ValueError, match=r"\w"):
            decoder.step(dataclasses.replace(GOOD, **changes))
        assert decoder.step(GOOD)[0].tobytes() == wanted


def test_more_rows_than_there_is_room_for_are_refused(library: Library) -> None:
    with closing(made(library, max_rows=3)) as decoder, pytest.raises(ValueError, match="max_rows"):
        decoder.step(GOOD)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 3e38, 1e-45], ids=str)
def test_any_weight_gives_numbers_or_says_that_it_does_not(library: Library, number: float) -> None:
    with closing(made(library, fill=number)) as decoder:
        logits, finite = decoder.step(GOOD)
        assert finite.all() == bool(np.isfinite(number) and abs(number) < 1e38)
        assert Sampler(library).sample(logits, blank_draws(2)).draws["token"].max() < VOCAB


DECODERS: dict[str, dict[str, Any]] = {
    "no threads": {"threads": 0},
    "a million threads": {"threads": 10**6},
    "no rows": {"max_rows": 0},
    "rows that a pool cannot count": {"max_rows": 2**23},
    "no layers": {"layers": []},
    "heads of another size": {"spec": {"head_dim": 48}},
    "heads of no whole number of registers": {"spec": {"head_dim": 40}},
    "another vocabulary": {"spec": {"vocab_size": VOCAB + 1}},
    "heads that are shared unevenly": {"spec": {"num_heads": 3}},
    "many heads": {"spec": {"num_heads": 2**20, "num_kv_heads": 2**20}},
    "a negative window": {"spec": {"window": -1}},
    "a window that overflows": {"spec": {"window": 2**63}},
    "too few frequencies": {"spec": {"inv_freq": np.ones(3, np.float32)}},
    "an unknown type of embedding": {"embedding_source": 99},
    "half an embedding": {"embedding": np.zeros(VOCAB * HIDDEN * 2, np.uint8)},
    "a norm of float64": {"norm": np.ones(HIDDEN)},
    "KV of five dimensions": {"kv": cells()[0]},
    "KV of another model": {"kv": torch.zeros((BLOCKS, 2, KV_HEADS, 2, BLOCK_SIZE, DIM))},
    "KV of float64": {"kv": cells(torch.float64)},
    "KV with gaps": {"kv": torch.zeros((BLOCKS, 1, KV_HEADS, 2, BLOCK_SIZE, 2 * DIM))[..., ::2]},
    "KV on no device": {"kv": cells().to("meta")},
    "KV that is read-only": {"kv": np.frombuffer(bytes(4 * cells().numel()), np.float32).reshape(cells().shape)},
    "no KV": {"kv": cells()[:0]},
}


@pytest.mark.parametrize("what", DECODERS)
def test_a_decoder_that_cannot_be_is_refused(library: Library, what: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        made(library, **DECODERS[what])


# -- products, attention, draws -----------------------------------------------------------------------


def test_products_of_what_does_not_fit_are_refused(library: Library) -> None:
    weight, x = np.ones((40, 64), np.float32), np.ones((3, 64), np.float32)
    matrix = PackedMatrix.pack(library, 0, Compute.F32, 40, 64, weight.view(np.uint8).reshape(-1))
    inputs, y = prepare(library, Compute.F32, x), np.empty((3, 40), np.float32)
    y.flags.writeable = False
    read_only, y = y, np.empty((3, 40), np.float32)
    asked: list[Callable[[], Any]] = [
        lambda: linear(matrix, x[:, :63]),
        lambda: linear(matrix, x[:, ::-1]),
        lambda: linear(matrix, x.astype(np.float64)),  # type: ignore[arg-type]
        lambda: linear(matrix, x[0]),
        lambda: linear(matrix, x, threads=0),
        lambda: linear(matrix, x, threads=2**32 + 1),
        lambda: multiply(matrix, inputs, 4, y, 1),
        lambda: multiply(matrix, inputs, -1, y, 1),
        lambda: multiply(matrix, inputs, 3, read_only, 1),
        lambda: multiply(matrix, inputs[:, ::2], 3, y, 1),
        lambda: prepare(library, 7, x),  # type: ignore[arg-type]
        lambda: prepare(library, Compute.I8, x[:, :40].copy()),
        lambda: norm(library, x, np.ones(63, np.float32), 1e-5),
        lambda: gate(library, "relu", x, x),
        lambda: gate(library, "silu", x, x[:2].copy()),
        lambda: embed(library, 0, weight.view(np.uint8).reshape(-1), 40, 64, np.array([-1])),
        lambda: embed(library, 0, weight.view(np.uint8).reshape(-1), 40, 64, np.array([40])),
        lambda: embed(library, 0, weight.view(np.uint8).reshape(-1), 41, 64, np.array([40])),
        lambda: embed(library, 5, weight.view(np.uint8).reshape(-1), 40, 64, np.array([0])),
        lambda: PackedMatrix.pack(library, 0, 9, 40, 64, weight.view(np.uint8).reshape(-1)),  # type: ignore[arg-type]
        lambda: PackedMatrix.pack(library, 2, Compute.I8, 40, 63, weight.view(np.uint8).reshape(-1)),
        lambda: PackedMatrix.pack(library, 0, Compute.F32, 2**31 - 1, 2**31 - 1, b""),
        lambda: PackedMatrix.pack(library, 0, Compute.F32, -40, -64, weight.view(np.uint8).reshape(-1)),
    ]
    for ask in asked:
        with pytest.raises(ValueError, match=r"\w"):
            ask()
    assert packed_nbytes(library, 0, Compute.F32, 2**31 - 1, 2**31 - 1) is None


@pytest.mark.parametrize("form", list(Compute), ids=lambda form: form.name)
def test_products_of_no_rows_and_of_no_numbers_are_defined(library: Library, form: Compute) -> None:
    blocks = np.ones((40, 2, 34), np.uint8)
    matrix = PackedMatrix.pack(library, 8, form, 40, 64, blocks.reshape(-1))
    assert linear(matrix, np.empty((0, 64), np.float32)).shape == (0, 40)
    for number in (math.nan, math.inf, -math.inf, 3e38, 1e-45):
        x = np.full((2, 64), number, np.float32)
        x[1] = 1
        assert np.isfinite(linear(matrix, x, threads=3)[1]).all()
    assert norm(library, np.empty((0, 64), np.float32), np.ones(64, np.float32), 1e-5).shape == (0, 64)
    assert norm(library, np.empty((2, 0), np.float32), np.empty(0, np.float32), 1e-5).shape == (2, 0)


def test_attention_to_what_does_not_fit_is_refused(library: Library) -> None:
    queries = np.ones((4, 2 * KV_HEADS, DIM), np.float32)
    asked: list[dict[str, Any]] = [
        {"layer": 1},
        {"layer": -1},
        {"queries": queries[:3]},
        {"queries": queries[:, :3].copy()},
        {"queries": queries[..., ::2]},
        {"queries": queries.astype(np.float64)},
        {"window": -1},
        {"window": 2**63},
        {"threads": 0},
        {"threads": 10**6},
        {"kv": cells()[0]},
        {"kv": torch.zeros((BLOCKS, 1, KV_HEADS, 2, BLOCK_SIZE, 20))},
    ]
    usual: dict[str, Any] = {"kv": cells(), "layer": 0, "queries": queries, "step": GOOD}
    assert attend(library, **usual).shape == queries.shape
    for change in asked:
        with pytest.raises(ValueError, match=r"\w"):
            attend(library, **(usual | change))


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (70, 32), (200, 256), (3, 48)])
def test_attention_of_any_number_of_heads_is_computed(library: Library, group: int, dim: int, bf16: bool) -> None:
    kv = torch.ones((3, 1, 1, 2, 5, dim), dtype=torch.bfloat16 if bf16 else torch.float32)
    queries = np.ones((9, group, dim), np.float32)
    got = attend(library, kv, 0, queries, Step.of([([0] * 9, 3, 3, [2, 0, 1])], []), threads=3)
    assert np.abs(got - 1).max() < 1e-6


def test_rotations_at_any_angle_are_defined(library: Library) -> None:
    positions = np.array([0, -1, 2**40, 2**63 - 1, -(2**63)])
    x = np.ones((5, 1, 32), np.float32)
    for frequency in (1.0, 1e30, math.inf, math.nan):
        got = rotate(library, x, positions, np.full(16, frequency, np.float32))
        assert np.isfinite(got[: 3 if frequency == 1 else 0]).all()
    with pytest.raises(ValueError, match="no halves"):
        rotate(library, np.ones((5, 1, 33), np.float32), positions, np.ones(16, np.float32))
    with pytest.raises(ValueError, match="positions"):
        rotate(library, x, positions[:4], np.ones(16, np.float32))


ODD = [0.0, -1.0, 1e-300, 1e-45, 1e-5, 1.0, 1e6, 3e38, 1e39, 1e300, math.inf, -math.inf, math.nan]
COUNTS = [0, 1, 5, 299, 300, 301, -1, 2**62, -(2**63)]


@settings(max_examples=400, deadline=None)
@given(
    heat=st.sampled_from(ODD),
    top_p=st.sampled_from([*ODD, 0.5, 0.999]),
    least=st.sampled_from([*ODD, -3.0]),
    top_k=st.sampled_from(COUNTS),
    likeliest=st.sampled_from(COUNTS[:-2]),
    scale=st.sampled_from([0.0, 1.0, 1e30, math.inf]),
    masked=st.integers(0, 300),
    seed=st.integers(0, 99),
)
def test_a_draw_of_any_parameters_gives_a_token_or_none(
    library: Library,
    heat: float,
    top_p: float,
    least: float,
    top_k: int,
    likeliest: int,
    scale: float,
    masked: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    draws = blank_draws(2)
    draws["heat"], draws["top_p"], draws["least"], draws["top_k"], draws["likeliest"] = (
        heat,
        top_p,
        least,
        top_k,
        likeliest,
    )
    with np.errstate(all="ignore"):
        logits = np.asarray(random.normal(0, 1, (2, 300)) * scale, np.float32)
    logits[:, random.permutation(300)[:masked]] = -np.inf
    found = Sampler(library, 2).sample(logits, draws)
    assert found.draws["token"].min() >= -1
    assert found.draws["token"].max() < 300
    assert found.ids.shape[1] <= 300


def test_draws_of_what_does_not_fit_are_refused(library: Library) -> None:
    logits, draws = np.zeros((2, 8), np.float32), blank_draws(2)
    fixed = blank_draws(2)
    fixed.flags.writeable = False
    sampler = Sampler(library)
    many: NDArray[np.float32] = np.lib.stride_tricks.as_strided(logits, (2**24, 8), (0, 4))
    asked: list[tuple[Any, Any]] = [
        (logits[:, ::-1], draws),
        (logits[::-1], draws),
        (logits[:, :0], draws),
        (logits, draws[:1]),
        (logits, fixed),
        (many, np.broadcast_to(draws[:1], 2**24)),
    ]
    for given_logits, given_draws in asked:
        with pytest.raises(ValueError, match=r"\w"):
            sampler.sample(given_logits, given_draws)
    assert sampler.sample(logits[:0], draws[:0]).draws.shape == (0,)
    for threads in (0, -1, 10**6):
        with pytest.raises(ValueError, match="threads"):
            Sampler(library, threads)


# -- what is missing ----------------------------------------------------------------------------------

LIMITED = """
import resource, sys
import numpy as np
from pathlib import Path
from deepinfra_kernels.library import load
from deepinfra_kernels.linear import Compute, PackedMatrix, linear
from deepinfra_kernels.sampling import Sampler, blank_draws
library = load(sys.argv[1], Path(sys.argv[2]))
matrix = PackedMatrix.pack(library, 0, Compute.F32, 4096, 64, bytes(4096 * 64 * 4))
sampler, logits, draws = Sampler(library, 2), np.zeros((3, 2**22), np.float32), blank_draws(3)
draws["heat"], draws["top_p"] = 1, 0.5
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
try:
    ASK
except Exception as error:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(type(error).__name__, error)
    assert linear(matrix, np.ones((3, 64), np.float32), 2).shape == (3, 4096)
    assert sampler.sample(logits, draws).draws["token"].max() < 2**22
    print("lives")
"""

LACKING = {
    "threads of a pool": ("Sampler(library, 64)", "RuntimeError kernels get no more threads"),
    "threads of a product": ("linear(matrix, np.ones((3, 64), np.float32), 64)", "RuntimeError kernels get no more"),
    "memory of draws, on each thread": ("sampler.sample(logits, draws)", "MemoryError kernels get no more memory"),
    "memory of one draw": ("sampler.sample(logits[:1], draws[:1])", "MemoryError kernels get no more memory"),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_the_system_does_not_give_is_an_error(library: Library, what: str) -> None:
    """An exception of C++ that got out would end the process."""
    ask, said = LACKING[what]
    script = LIMITED.replace("ASK", ask)
    done = subprocess.run(
        [sys.executable, "-c", script, library.path, str(library.file.parent)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    told, lives = done.stdout.splitlines()
    assert told.startswith(said)
    assert lives == "lives"


def test_a_decoder_of_more_rows_than_fit_is_an_error(library: Library) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**33, before[1]))
    try:
        with pytest.raises(MemoryError, match="kernels get no more memory"):
            made(library, max_rows=2**23 - 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    with closing(made(library)) as decoder:
        assert decoder.step(GOOD)[1].all()
