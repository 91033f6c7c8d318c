"""The tensor formats of GGUF files: how many bytes they take, and decoding them to float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from deepinfra.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ("GGML_TYPES", "GgmlType", "decode")


class GgmlType(NamedTuple):
    """A storage format: `block` elements of a row take `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


# Source: the table GGML_QUANT_SIZES of the gguf package. Held here because importing that package takes 150 ms and
# opening a file needs sizes only.
GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}


def decode(name: str, raw: memoryview, dtype: str, shape: Sequence[int]) -> NDArray[np.float32]:
    """Decodes the bytes of a tensor stored in a ggml format.

    Args:
        name: The tensor's name, for the error.
        raw: The stored bytes, rows of whole blocks.
        dtype: Name of the format.
        shape: Row-major shape.

    Returns:
        float32 of `shape`.

    Raises:
        UnsupportedModelError: The gguf package cannot decode this format.
    """
    import numpy as np

    flat = np.frombuffer(raw, np.uint8)
    # Without the package, whose import takes longer than reading a small model.
    if dtype in ("F32", "F16"):
        return flat.view(np.float32 if dtype == "F32" else np.float16).astype(np.float32).reshape(tuple(shape))
    if dtype == "BF16":
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tuple(shape))
    import gguf

    try:
        decoded = gguf.quants.dequantize(flat, gguf.GGMLQuantizationType[dtype])
    except (KeyError, NotImplementedError):
        raise UnsupportedModelError(f"dtype of tensor {name}", dtype, "cannot be decoded") from None
    return cast("NDArray[np.float32]", np.asarray(decoded, np.float32).reshape(tuple(shape)))
