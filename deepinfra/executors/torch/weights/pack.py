"""Packs a model's matrices for the kernels, from the bytes of its files, on several threads; without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from deepinfra_kernels.library import Library
from deepinfra_kernels.linear import Compute, PackedMatrix, Room, packed_nbytes
from numpy.typing import NDArray

from deepinfra.executors.torch.choice import is_stored
from deepinfra.models import TensorSource
from deepinfra.models.ggml_types import GGML_TYPES

__all__ = ("SOURCES", "Packer")

SOURCES: Final[Mapping[str, int]] = {kind.name: number for number, kind in GGML_TYPES.items()}
"""Numbers of formats, by which kernels know them."""


class Packer:
    """Reads and packs tensors.

    Args:
        library: Of the path that will multiply.
        tensors: Where from.
        dtype: What matrices become that are not stored in blocks, or may not stay so.
        stored: Matrices in blocks of integers stay so.
        threads: How many work at once.
        checkpoint: Called before each tensor; raises to give up.
    """

    def __init__(
        self,
        library: Library,
        tensors: TensorSource,
        *,
        dtype: str,
        stored: bool,
        threads: int,
        checkpoint: Callable[[], None],
    ) -> None:
        self._library, self._tensors, self._stored = library, tensors, stored
        self._dense = {"float32": Compute.F32, "bfloat16": Compute.BF16}[dtype]
        self._threads, self._checkpoint = threads, checkpoint
        self._room = Room()

    def matrices(self, names: Sequence[str]) -> dict[str, PackedMatrix]:
        """Matrices by the names of their layers, without `.weight`; with their biases, where the files have them."""
        present = set(self._tensors.names())
        with ThreadPoolExecutor(self._threads) as threads:
            return dict(zip(names, threads.map(lambda name: self._pack(name, present), names), strict=True))

    def vector(self, name: str) -> NDArray[np.float32]:
        """A vector in float32."""
        self._checkpoint()
        return self._tensors.read(name)

    def _pack(self, name: str, present: set[str]) -> PackedMatrix:
        self._checkpoint()
        weight = f"{name}.weight"
        info = self._tensors.info(weight)
        out, inputs = info.shape
        compute = Compute.I8 if self._stored and is_stored(info.dtype, inputs) else self._dense
        rows: object = self._tensors.raw(weight)
        source = SOURCES.get(info.dtype, -1)
        if compute is not Compute.I8 and not self._packs(source, compute, out, inputs):
            rows, source = self._tensors.read(weight).reshape(-1).view(np.uint8), SOURCES["F32"]
        bias = self._tensors.read(f"{name}.bias") if f"{name}.bias" in present else None
        return PackedMatrix.pack(self._library, source, compute, out, inputs, rows, bias, self._room)

    def _packs(self, source: int, compute: Compute, out: int, inputs: int) -> bool:
        return packed_nbytes(self._library, source, compute, out, inputs) is not None
