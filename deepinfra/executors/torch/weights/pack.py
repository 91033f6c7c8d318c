"""Packs a model's matrices for the kernels, from the bytes of its files, on several threads; without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from deepinfra_kernels.library import Library
from deepinfra_kernels.linear import Compute, PackedMatrix, Packing, Room, packed_nbytes
from numpy.typing import NDArray

from deepinfra.executors.torch.choice import is_stored
from deepinfra.models import TensorSource
from deepinfra.models.ggml_types import GGML_TYPES

__all__ = ("SOURCES", "Packer")

SOURCES: Final[Mapping[str, int]] = {kind.name: number for number, kind in GGML_TYPES.items()}
"""Numbers of formats, by which kernels know them."""

_BATCH: Final = 256 << 20
"""Bytes of files packed in one call: many, for Python, whose lock others hold at a start, has a part in each call."""


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
        packed: dict[str, PackedMatrix] = {}
        waiting: dict[str, Packing] = {}
        nbytes = 0
        for name in names:
            self._checkpoint()
            waiting[name] = self._matrix(name, present)
            nbytes += waiting[name].rows.nbytes
            if nbytes >= _BATCH or name == names[-1]:
                made = PackedMatrix.pack_all(self._library, list(waiting.values()), self._room, self._threads)
                packed.update(zip(waiting, made, strict=True))
                waiting, nbytes = {}, 0
        return packed

    def vector(self, name: str) -> NDArray[np.float32]:
        """A vector in float32."""
        self._checkpoint()
        return self._tensors.read(name)

    def _matrix(self, name: str, present: set[str]) -> Packing:
        weight = f"{name}.weight"
        info = self._tensors.info(weight)
        out, inputs = info.shape
        compute = Compute.I8 if self._stored and is_stored(info.dtype, inputs) else self._dense
        rows: memoryview | NDArray[np.uint8] = self._tensors.raw(weight)
        source = SOURCES.get(info.dtype, -1)
        if compute is not Compute.I8 and not self._packs(source, compute, out, inputs):
            rows, source = self._tensors.read(weight).reshape(-1).view(np.uint8), SOURCES["F32"]
        bias = self._tensors.read(f"{name}.bias") if f"{name}.bias" in present else None
        return Packing(source, compute, out, inputs, rows, bias)

    def _packs(self, source: int, compute: Compute, out: int, inputs: int) -> bool:
        return packed_nbytes(self._library, source, compute, out, inputs) is not None
