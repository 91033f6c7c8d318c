"""Times products of cold packed weights, format by format, beside torch's own prepacked bfloat16.

    python kernels/bench/linear.py --path avx512 --rows 1 8 32 96

On one thread: both threads of a step are timed by `step.py`. Each line is the fastest of many calls, because other
programs only ever make one slower: time of a call, bytes of weights a second, operations a second. Every call takes
another matrix, and all of them together are larger than the caches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from deepinfra_kernels.cpu import paths
from deepinfra_kernels.library import Library, load
from deepinfra_kernels.linear import Compute, PackedMatrix, Room, multiply, prepare, row_nbytes
from numpy.typing import NDArray

FORMATS = {
    "f32": (0, Compute.F32),
    "bf16": (30, Compute.BF16),
    "q4_0": (2, Compute.I8),
    "q4_1": (3, Compute.I8),
    "q5_1": (7, Compute.I8),
    "q8_0": (8, Compute.I8),
    "q4_k": (12, Compute.I8),
    "q6_k": (14, Compute.I8),
}
FACTORS = {12: (0, 2), 13: (0, 2), 14: (208, 1), 3: (0, 2), 7: (0, 2), 2: (0, 1), 6: (0, 1), 8: (0, 1)}
"""Where a block has its factors in half precision, and how many."""

COLD = 160 << 20
"""Bytes of matrices to go round: several times a large third-level cache."""


def stored(source: int, nbytes: int, inputs: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """A matrix as a file of this type holds it: random bits, with factors that are small normal numbers."""
    rows = random.integers(0, 256, nbytes, np.uint8)
    if source in FACTORS:
        begin, count = FACTORS[source]
        block = nbytes_of_block(source)
        rows.reshape(-1, block)[:, begin + 1 : begin + 2 * count : 2] = 0x20
    else:
        rows[(3 if source == 0 else 1) :: (4 if source == 0 else 2)] = 0x3C
    return rows


def nbytes_of_block(source: int) -> int:
    """Bytes of a block of a quantised type."""
    return {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 12: 144, 13: 176, 14: 210}[source]


def fastest(calls: Sequence[Callable[[], None]], seconds: float) -> float:
    """Seconds of the fastest call, of as many as there is time for."""
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        for call in calls:
            begin = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begin)
    return best


def ours(
    library: Library, source: int, compute: Compute, out: int, inputs: int, rows: int
) -> tuple[list[Callable[[], None]], int]:
    """Calls on different matrices, and the bytes of one."""
    random, room = np.random.default_rng(0), Room()
    nbytes = row_nbytes(library, source, inputs)
    assert nbytes is not None
    file = stored(source, out * nbytes, inputs, random)
    first = PackedMatrix.pack(library, source, compute, out, inputs, file, room=room)
    count = max(2, COLD // first.nbytes)
    matrices = [
        first,
        *(PackedMatrix.pack(library, source, compute, out, inputs, file, room=room) for _ in range(count - 1)),
    ]
    x = np.asarray(random.normal(0, 1, (rows, inputs)), np.float32)
    prepared, y = prepare(library, compute, x), np.empty((rows, out), np.float32)
    return [lambda m=m: multiply(m, prepared, rows, y, 1) for m in matrices], first.nbytes  # type: ignore[misc]


def theirs(out: int, inputs: int, rows: int) -> tuple[list[Callable[[], None]], int]:
    """The same with torch's bfloat16, packed by oneDNN for this number of rows."""
    weight, x = torch.randn(out, inputs).bfloat16(), torch.randn(rows, inputs).bfloat16()
    nbytes = out * inputs * 2
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for _ in range(COLD // nbytes)]
    multiplied = torch.ops.mkldnn._linear_pointwise
    return [lambda w=w: multiplied(x, w, None, "none", [], "") for w in packed], nbytes  # type: ignore[misc]


def main() -> None:
    """Parses arguments and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=paths()[0], choices=paths())
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "deepinfra-kernels-bench")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32, 96])
    parser.add_argument("--out", type=int, default=8192)
    parser.add_argument("--inputs", type=int, default=1536)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line")
    options = parser.parse_args()
    library = load(options.path, options.cache)
    torch.set_num_threads(1)

    def show(name: str, rows: int, calls: list[Callable[[], None]], nbytes: int) -> None:
        taken = fastest(calls, options.seconds)
        rate = 2e-9 * rows * options.out * options.inputs / taken
        sys.stdout.write(
            f"{name:>10} {rows:>5} rows {taken * 1e6:9.1f} us {nbytes / taken * 1e-9:7.1f} GB/s {rate:8.0f} GF/s\n"
        )

    with torch.inference_mode():
        for rows in options.rows:
            for name in options.formats:
                source, compute = FORMATS[name]
                show(name, rows, *ours(library, source, compute, options.out, options.inputs, rows))
            show("torch bf16", rows, *theirs(options.out, options.inputs, rows))


if __name__ == "__main__":
    main()
