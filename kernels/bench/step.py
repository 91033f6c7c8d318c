"""Times whole steps of a decoder with SmolLM2-135M's sizes and random weights: milliseconds, and where they go.

    python kernels/bench/step.py --weights q4_1 --decode 1 8 32 --prefill 512 2048

Each line is the fastest of many steps, because other programs only ever make a step slower, with the median beside it.
"""

from __future__ import annotations

import argparse
import math
import mmap
import sys
import time
from pathlib import Path

import numpy as np
import torch
from deepinfra_kernels.cache import shape_of
from deepinfra_kernels.cpu import paths
from deepinfra_kernels.decoder import Decoder, Layer, Spec, Step
from deepinfra_kernels.library import Library, load
from deepinfra_kernels.linear import Compute, PackedMatrix, Room, row_nbytes
from numpy.typing import NDArray

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 30, 576, 9, 3, 64, 1536, 49_152
BLOCK = 16
TYPES = {"q4_0": (2, Compute.I8), "q4_1": (3, Compute.I8), "q8_0": (8, Compute.I8), "bf16": (30, Compute.BF16)}


def random_rows(rng: np.random.Generator, library: Library, source: int, out: int, inputs: int) -> NDArray[np.uint8]:
    """A matrix as a file of this type holds it, of numbers about `inputs ** -0.5` large."""
    if source == 30:
        return (torch.randn(out, inputs) * inputs**-0.5).bfloat16().view(torch.uint8).numpy().ravel()
    nbytes = row_nbytes(library, source, inputs)
    assert nbytes is not None
    blocks = rng.integers(0, 256, (out, inputs // 32, nbytes // (inputs // 32)), np.uint8)
    scale = inputs**-0.5 / (4 if source in (2, 3) else 64)
    blocks[..., :2].view(np.float16)[...] = scale
    if source == 3:
        blocks[..., 2:4].view(np.float16)[...] = -8 * scale
    return blocks.ravel()


def random_kv(blocks: int) -> torch.Tensor:
    """Keys and values in memory that asks for huge pages, as the executor's does."""
    shape = shape_of(blocks=blocks, layers=LAYERS, kv_heads=KV_HEADS, block_size=BLOCK, head_dim=DIM)
    memory = mmap.mmap(-1, 2 * math.prod(shape))
    memory.madvise(mmap.MADV_HUGEPAGE)
    kv = torch.frombuffer(memory, dtype=torch.bfloat16).view(shape)
    for block in kv:
        block.copy_(torch.randn(block.shape))
    return kv


def build(library: Library, weights: str, head: str, threads: int, max_rows: int, blocks: int) -> Decoder:
    """A decoder with random weights and random keys and values."""
    rng, room = np.random.default_rng(0), Room()

    def matrix(kind: str, out: int, inputs: int) -> PackedMatrix:
        source, compute = TYPES[kind]
        rows = random_rows(rng, library, source, out, inputs)
        return PackedMatrix.pack(library, source, compute, out, inputs, rows, room=room)

    ones = np.ones(HIDDEN, np.float32)
    layers = [
        Layer(
            query=matrix(weights, HEADS * DIM, HIDDEN),
            key=matrix(weights, KV_HEADS * DIM, HIDDEN),
            value=matrix(weights, KV_HEADS * DIM, HIDDEN),
            output=matrix(weights, HIDDEN, HEADS * DIM),
            gate=matrix(weights, INNER, HIDDEN),
            up=matrix(weights, INNER, HIDDEN),
            down=matrix(weights, HIDDEN, INNER),
            before=ones,
            between=ones,
        )
        for _ in range(LAYERS)
    ]
    source, _ = TYPES[head]
    spec = Spec(
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        inner_size=INNER,
        vocab_size=VOCAB,
        eps=1e-5,
        query_scale=DIM**-0.5,
        inv_freq=(1e5 ** -(np.arange(0, DIM, 2) / DIM)).astype(np.float32),
    )
    return Decoder(
        library,
        spec,
        layers,
        head=matrix(head, VOCAB, HIDDEN),
        norm=ones,
        embedding=random_rows(rng, library, source, VOCAB, HIDDEN),
        embedding_source=source,
        kv=random_kv(blocks),
        threads=threads,
        max_rows=max_rows,
    )


def measure(decoder: Decoder, step: Step, seconds: float) -> tuple[list[float], dict[str, float]]:
    """Seconds of each of many steps, sorted, and the parts of the fastest."""
    times, best, parts = [], float("inf"), {}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        begin = time.perf_counter()
        decoder.step(step)
        times.append(time.perf_counter() - begin)
        if times[-1] < best:
            best, parts = times[-1], decoder.seconds()
    return sorted(times), parts


def main() -> None:
    """Builds the decoder once and times every asked for batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=paths()[0])
    parser.add_argument("--weights", default="q4_1", choices=TYPES)
    parser.add_argument("--head", default="q8_0", choices=TYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 32], help="streams")
    parser.add_argument("--context", type=int, default=160, help="positions that each stream has")
    parser.add_argument("--scattered", action="store_true", help="blocks in random places, as in a pool in long use")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="tokens")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "deepinfra" / "kernels")
    args = parser.parse_args()
    library = load(args.path, args.cache)
    rng = np.random.default_rng(1)
    per = -(-args.context // BLOCK)
    blocks = max([n * per for n in args.decode] + [-(-n // BLOCK) for n in args.prefill])
    decoder = build(library, args.weights, args.head, args.threads, max([*args.decode, *args.prefill]), blocks)
    sys.stdout.write(f"{args.path}, {args.weights}, head {args.head}, {args.threads} threads; ms, fastest (median)\n")

    def line(name: str, step: Step, tokens: int) -> None:
        times, parts = measure(decoder, step, args.seconds)
        split = "  ".join(f"{part} {seconds * 1e3:.2f}" for part, seconds in parts.items())
        rate = tokens / times[0]
        sys.stdout.write(
            f"{name:>14}  {times[0] * 1e3:8.2f} ({times[len(times) // 2] * 1e3:.2f})  {rate:6.0f} tok/s  {split}\n"
        )
        sys.stdout.flush()

    for streams in args.decode:
        order = rng.permutation(blocks) if args.scattered else np.arange(blocks)
        tables = order[: streams * per].reshape(streams, per)
        seqs = [([1], args.context - 1, args.context - 1, table.tolist()) for table in tables]
        line(f"decode {streams}", Step.of(seqs, range(streams)), streams)
    for tokens in args.prefill:
        table = range(-(-tokens // BLOCK))
        line(
            f"prefill {tokens}", Step.of([(rng.integers(0, VOCAB, tokens).tolist(), 0, 0, table)], [tokens - 1]), tokens
        )


if __name__ == "__main__":
    main()
