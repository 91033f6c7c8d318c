"""The records that steps cross into C++ by, and the signatures of what takes them."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from deepinfra_kernels.arrays import address
from deepinfra_kernels.status import raising

__all__ = (
    "NORMS",
    "PRODUCTS",
    "CacheRecord",
    "LayerRecord",
    "MatrixRecord",
    "ModelRecord",
    "StepRecord",
    "cache_record",
    "declare",
)


class MatrixRecord(ctypes.Structure):
    """`Matrix` of pack.h."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("compute", ctypes.c_int),
        ("out", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


PRODUCTS: Final = ("query", "key", "value", "output", "gate", "up", "down")
NORMS: Final = ("before", "between", "query_norm", "key_norm")


class LayerRecord(ctypes.Structure):
    """`Layer` of decoder.h."""

    _fields_ = [(name, MatrixRecord) for name in PRODUCTS] + [(name, ctypes.c_void_p) for name in NORMS]


class ModelRecord(ctypes.Structure):
    """`Model` of decoder.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "vocab")),
        ("window", ctypes.c_int64),
        ("layer", ctypes.POINTER(LayerRecord)),
        ("head", MatrixRecord),
        ("last", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("embedding_source", ctypes.c_int),
        ("activation", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("embedding_scale", "eps", "query_scale", "rope_factor")),
        ("frequencies", ctypes.c_void_p),
    ]


class CacheRecord(ctypes.Structure):
    """`Cache` of cache.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bf16", ctypes.c_bool),
        *((name, ctypes.c_int64) for name in ("layers", "heads", "blocks", "block_size", "dim")),
    ]


class StepRecord(ctypes.Structure):
    """`Step` of plan.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "seqs", "wanted")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "tokens",
                "counts",
                "starts",
                "write_froms",
                "ends",
                "blocks",
                "wanted_rows",
                "logits",
                "finite",
            )
        ),
    ]


def declare(functions: ctypes.CDLL) -> None:
    """Gives the functions of `decoder_abi.h` their signatures."""
    small, number, real, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    table: dict[str, tuple[list[Any], Any]] = {
        "di_decoder_sizes": ([pointer], None),
        "di_decoder_free": ([pointer], None),
        "di_decoder_seconds": ([pointer, pointer], None),
        "di_cache_put": ([pointer, number, pointer], None),
        "di_cache_get": ([pointer, number, pointer], None),
    }
    for name, (arguments, result) in table.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, result
    raising(functions, "di_decoder_new", [pointer, pointer, small, number, pointer])
    raising(functions, "di_decoder_step", [pointer, pointer])
    raising(functions, "di_attend", [pointer, number, number, number, real, pointer, pointer, pointer, small])
    raising(functions, "di_rope", [pointer, pointer, number, number, number, pointer, real, real, pointer])
    sizes = (ctypes.c_int64 * 5)()
    functions.di_decoder_sizes(sizes)
    ours = [ctypes.sizeof(record) for record in (MatrixRecord, LayerRecord, ModelRecord, CacheRecord, StepRecord)]
    if list(sizes) != ours:
        raise OSError(f"{functions._name} has records of {list(sizes)} bytes, where records.py has {ours}")


def cache_record(kv: Any) -> CacheRecord:
    """Keys and values in the shape of `cache.shape_of`, which must outlive it.

    Raises:
        ValueError: They have another type or shape, or gaps.
    """
    shape, dtype = tuple(kv.shape), str(kv.dtype).removeprefix("torch.")
    if dtype in ("int16", "uint16"):  # numpy has no bfloat16: its bits are kept as integers
        dtype = "bfloat16"
    if len(shape) != 6 or shape[3] != 2 or min(shape) < 1:
        raise ValueError(f"kv has shape {shape}, not [blocks, layers, kv_heads, 2, block_size, head_dim]")
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"kv is {dtype}, not bfloat16 or float32")
    blocks, layers, heads, _, block_size, dim = shape
    if dim % 16 or dim > 256:
        raise ValueError(f"head_dim is {dim}, not a multiple of 16 up to 256")
    return CacheRecord(
        address("kv", kv, dtype, shape, writes=True), dtype == "bfloat16", layers, heads, blocks, block_size, dim
    )
