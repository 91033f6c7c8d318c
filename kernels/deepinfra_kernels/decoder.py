"""A decoder whose whole step is one call: all layers and the head, on its own threads, over paged keys and values."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from deepinfra_kernels.arrays import address
from deepinfra_kernels.linear import PackedMatrix, row_nbytes
from deepinfra_kernels.records import (
    NORMS,
    LayerRecord,
    MatrixRecord,
    ModelRecord,
    StepRecord,
    cache_record,
    declare,
)
from deepinfra_kernels.status import check_threads

if TYPE_CHECKING:
    from deepinfra_kernels.library import Library

__all__ = ("PARTS", "Decoder", "Layer", "Spec", "Step", "declare")

PARTS: Final = ("embed", "norm", "qkv", "write", "attention", "output", "gate_up", "down", "head")
"""What the seconds of a step are told by. `norm` also rounds the inputs of products, where rows are more than eight."""

_ACTIVATIONS: Final = ("silu", "gelu_tanh")
_MOST_LAYERS: Final = 4096  # whose phases a pool can count
_MOST_TASKS: Final = 2**24 - 1  # of a phase
_MOST_KV_HEADS: Final = 256
_MOST: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Sizes and constants of a decoder.

    Attributes:
        inv_freq: Radians per position, float32 `[head_dim / 2]`; halves `(i, i + head_dim / 2)` are rotated.
        rope_factor: What cosines and sines are multiplied by.
        query_scale: What products of queries and keys are multiplied by.
        window: How many positions a row of any layer sees, its own included; 0 = all.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    vocab_size: int
    eps: float
    query_scale: float
    inv_freq: NDArray[np.float32]
    rope_factor: float = 1.0
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    window: int = 0

    def why_not(self) -> str:
        """Why there are no kernels for these sizes; empty if there are."""
        sizes = (self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim, self.inner_size, self.vocab_size)
        if not all(0 < size <= _MOST for size in sizes) or not 0 <= self.window <= _MOST:
            return "a size is out of range"
        if self.head_dim % 16 or not 32 <= self.head_dim <= 256:
            return f"head_dim is {self.head_dim}, not a multiple of 16 from 32 to 256"
        if self.num_kv_heads > _MOST_KV_HEADS:
            return f"num_kv_heads is {self.num_kv_heads}, and {_MOST_KV_HEADS} are the most"
        if self.num_heads % self.num_kv_heads:
            return f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
        if self.activation not in _ACTIVATIONS:
            return f"activation is {self.activation}, not one of {', '.join(_ACTIVATIONS)}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: its matrices, each in a format of its own, and weights of its norms in float32.

    Attributes:
        before: `[hidden_size]`, of the norm before attention; `between`, before the gated layer.
        query_norm: `[head_dim]`, where queries are normalised per head before they are rotated; `key_norm` likewise.
    """

    query: PackedMatrix
    key: PackedMatrix
    value: PackedMatrix
    output: PackedMatrix
    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    before: NDArray[np.float32]
    between: NDArray[np.float32]
    query_norm: NDArray[np.float32] | None = None
    key_norm: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Rows of some sequences, one sequence after the other; all arrays int64.

    Attributes:
        tokens: `[rows]`.
        counts: `[seqs]`, rows of each sequence, at least one each.
        starts: `[seqs]`, position of each sequence's first row.
        write_froms: `[seqs]`; rows at positions below it write no keys and values, which are there already.
        ends: `[seqs]`, where each sequence's block table ends in `blocks`.
        blocks: The block tables, one after the other.
        wanted: Rows whose logits are wanted.
    """

    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    write_froms: NDArray[np.int64]
    ends: NDArray[np.int64]
    blocks: NDArray[np.int64]
    wanted: NDArray[np.int64]

    @classmethod
    def of(cls, seqs: Sequence[tuple[Sequence[int], int, int, Sequence[int]]], wanted: Sequence[int]) -> Step:
        """Of sequences, each `(tokens, start, write_from, block table)`."""

        def flat(parts: list[Sequence[int]]) -> NDArray[np.int64]:
            return np.concatenate([np.asarray(part, np.int64) for part in parts]) if parts else np.empty(0, np.int64)

        return cls(
            tokens=flat([tokens for tokens, _, _, _ in seqs]),
            counts=np.array([len(tokens) for tokens, _, _, _ in seqs], np.int64),
            starts=np.array([start for _, start, _, _ in seqs], np.int64),
            write_froms=np.array([write_from for _, _, write_from, _ in seqs], np.int64),
            ends=np.cumsum([len(table) for _, _, _, table in seqs], dtype=np.int64),
            blocks=flat([table for _, _, _, table in seqs]),
            wanted=np.asarray(wanted, np.int64),
        )

    def record(self, logits: NDArray[np.float32] | None = None, finite: NDArray[np.bool_] | None = None) -> StepRecord:
        """What C++ takes; the arrays must outlive it.

        Raises:
            ValueError: An array has another type or size.
        """
        rows, seqs, wanted = len(self.tokens), len(self.counts), len(self.wanted)
        ends = self.ends
        record = StepRecord(
            rows=rows,
            seqs=seqs,
            wanted=wanted,
            tokens=address("tokens", self.tokens, "int64", (rows,)),
            counts=address("counts", self.counts, "int64", (seqs,)),
            starts=address("starts", self.starts, "int64", (seqs,)),
            write_froms=address("write_froms", self.write_froms, "int64", (seqs,)),
            ends=address("ends", ends, "int64", (seqs,)),
            blocks=address("blocks", self.blocks, "int64", (len(self.blocks),)),
            wanted_rows=address("wanted", self.wanted, "int64", (wanted,)),
            logits=None if logits is None else logits.ctypes.data,
            finite=None if finite is None else finite.ctypes.data,
        )
        if seqs and (ends[0] < 0 or ends[-1] > len(self.blocks) or (ends[1:] < ends[:-1]).any()):
            raise ValueError("ends do not cut blocks into tables")
        return record


class Decoder:
    """A decoder with its weights and threads.

    A row's logits and what it writes depend on the row, its position and the keys and values before it alone, bit by
    bit: not on other rows of the step, on how a prompt is cut into steps, on blocks or on threads. A row whose numbers
    are not finite disturbs no other sequence.

    Threads sleep between steps. The arrays that are given are kept and read in place. One step at a time.

    Args:
        library: Of the path that computes.
        spec: Sizes and constants.
        layers: In order.
        head: `[vocab_size, hidden_size]`.
        norm: Weight of the last norm, float32 `[hidden_size]`.
        embedding: The table of `vocab_size` rows as stored, any buffer.
        embedding_source: ggml's number of its type.
        kv: A tensor or array, bfloat16 or float32, in the shape of `cache.shape_of`.
        threads: With the caller, who computes too.
        max_rows: Most rows of a step.

    Raises:
        ValueError: A size, a shape or a type is wrong or not one that there are kernels for.
        MemoryError: There is no room for `max_rows` rows.
        RuntimeError: There are no more threads.
    """

    def __init__(
        self,
        library: Library,
        spec: Spec,
        layers: Sequence[Layer],
        *,
        head: PackedMatrix,
        norm: NDArray[np.float32],
        embedding: Any,
        embedding_source: int,
        kv: Any,
        threads: int,
        max_rows: int,
    ) -> None:
        if why := spec.why_not():
            raise ValueError(why)
        check_threads(threads)
        if not 1 <= max_rows <= _MOST_TASKS // spec.num_kv_heads or not 1 <= len(layers) <= _MOST_LAYERS:
            raise ValueError(f"max_rows {max_rows} or {len(layers)} layers are out of range")
        self.spec, self.max_rows, self.threads = spec, max_rows, threads
        self._functions = library.functions
        self._kept: list[Any] = [tuple(layers), head, norm, embedding, kv, library]
        hidden, width = spec.hidden_size, spec.num_heads * spec.head_dim
        row = row_nbytes(library, embedding_source, hidden)
        if row is None:
            raise ValueError(f"embedding of type {embedding_source} has no rows of {hidden}")
        frequencies = np.ascontiguousarray(spec.inv_freq, np.float32)
        if frequencies.shape != (spec.head_dim // 2,):
            raise ValueError(f"inv_freq has shape {frequencies.shape}, not ({spec.head_dim // 2},)")
        records = (LayerRecord * len(layers))()
        for index, layer in enumerate(layers):
            self._fill(records[index], layer, f"layer {index}: ")
        model = ModelRecord(
            layers=len(layers),
            hidden=hidden,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            inner=spec.inner_size,
            vocab=spec.vocab_size,
            window=spec.window,
            layer=records,
            head=self._matrix("head", head, spec.vocab_size, hidden),
            last=address("norm", norm, "float32", (hidden,)),
            embedding=address("embedding", embedding, "uint8", (spec.vocab_size * row,)),
            embedding_source=embedding_source,
            activation=_ACTIVATIONS.index(spec.activation),
            embedding_scale=spec.embedding_scale,
            eps=spec.eps,
            query_scale=spec.query_scale,
            rope_factor=spec.rope_factor,
            frequencies=frequencies.ctypes.data,
        )
        cache = cache_record(kv)
        if (cache.layers, cache.heads, cache.dim) != (len(layers), spec.num_kv_heads, spec.head_dim):
            raise ValueError(f"kv has shape {tuple(kv.shape)}, which is not that of {len(layers)} layers of {width}")
        made = ctypes.c_void_p()
        self._functions.di_decoder_new(ctypes.byref(model), ctypes.byref(cache), threads, max_rows, ctypes.byref(made))
        self._handle = made.value
        self._close = weakref.finalize(self, self._functions.di_decoder_free, self._handle)
        self._logits = np.empty((0, spec.vocab_size), np.float32)

    def close(self) -> None:
        """Ends the threads and gives the memory back; again: no effect."""
        self._close()

    def step(self, step: Step) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Computes a step; blocks, without the interpreter's lock.

        Returns:
            Logits `[wanted, vocab_size]`, valid until the next step, and for each row whether its numbers are finite.

        Raises:
            ValueError: The step is not one that can be computed; nothing was.
            MemoryError: There is no more memory; nothing was computed.
        """
        if not self._close.alive:
            raise ValueError("the decoder is closed")
        wanted = len(step.wanted)
        if wanted > len(self._logits):
            self._logits = np.empty((wanted, self.spec.vocab_size), np.float32)
        logits, finite = self._logits[:wanted], np.empty(len(step.tokens), np.bool_)
        record = step.record(logits, finite)
        self._functions.di_decoder_step(self._handle, ctypes.byref(record))
        return logits, finite

    def seconds(self) -> dict[str, float]:
        """Seconds of each part of the last step, by `PARTS`; together about what it took."""
        if not self._close.alive:
            raise ValueError("the decoder is closed")
        seconds = (ctypes.c_double * len(PARTS))()
        self._functions.di_decoder_seconds(self._handle, seconds)
        return dict(zip(PARTS, seconds, strict=True))

    def _fill(self, record: LayerRecord, layer: Layer, where: str) -> None:
        spec = self.spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        shapes = {
            "query": (queries, spec.hidden_size),
            "key": (keys, spec.hidden_size),
            "value": (keys, spec.hidden_size),
            "output": (spec.hidden_size, queries),
            "gate": (spec.inner_size, spec.hidden_size),
            "up": (spec.inner_size, spec.hidden_size),
            "down": (spec.hidden_size, spec.inner_size),
        }
        for name, (out, inputs) in shapes.items():
            setattr(record, name, self._matrix(f"{where}{name}", getattr(layer, name), out, inputs))
        for name in NORMS:
            weight = getattr(layer, name)
            if weight is None and name in ("before", "between"):
                raise ValueError(f"{where}{name} is missing")
            size = spec.head_dim if name in ("query_norm", "key_norm") else spec.hidden_size
            setattr(record, name, None if weight is None else address(f"{where}{name}", weight, "float32", (size,)))

    @staticmethod
    def _matrix(name: str, matrix: PackedMatrix, out: int, inputs: int) -> MatrixRecord:
        if (matrix.out, matrix.inputs) != (out, inputs):
            raise ValueError(f"{name} is [{matrix.out}, {matrix.inputs}], where [{out}, {inputs}] is needed")
        bias = None if matrix.bias is None else matrix.bias.ctypes.data
        return MatrixRecord(matrix.kind, int(matrix.compute), out, inputs, matrix.data.ctypes.data, bias)
