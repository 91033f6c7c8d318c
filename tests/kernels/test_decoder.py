"""A whole step gives what float64 gives, and a row's bits depend on its sequence up to it alone."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from deepinfra_kernels import cpu
from deepinfra_kernels.cache import Cache, shape_of
from deepinfra_kernels.decoder import PARTS, Decoder, Layer, Spec, Step
from deepinfra_kernels.library import Library
from deepinfra_kernels.linear import Compute, PackedMatrix
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 100, 2
HEADS, KV_HEADS, DIM = 6, 2, 32
BLOCKS, BLOCK_SIZE = 120, 7
CELLS = shape_of(blocks=BLOCKS, layers=LAYERS, kv_heads=KV_HEADS, block_size=BLOCK_SIZE, head_dim=DIM)
LENGTH = 290
"""Positions of the longest sequence here: more than one split, several tiles."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed-heads-and-biases": {"qk_norm": True, "bias": True, "activation": "gelu_tanh"},
    "window": {"window": 40, "embedding_scale": 8.0},
    "bfloat16": {"kv": torch.bfloat16, "compute": Compute.BF16},
    "integers": {"kv": torch.bfloat16, "compute": Compute.I8},
}


@pytest.fixture(scope="module", params=cpu.paths())
def library(request: pytest.FixtureRequest, kernels: Callable[[str], Library]) -> Library:
    return kernels(request.param)


@dataclass
class Tiny:
    """A decoder of random weights with its definition in float64."""

    library: Library
    qk_norm: bool = False
    bias: bool = False
    activation: Any = "silu"
    window: int = 0
    embedding_scale: float = 1.0
    kv: torch.dtype = torch.float32
    compute: Compute = Compute.F32
    layers: list[Layer] = field(default_factory=list)
    weights: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.embedding = self.rng.standard_normal((VOCAB, HIDDEN), np.float32)
        self.norm = self._norm(HIDDEN)
        self.head = self._matrix(VOCAB, HIDDEN)
        for _ in range(LAYERS):
            self.layers.append(
                Layer(
                    query=self._matrix(HEADS * DIM, HIDDEN, bias=self.bias),
                    key=self._matrix(KV_HEADS * DIM, HIDDEN, bias=self.bias),
                    value=self._matrix(KV_HEADS * DIM, HIDDEN, bias=self.bias),
                    output=self._matrix(HIDDEN, HEADS * DIM, bias=self.bias),
                    gate=self._matrix(INNER, HIDDEN),
                    up=self._matrix(INNER, HIDDEN),
                    down=self._matrix(HIDDEN, INNER),
                    before=self._norm(HIDDEN),
                    between=self._norm(HIDDEN),
                    query_norm=self._norm(DIM) if self.qk_norm else None,
                    key_norm=self._norm(DIM) if self.qk_norm else None,
                )
            )
        self.spec = Spec(
            hidden_size=HIDDEN,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            inner_size=INNER,
            vocab_size=VOCAB,
            eps=1e-5,
            query_scale=DIM**-0.5,
            inv_freq=(1e4 ** -(np.arange(0, DIM, 2) / DIM)).astype(np.float32),
            embedding_scale=self.embedding_scale,
            activation=self.activation,
            window=self.window,
        )

    def _norm(self, n: int) -> NDArray[np.float32]:
        return (1 + 0.1 * self.rng.standard_normal(n)).astype(np.float32)

    def _matrix(self, out: int, inputs: int, *, bias: bool = False) -> PackedMatrix:
        added = self.rng.standard_normal(out).astype(np.float32) if bias else None
        if self.compute == Compute.I8:  # blocks of Q8_0
            blocks = self.rng.integers(-127, 128, (out, inputs // 32, 34), np.int8)
            blocks[..., :2].view(np.float16)[...] = inputs**-0.5 / 64
            rows, source = blocks, 8
            weight = blocks[..., :2].view(np.float16).astype(np.float32) * blocks[..., 2:]
        else:
            weight = self.rng.standard_normal((out, inputs), np.float32) * np.float32(inputs**-0.5)
            rows, source = weight, 0
        packed = PackedMatrix.pack(
            self.library, source, self.compute, out, inputs, rows.view(np.uint8).reshape(-1), added
        )
        self.weights[id(packed)] = torch.from_numpy(weight.reshape(out, inputs)).double()
        return packed

    def decoder(self, *, threads: int = 2, **changes: Any) -> Decoder:
        arguments: dict[str, Any] = {
            "head": self.head,
            "norm": self.norm,
            "embedding": self.embedding.view(np.uint8).reshape(-1),
            "embedding_source": 0,
            "kv": torch.full(CELLS, math.nan, dtype=self.kv),
            "max_rows": 2 * LENGTH,
        }
        return Decoder(self.library, self.spec, **({"layers": self.layers, "threads": threads} | arguments | changes))

    def expected(self, tokens: NDArray[np.int64]) -> Tensor:
        """Logits of every position, by definition."""
        rows = len(tokens)

        def double(weight: NDArray[np.float32] | None) -> Tensor:
            assert weight is not None
            return torch.from_numpy(weight).double()

        def rms(x: Tensor, weight: NDArray[np.float32] | None) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * double(weight)

        def linear(x: Tensor, matrix: PackedMatrix) -> Tensor:
            y = x @ self.weights[id(matrix)].T
            return y if matrix.bias is None else y + double(matrix.bias)

        angles = torch.arange(rows).double()[:, None] * double(self.spec.inv_freq)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def rotate(x: Tensor, weight: NDArray[np.float32] | None) -> Tensor:
            low, high = (x if weight is None else rms(x, weight)).chunk(2, -1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

        age = torch.arange(rows)[:, None] - torch.arange(rows)
        hidden = (age < 0) | (age >= (self.window or math.inf))
        x = double(self.embedding)[torch.from_numpy(tokens)] * self.embedding_scale
        for layer in self.layers:
            normed = rms(x, layer.before)
            query, key, value = (
                linear(normed, matrix).unflatten(-1, (-1, DIM)) for matrix in (layer.query, layer.key, layer.value)
            )
            query, key = rotate(query, layer.query_norm), rotate(key, layer.key_norm)
            query = query.unflatten(1, (KV_HEADS, -1))
            scores = torch.einsum("nhgd,mhd->hgnm", query, key) * DIM**-0.5
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            x = x + linear(torch.einsum("hgnm,mhd->nhgd", weights, value).flatten(1), layer.output)
            normed = rms(x, layer.between)
            gate = linear(normed, layer.gate)
            gate = functional.silu(gate) if self.activation == "silu" else functional.gelu(gate, approximate="tanh")
            x = x + linear(gate * linear(normed, layer.up), layer.down)
        return linear(rms(x, self.norm), self.head)


@pytest.fixture(scope="module", params=OPTIONS)
def tiny(request: pytest.FixtureRequest, library: Library) -> Tiny:
    return Tiny(library, **OPTIONS[request.param])


@pytest.fixture(scope="module")
def plain(library: Library) -> Tiny:
    return Tiny(library)


def tokens(seed: int = 1, count: int = LENGTH) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def table(seed: int, of: int = 1) -> list[list[int]]:
    """Block tables of `of` sequences of full length, in random places."""
    size = -(-LENGTH // BLOCK_SIZE)
    return np.random.default_rng(seed).permutation(BLOCKS)[: of * size].reshape(of, size).tolist()  # type: ignore[no-any-return]


def prompt(decoder: Decoder, given: Sequence[int], blocks: Sequence[int]) -> NDArray[np.float32]:
    """Logits of every position, computed in one step."""
    logits, finite = decoder.step(Step.of([(given, 0, 0, blocks)], range(len(given))))
    assert finite.all()
    return logits.copy()


def test_a_prompts_logits_equal_the_definition(tiny: Tiny) -> None:
    given = prompt(tiny.decoder(), tokens().tolist(), table(0)[0])
    error = (torch.from_numpy(given) - tiny.expected(tokens())).abs().max()
    assert error < {Compute.F32: 2e-5, Compute.BF16: 4e-2, Compute.I8: 0.12}[tiny.compute]


def test_bits_are_the_same_for_any_chunks_batch_blocks_and_threads(tiny: Tiny) -> None:
    prompts = [tokens(seed) for seed in (1, 2)]
    decoder = tiny.decoder()
    whole = [prompt(decoder, one.tolist(), table(0)[0]) for one in prompts]
    cuts = [1, 5, 32, 33, 100, 3, 1, 1, 60, 20, 34]
    for threads in (1, 2, 3, 4):
        decoder, tables = tiny.decoder(threads=threads), table(threads, 2)
        at = 0
        for count in cuts:
            seqs = [(prompts[i][at : at + count].tolist(), at, 0, tables[i]) for i in (0, 1)]
            logits, _ = decoder.step(Step.of(seqs, range(2 * count)))
            for i in (0, 1):
                assert np.array_equal(logits[i * count : (i + 1) * count], whole[i][at : at + count])
            at += count
        assert at == LENGTH


def test_single_tokens_give_the_bits_of_the_whole_prompt(tiny: Tiny) -> None:
    given = tokens(count=80)
    whole = prompt(tiny.decoder(), given.tolist(), table(0)[0])
    decoder, blocks = tiny.decoder(threads=1), table(1)[0]
    for position, token in enumerate(given.tolist()):
        logits, _ = decoder.step(Step.of([([token], position, 0, blocks)], [0]))
        assert np.array_equal(logits[0], whole[position])


def test_rows_below_write_from_are_computed_and_write_nothing(plain: Tiny) -> None:
    given, blocks = tokens(count=60).tolist(), table(0)[0]
    for start in (0, 20):  # in several tiles, and in one
        kv = torch.full(CELLS, math.nan)
        decoder = plain.decoder(kv=kv)
        whole = prompt(decoder, given, blocks)
        before = kv.clone()
        logits, _ = decoder.step(Step.of([(given[start:], start, 50, blocks)], range(60 - start)))
        assert np.array_equal(logits, whole[start:])
        # Other tokens below write_from change nothing that is kept there.
        decoder.step(Step.of([([0] * (50 - start), start, 50, blocks)], []))
        assert np.array_equal(kv.numpy().view(np.int32), before.numpy().view(np.int32))


def test_nothing_is_written_outside_the_rows_cells(plain: Tiny) -> None:
    kv = torch.full(CELLS, math.nan)
    blocks = table(3)[0]
    prompt(plain.decoder(kv=kv), tokens(count=45).tolist(), blocks)
    held = torch.empty(BLOCKS, LAYERS, 2, BLOCK_SIZE, KV_HEADS, DIM)
    for block in range(BLOCKS):
        Cache(plain.library, kv).get(block, held[block])
    written = torch.isfinite(held).transpose(1, 3).flatten(2).all(-1).flatten()
    cells = [blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in range(45)]
    assert sorted(cells) == written.nonzero().flatten().tolist()
    assert int(torch.isfinite(kv).sum()) == 45 * 2 * LAYERS * KV_HEADS * DIM


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_told_and_disturbs_no_other_sequence(plain: Tiny, bad: float) -> None:
    embedding = plain.embedding.copy()
    embedding[7, 3] = bad
    decoder = plain.decoder(embedding=embedding.view(np.uint8).reshape(-1))
    tables = table(0, 2)
    good = [token for token in tokens().tolist() if token != 7][:40]
    alone = prompt(decoder, good, tables[0])
    logits, finite = decoder.step(Step.of([([3, 7, 5], 0, 0, tables[1]), (good, 0, 0, tables[0])], range(43)))
    assert finite.tolist() == [True, False, False] + [True] * 40
    assert np.array_equal(logits[3:], alone)


def test_logits_are_those_of_the_rows_that_are_wanted(plain: Tiny) -> None:
    given, decoder = tokens(count=50).tolist(), plain.decoder()
    whole = prompt(decoder, given, table(0)[0])
    for wanted in ([49], [3, 3, 0], [], list(range(12, 40))):
        logits, finite = decoder.step(Step.of([(given, 0, 0, table(1)[0])], wanted))
        assert np.array_equal(logits, whole[wanted])
        assert len(finite) == 50


def test_chunks_without_wanted_rows_leave_the_keys_and_values_of_the_last_layer_too(tiny: Tiny) -> None:
    given, blocks = tokens().tolist(), table(0)[0]
    whole = prompt(tiny.decoder(), given, blocks)
    decoder = tiny.decoder()
    other = tokens(2).tolist()
    for start, end in ((0, 100), (100, 120), (120, 121), (121, 280)):
        decoder.step(Step.of([(given[start:end], start, 0, blocks)], []))
    logits, finite = decoder.step(Step.of([(other[:70], 0, 0, table(0, 2)[1]), (given[280:], 280, 0, blocks)], [79]))
    assert np.array_equal(logits[0], whole[-1])
    assert finite.all()


@pytest.mark.parametrize("wanted", [[], [3], [0, 1, 2, 3]])
def test_keys_of_the_last_layer_that_are_not_finite_are_told_of_rows_nobody_wants(
    plain: Tiny, wanted: list[int]
) -> None:
    last = dataclasses.replace(plain.layers[1].key, bias=np.full(KV_HEADS * DIM, np.inf, np.float32))
    layers = [plain.layers[0], dataclasses.replace(plain.layers[1], key=last)]
    decoder = plain.decoder(layers=layers)
    _, finite = decoder.step(Step.of([([1, 2, 3, 4], 0, 0, table(0)[0])], wanted))
    assert not finite.any()


def test_the_layers_that_were_given_may_be_forgotten(plain: Tiny) -> None:
    layers = list(plain.layers)
    decoder = plain.decoder(layers=layers)
    layers.clear()
    assert tuple(decoder._kept[0]) == tuple(plain.layers)


def test_the_seconds_of_the_parts_are_told(plain: Tiny) -> None:
    decoder = plain.decoder()
    prompt(decoder, tokens().tolist(), table(0)[0])
    seconds = decoder.seconds()
    assert tuple(seconds) == PARTS
    assert all(seconds[part] > 0 for part in PARTS)


def test_threads_end_with_the_decoder(plain: Tiny) -> None:
    def count() -> int:
        with open("/proc/self/status") as lines:
            return int(next(line for line in lines if line.startswith("Threads:")).split()[1])

    before = count()
    decoder = plain.decoder(threads=4)
    assert count() == before + 3
    prompt(decoder, [1, 2, 3], table(0)[0])
    decoder.close()
    decoder.close()
    assert count() == before
    with pytest.raises(ValueError, match="closed"):
        prompt(decoder, [1], table(0)[0])


def test_decoders_of_several_threads_do_not_meet(plain: Tiny) -> None:
    given = tokens(count=70).tolist()
    whole = prompt(plain.decoder(), given, table(0)[0])
    found: list[bool] = []

    def work() -> None:
        decoder = plain.decoder(threads=2)
        found.extend(np.array_equal(prompt(decoder, given, table(0)[0]), whole) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 30


def array(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens": array(1, VOCAB)}, "tokens has one outside"),
        ({"tokens": array(1, -1)}, "tokens has one outside"),
        ({"tokens": array()}, "rows are none"),
        ({"tokens": np.zeros(2 * LENGTH + 1, np.int64)}, "rows are none, or more"),
        ({"tokens": array(1, 2, 3)}, "counts do not add up"),
        ({"counts": array(0)}, "counts has a sequence without rows"),
        ({"starts": array(-1)}, "starts has a position below zero"),
        ({"starts": array(6)}, "blocks has too few"),
        ({"starts": array(1, 2)}, "starts"),
        ({"ends": array(2)}, "ends do not cut"),
        ({"ends": array(-1)}, "ends do not cut"),
        ({"blocks": array(BLOCKS)}, "blocks has one that does not exist"),
        ({"blocks": array(-1)}, "blocks has one that does not exist"),
        ({"wanted": array(2)}, "wanted has a row"),
        ({"tokens": np.array([1, 2], np.int32)}, "tokens is int32"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(plain: Tiny, changes: dict[str, Any], why: str) -> None:
    good = Step.of([([1, 2], 0, 0, [5])], [1])
    decoder = plain.decoder(threads=1)
    with pytest.raises(ValueError, match=why):
        decoder.step(dataclasses.replace(good, **changes))
    decoder.step(good)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"threads": 0}, "threads 0"),
        ({"max_rows": 0}, "max_rows 0"),
        ({"norm": np.ones(3, np.float32)}, "norm"),
        ({"norm": np.ones(HIDDEN)}, "norm is float64"),
        ({"embedding": b"short"}, "embedding"),
        ({"embedding_source": 99}, "embedding of type 99"),
        ({"kv": torch.zeros(3, 1, KV_HEADS, 2, 4, DIM)}, "kv has shape"),
        ({"kv": torch.zeros(3, LAYERS, KV_HEADS, 2, 4, DIM).half()}, "kv is float16"),
        ({"kv": torch.zeros(3, LAYERS, KV_HEADS, 2, DIM, 4).transpose(4, 5)}, "gaps"),
    ],
)
def test_a_decoder_that_does_not_fit_is_refused(plain: Tiny, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        plain.decoder(**changes)


def test_a_matrix_of_another_shape_is_refused(plain: Tiny) -> None:
    layers = [dataclasses.replace(plain.layers[0], gate=plain.layers[0].down), plain.layers[1]]
    with pytest.raises(ValueError, match="layer 0: gate"):
        Decoder(
            plain.library,
            plain.spec,
            layers,
            head=plain.head,
            norm=plain.norm,
            embedding=plain.embedding.view(np.uint8).reshape(-1),
            embedding_source=0,
            kv=torch.zeros(3, LAYERS, KV_HEADS, 2, 4, DIM),
            threads=1,
            max_rows=1,
        )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_dim": 24}, "head_dim is 24"),
        ({"head_dim": 272}, "head_dim is 272"),
        ({"num_kv_heads": 4}, "no multiple"),
        ({"activation": "relu"}, "activation is relu"),
        ({"window": -1}, "out of range"),
        ({"vocab_size": 0}, "out of range"),
    ],
)
def test_sizes_without_kernels_are_named(plain: Tiny, changes: dict[str, Any], why: str) -> None:
    assert why in dataclasses.replace(plain.spec, **changes).why_not()
    assert not plain.spec.why_not()
