"""What a request gives does not depend on the batch: tokens, logprobs and every logit, to the bit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
import xxhash
from deepinfra_kernels import build, cpu

from deepinfra.bench.simulate.recipe import RawTokens
from deepinfra.config import read_settings, resolve
from deepinfra.core.events import Failed
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine, Pool
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.eager import Eager
from deepinfra.executors.torch.native import Native
from deepinfra.executors.torch.rows import Drawn, Row
from deepinfra.interfaces.executor import Executor
from deepinfra.kvstores.memory import MemoryStore
from deepinfra.registry import load_plugins
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.speculators.ngram import Ngram
from deepinfra.testing.invariance import Answer, Ask, alone, hits, mixed

FORMS = {
    "stored": {"weights": "stored", "dtype": "bfloat16"},
    "stored-f32": {"weights": "stored", "dtype": "float32"},
    "bf16": {"weights": "dense", "dtype": "bfloat16"},
    "fp32": {"weights": "dense", "dtype": "float32"},
}
PATHS = cpu.paths()
GREEDY = SamplingParams(temperature=0.0, logprobs=3)
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, logprobs=3)


@dataclass
class Bits:
    """Digests of all logits, by the tokens before them: one history, one row of logits.

    `seen` may be that of other runs, whose logits are then held against these.
    """

    rows: int = 0
    again: int = 0
    differing: int = 0
    seen: dict[bytes, bytes] = field(default_factory=dict)

    def note(self, row: Row, logits: Any) -> None:
        key, digest = row.history.tobytes(), xxhash.xxh3_128_digest(logits.tobytes())
        self.rows += 1
        self.again += key in self.seen
        self.differing += self.seen.setdefault(key, digest) != digest


@pytest.fixture
def bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bits]:
    """What executors in this process compute, whoever they are."""
    bits = Bits()

    def watch(kind: type[Native] | type[Eager], logits: Callable[[Any], Any]) -> None:
        inner = kind.sample

        def sample(self: Any, rows: Sequence[Row]) -> Sequence[Drawn]:
            for row, line in zip(rows, logits(self), strict=True):
                bits.note(row, line)
            return inner(self, rows)

        monkeypatch.setattr(kind, "sample", sample)

    watch(Native, lambda model: model._logits)
    watch(Eager, lambda model: model._logits.float().numpy())
    yield bits
    assert bits.rows > 20, "nothing was watched"


def asks(draw: random.Random, count: int, new: int) -> list[Ask]:
    """Prompts of one token to five blocks, many of them with a common beginning; the last has over 256 tokens."""
    shared = [draw.randrange(49_152) for _ in range(60)]
    found = []
    for index in range(count):
        head = shared[: draw.choice((0, 0, 5, 16, 33, 60))] if index < count - 1 else shared * 4 + shared[:20]
        tail = [draw.randrange(49_152) for _ in range(draw.randint(1, 20))]
        found.append(Ask((*head, *tail), DRAWN if index % 3 == 0 else GREEDY, index, new))
    return found


def executor(path: Path, form: str, threads: int = 2, **options: Any) -> TorchExecutor:
    # As much room as 32 sequences take, so that any may be preempted but none has to be.
    room = {"num_blocks": 420, "max_step_tokens": 256, "max_seqs": 40, "num_slots": 8}
    return TorchExecutor(str(path), threads=threads, **{"batch_invariant": True, **room, **FORMS[form], **options})


@dataclass
class Truth:
    """What each of some prompts gives alone, and the digests of all logits that came of it, and of runs since."""

    asks: list[Ask]
    answers: list[Answer]
    seen: dict[bytes, bytes]


@pytest.fixture(scope="module")
def truths() -> dict[tuple[str, str], Truth]:
    """By path and form; computed by whichever test comes first."""
    return {}


async def differing(one: Executor, other: Executor, draw: random.Random, cases: int, new: int) -> tuple[int, int]:
    """Cases of `other` that differ from `one` running each alone, and how many there were."""
    given = asks(draw, 32 if cases > 20 else 9, new)
    async with one:
        truth = await alone(one, given)
    return await compared(other, given, truth, draw, cases)


async def compared(
    other: Executor, given: list[Ask], truth: list[Answer], draw: random.Random, cases: int
) -> tuple[int, int]:
    """Cases of an executor that differ from the truth, and how many there were."""
    count = wrong = 0
    async with other:
        for index in (-1, 0) if cases > 20 else (0,):
            wrong += len(await hits(other, given[index], truth[index], draw))
            count += len(given[index].prompt) // 16 + 1
        assert count < cases
        while count < cases:
            rows = min(draw.choice((1, 2, 3, 4, 8, 16, 31, 32)), cases - count, len(given))
            chosen = draw.sample(range(len(given)), rows)
            wrong += len(await mixed(other, [given[i] for i in chosen], [truth[i] for i in chosen], draw))
            count += rows
    return wrong, count


@pytest.mark.parametrize("kernels", PATHS)
async def test_no_bit_depends_on_the_batch(smollm2_path: Path, bits: Bits, kernels: str) -> None:
    one = executor(smollm2_path, "stored", threads=1, kernels=kernels)
    other = executor(smollm2_path, "stored", kernels=kernels)
    assert await differing(one, other, random.Random(1), 16, 3) == (0, 16)
    assert bits.differing == 0


async def test_no_bit_depends_on_the_process(smollm2_path: Path, bits: Bits) -> None:
    options = {**FORMS["stored"], "num_blocks": 420, "max_step_tokens": 256, "max_seqs": 40, "threads": 2}
    settings, provenance = read_settings(
        keywords={
            "model": str(smollm2_path),
            "pool": {"executor": {"use": "torch", "process": True, "batch_invariant": True, **options}},
        },
        environ={},
    )
    pool = resolve(settings, load_plugins(), provenance).pool
    assert pool is not None
    other = pool.build().executor
    assert "batch-invariant" in other.provides
    one = executor(smollm2_path, "stored", threads=1)
    assert await differing(one, other, random.Random(2), 14, 3) == (0, 14)


async def test_no_bit_depends_on_what_an_engine_does_with_its_sequences(smollm2_path: Path, bits: Bits) -> None:
    """Few blocks, so that sequences are preempted; n-gram drafts; a store that is cold, then warm."""
    draw = random.Random(6)
    words = [[draw.randrange(49_152) for _ in range(draw.randint(2, 9))] for _ in range(4)]
    prompts = [tuple(token for _ in range(9) for token in draw.choice(words)) for _ in range(8)]
    requests = [
        GenerateRequest(input=prompt, sampling=DRAWN if i % 2 else GREEDY, max_tokens=10, ignore_eos=True, seed=i)
        for i, prompt in enumerate(prompts)
    ]

    async def ask(engine: Engine, request: GenerateRequest) -> None:
        async with engine.generate(request) as stream:
            assert not [event async for event in stream if isinstance(event, Failed)]

    async with Engine(RawTokens(), Pool(Fcfs(), executor(smollm2_path, "stored", threads=1))) as engine:
        for request in requests:
            await ask(engine, request)
    watched = bits.rows
    crowded = executor(smollm2_path, "stored", num_blocks=18, max_step_tokens=24, max_seqs=8)
    pool = Pool(Fcfs(), crowded, store=MemoryStore(), speculator=Ngram())
    async with Engine(RawTokens(), pool) as engine:
        for round_ in range(20):  # cold, then warm: how much was saved beside the steps, and is loaded, time decides
            async with anyio.create_task_group() as tasks:
                for request in requests:
                    tasks.start_soon(ask, engine, request)
            stats = engine.stats()
            if round_ and "ram" in stats.cached_tokens:
                break
    assert bits.rows > 2 * watched
    assert bits.again > watched
    assert bits.differing == 0
    assert stats.pools[0].preemptions > 0
    assert stats.cached_tokens["ram"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", PATHS)
async def test_no_bit_depends_on_the_batch_in_2_000_cases(
    smollm2_path: Path,
    bits: Bits,
    truths: dict[tuple[str, str], Truth],
    anyio_backend_name: str,
    kernels: str,
    form: str,
    threads: int,
) -> None:
    """Batches of 1 to 32, order, chunks, preemption, places, hits at every block, drafts, 1 to 3 threads.

    42 cases in each of 48 runs: 2,016. Runs of one path and form have one truth; each schedules otherwise, and its
    logits are held against those of all before it.
    """
    if (kernels, form) not in truths:
        given = asks(random.Random(f"{kernels} {form}"), 32, 6)
        async with executor(smollm2_path, form, 1, kernels=kernels) as one:
            truths[kernels, form] = Truth(given, await alone(one, given), bits.seen)
    truth = truths[kernels, form]
    bits.seen, again = truth.seen, bits.again
    draw = random.Random(f"{kernels} {form} {threads} {anyio_backend_name}")
    other = executor(smollm2_path, form, threads, kernels=kernels)
    assert await compared(other, truth.asks, truth.answers, draw, 42) == (0, 42)
    assert bits.differing == 0
    assert bits.again - again > 200, "few logits were compared"


class Claims(TorchExecutor):
    """Says of itself what torch does not keep."""

    @property
    def provides(self) -> frozenset[str]:
        return super().provides | {"batch-invariant"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_torch_would_be_caught(smollm2_path: Path, bits: Bits, dtype: str) -> None:
    room = {"num_blocks": 420, "max_step_tokens": 256, "max_seqs": 40, "threads": 1, "kernels": "torch"}
    one, other = (Claims(str(smollm2_path), dtype=dtype, **room) for _ in range(2))  # type: ignore[arg-type]
    wrong, _ = await differing(one, other, random.Random(3), 30, 2)
    assert wrong > 3
    assert bits.differing > 3


MUTANTS = {
    "attention's split depends on the number of sequences": (
        ("attention.h", "constexpr int64_t kSplit = 256;", "inline int64_t kSplit = 256;"),
        ("decoder.h", "    step_ = step;\n", "    step_ = step;\n    kSplit = step.seqs > 1 ? 64 : 256;\n"),
    ),
    "a product's rounding depends on the rows computed together": (
        (
            "linear.h",
            "acc[r][0] = fma(to_float(sum[r][0]), mul(s0, scale), acc[r][0]);",
            (
                "acc[r][0] = R > 1 ? fma(mul(to_float(sum[r][0]), s0), scale, acc[r][0])"
                " : fma(to_float(sum[r][0]), mul(s0, scale), acc[r][0]);"
            ),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
async def test_a_kernel_that_looks_at_the_batch_would_be_caught(
    smollm2_path: Path, bits: Bits, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = shutil.copytree(build._SOURCES, tmp_path / "csrc")
    for name, old, new in MUTANTS[mutant]:
        text = (sources / name).read_text()
        assert text.count(old) == 1, f"{name} has no longer one line to change: {old}"
        (sources / name).write_text(text.replace(old, new))
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setattr("deepinfra.executors.torch.library.kernel_cache_dir", lambda: tmp_path / "kernels")
    one, other = executor(smollm2_path, "stored", 1), executor(smollm2_path, "stored", 2)
    wrong, _ = await differing(one, other, random.Random(4), 40, 4)
    assert wrong > 5
    assert bits.differing > 20
