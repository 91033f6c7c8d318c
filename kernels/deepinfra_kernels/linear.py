"""Packed weight matrices, and the products, norms and gates of rows with them; the decoder calls the same in C++."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfra_kernels.arrays import address
from deepinfra_kernels.status import check_threads, raising

if TYPE_CHECKING:
    from deepinfra_kernels.library import Library

__all__ = (
    "Compute",
    "PackedMatrix",
    "Packing",
    "Room",
    "declare",
    "embed",
    "gate",
    "linear",
    "multiply",
    "norm",
    "packed_nbytes",
    "prepare",
    "row_nbytes",
)

_MOST: Final = 2**31 - 1
_MOST_ELEMENTS: Final = 2**56
_LINE: Final = 64
"""Bytes of a cache line, which a group of prepared 8-bit inputs begins at."""
_CHUNK: Final = 32 << 20
_MADV_HUGEPAGE: Final = getattr(mmap, "MADV_HUGEPAGE", None)


class Compute(IntEnum):
    """The form in which activations enter a product.

    `F32`: as they are. `BF16`: each rounded to bfloat16; sums stay float32. `I8`: each group of 32 as integers of 8
    bits with a scale of max|x| / 127; sums within a group are exact.
    """

    F32 = 0
    BF16 = 1
    I8 = 2


def declare(functions: ctypes.CDLL) -> None:
    """Gives the functions of `linear_abi.h` their signatures."""
    small, number, real, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    sizes: dict[str, Any] = {
        "di_packed_kind": (small, small, small),
        "di_packed_nbytes": (number, small, small, number, number),
        "di_row_nbytes": (number, small, number),
        "di_input_nbytes": (number, small, number),
    }
    for name, types in sizes.items():  # no time is worth giving up the interpreter's lock, which others would keep
        setattr(functions, name, ctypes.PYFUNCTYPE(*types)((name, functions)))
    table: dict[str, tuple[list[Any], Any]] = {
        "di_prepare": ([small, pointer, number, number, pointer], None),
        "di_norm": ([pointer, pointer, real, number, number, pointer], None),
        "di_gate": ([small, pointer, pointer, number, number, pointer], None),
        "di_embed": ([small, pointer, pointer, number, number, pointer], None),
    }
    for name, (arguments, result) in table.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, result
    raising(functions, "di_pack", [pointer, number, small])
    raising(functions, "di_linear", [small, small, number, number, *[pointer] * 3, number, pointer, small])


def row_nbytes(library: Library, source: int, n: int) -> int | None:
    """Bytes of `n` elements as a file of ggml's type `source` holds them; `None`: unknown type, or a block is cut."""
    nbytes = int(library.functions.di_row_nbytes(source, n)) if 0 < n <= _MOST else -1
    return None if nbytes < 0 else nbytes


def packed_nbytes(library: Library, source: int, compute: Compute, out: int, inputs: int) -> int | None:
    """Bytes of a packed matrix `[out, inputs]`, or `None` where the source cannot be multiplied in that form.

    Every source goes with `F32` and `BF16`; with `I8` only those with blocks of integers.
    """
    if not (0 < out <= _MOST and 0 < inputs <= _MOST and out * inputs <= _MOST_ELEMENTS):
        return None
    nbytes = int(library.functions.di_packed_nbytes(source, compute, out, inputs))
    return None if nbytes < 0 else nbytes


class Room:
    """Memory for many packed matrices side by side, on huge pages where the system has them.

    Any thread may take of it. A matrix of a small model is smaller than a huge page. Measured with SmolLM2's on Zen 4:
    weights come at 37 GB/s, and on pages of 4 KiB at 22 (4 bits) to 29 (bfloat16). A part that no matrix took costs no
    memory but the last page's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk, self._used = np.empty(0, np.uint8), 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed memory that begins at a multiple of 64; it lives as long as an array of it, and its neighbours too."""
        with self._lock:
            if self._used + nbytes > self._chunk.size:
                self._chunk, self._used = _mapped(max(nbytes, _CHUNK)), 0
            taken = self._chunk[self._used : self._used + nbytes]
            self._used += -(-nbytes // 64) * 64
            return taken


def _mapped(nbytes: int) -> NDArray[np.uint8]:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
    if _MADV_HUGEPAGE is not None:
        memory.madvise(_MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class Packing(NamedTuple):
    """A matrix to be packed; see `PackedMatrix.pack`."""

    source: int
    compute: Compute
    out: int
    inputs: int
    rows: Any
    bias: Any = None


class _PackingRecord(ctypes.Structure):
    """`Packing` of linear_abi.h."""

    _fields_ = [
        ("source", ctypes.c_int),
        ("compute", ctypes.c_int),
        ("out", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight matrix `[out, inputs]` in the layout that products read; immutable, shared between threads.

    Attributes:
        kind: How it is packed; what `Matrix::kind` takes.
        compute: The form of the activations that it is multiplied with.
        data: The packed bytes, at a multiple of 64.
        bias: float32 `[out]`, or `None`.
    """

    library: Library
    kind: int
    compute: Compute
    out: int
    inputs: int
    data: NDArray[np.uint8]
    bias: NDArray[np.float32] | None

    @classmethod
    def pack(
        cls,
        library: Library,
        source: int,
        compute: Compute,
        out: int,
        inputs: int,
        rows: Any,
        bias: Any = None,
        room: Room | None = None,
    ) -> PackedMatrix:
        """Packs the rows of a file; blocks the calling thread, about a second for 500 million weights.

        Args:
            library: Of the path that will multiply.
            source: ggml's number of the type of `rows`.
            compute: The form of the activations.
            out: Rows of the file's matrix, which are output columns.
            inputs: Elements of a row.
            rows: The file's bytes, as a buffer or an array of uint8.
            bias: float32 `[out]`, copied.
            room: Where it lies; give the matrices of a model the same one. Default: memory of its own.

        Raises:
            ValueError: The type cannot be multiplied in that form (`packed_nbytes` is `None`), or a size is wrong.
        """
        compute = Compute(compute)
        return cls.pack_all(library, [Packing(source, compute, out, inputs, rows, bias)], room)[0]

    @classmethod
    def pack_all(
        cls, library: Library, matrices: Sequence[Packing], room: Room | None = None, threads: int = 1
    ) -> list[PackedMatrix]:
        """Packs several in one call of C++, beside which Python goes on; arguments and errors as those of `pack`."""
        check_threads(threads)
        records = (_PackingRecord * len(matrices))()
        made = []
        for record, (source, compute, out, inputs, rows, bias) in zip(records, matrices, strict=True):
            nbytes, size = packed_nbytes(library, source, compute, out, inputs), row_nbytes(library, source, inputs)
            if nbytes is None or size is None:
                why = f"cannot be packed for {compute.name} activations"
                raise ValueError(f"source type {source} [{out}, {inputs}] {why}")
            begin = address("rows", rows, "uint8", (out * size,))
            data = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8) if room is None else room.take(nbytes)
            kept = None
            if bias is not None:
                kept = np.empty(out, np.float32)
                ctypes.memmove(kept.ctypes.data, address("bias", bias, "float32", (out,)), kept.nbytes)
            record.source, record.compute, record.out, record.inputs = source, compute, out, inputs
            record.rows, record.packed = begin, data.ctypes.data
            kind = int(library.functions.di_packed_kind(source, compute))
            made.append(cls(library, kind, compute, out, inputs, data, kept))
        library.functions.di_pack(records, len(records), threads)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


def linear(matrix: PackedMatrix, x: NDArray[np.float32], threads: int = 1) -> NDArray[np.float32]:
    """Multiplies rows `[rows, inputs]` with a matrix, plus its bias: `[rows, out]`.

    A row's result depends on nothing but the row and the matrix, bit by bit. Meant for tests and measurements: it
    starts its threads anew.

    Raises:
        ValueError: A shape or type is wrong.
    """
    rows = _rows("x", x, matrix.inputs)
    y = np.empty((rows, matrix.out), np.float32)
    if rows:
        inputs = prepare(matrix.library, matrix.compute, x)
        multiply(matrix, inputs, rows, y, threads)
    return y


def prepare(library: Library, compute: Compute, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounds or quantises rows as products take them: bytes `[rows, nbytes of a row]` from a cache line on.

    Raises:
        ValueError: A shape or type is wrong, or rows of int8 are no whole groups of 32.
    """
    rows, n = _rows("x", x, None), x.shape[1]
    if Compute(compute) == Compute.I8 and n % 32:
        raise ValueError(f"x has rows of {n}, which are no whole groups of 32")
    row = int(library.functions.di_input_nbytes(compute, n))
    room = np.empty(rows * row + _LINE - 1, np.uint8)
    begin = -room.ctypes.data % _LINE
    inputs = room[begin : begin + rows * row].reshape(rows, row)
    library.functions.di_prepare(compute, x.ctypes.data, rows, n, inputs.ctypes.data)
    return inputs


def multiply(matrix: PackedMatrix, inputs: NDArray[np.uint8], rows: int, y: NDArray[np.float32], threads: int) -> None:
    """Multiplies prepared rows into `y`, float32 `[rows, out]`.

    Raises:
        ValueError: A shape, a type or the number of threads is wrong, or inputs are not where `prepare` puts them.
        RuntimeError: There are no more threads.
    """
    check_threads(threads)
    library = matrix.library.functions
    row = int(library.di_input_nbytes(matrix.compute, matrix.inputs))
    begin = address("inputs", inputs, "uint8", (rows, row))
    if begin % _LINE:
        raise ValueError(f"inputs do not begin at a multiple of {_LINE} bytes, as those of `prepare` do")
    library.di_linear(
        matrix.kind,
        matrix.compute,
        matrix.out,
        matrix.inputs,
        matrix.data.ctypes.data,
        None if matrix.bias is None else matrix.bias.ctypes.data,
        begin,
        rows,
        address("y", y, "float32", (rows, matrix.out), writes=True),
        threads,
    )


def norm(library: Library, x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """RMS norm of each row: `x / sqrt(mean(x**2) + eps) * weight`.

    Raises:
        ValueError: A shape or type is wrong.
    """
    rows, n = _rows("x", x, None), x.shape[1]
    y = np.empty_like(x)
    library.functions.di_norm(x.ctypes.data, address("weight", weight, "float32", (n,)), eps, rows, n, y.ctypes.data)
    return y


def gate(library: Library, activation: str, gates: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float32]:
    """`activation(gates) * up`, elementwise on rows; `silu` or `gelu` (by tanh).

    Raises:
        ValueError: A shape or type is wrong, or the activation unknown.
    """
    names = ("silu", "gelu")
    if activation not in names:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(names)}")
    rows, n = _rows("gates", gates, None), gates.shape[1]
    y = np.empty_like(gates)
    library.functions.di_gate(
        names.index(activation), gates.ctypes.data, address("up", up, "float32", (rows, n)), rows, n, y.ctypes.data
    )
    return y


def embed(
    library: Library, source: int, table: Any, size: int, n: int, tokens: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Rows of an embedding table of `size` tokens as a file holds it: float32 `[tokens, n]`.

    Raises:
        ValueError: A shape or type is wrong, or a token out of range.
    """
    row = row_nbytes(library, source, n)
    if row is None:
        raise ValueError(f"source type {source} has no rows of {n}")
    if tokens.dtype != np.int64 or tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise ValueError(f"tokens are int64 [tokens], not {tokens.dtype} {tokens.shape}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < size:
        raise ValueError(f"tokens lie outside a table of {size}")
    y = np.empty((tokens.size, n), np.float32)
    begin = address("table", table, "uint8", (size * row,))
    library.functions.di_embed(source, begin, tokens.ctypes.data, tokens.size, n, y.ctypes.data)
    return y


def _rows(name: str, x: NDArray[np.float32], n: int | None) -> int:
    if (
        x.dtype != np.float32
        or x.ndim != 2
        or not x.flags.c_contiguous
        or not x.flags.aligned
        or x.shape[1] != (x.shape[1] if n is None else n)
    ):
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}, where float32 [rows, {n or 'n'}] is needed")
    return int(x.shape[0])
