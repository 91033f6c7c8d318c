"""Position scaling in GGUF files: metadata and `rope_freqs.weight` as a Hugging Face `rope_scaling`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from deepinfra.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deepinfra.models.gguf_file import GgufFile, MetaValue
    from deepinfra.models.records import JsonValue

__all__ = ("FREQS_TENSOR", "rope_scaling")

FREQS_TENSOR = "rope_freqs.weight"

# (low_freq_factor, high_freq_factor, original_max_position_embeddings) of every released Llama 3.1, 3.2 and 3.3; the
# file holds only the divisors computed from them.
_LLAMA3 = (1.0, 4.0, 8192)


def rope_scaling(file: GgufFile, arch: str, head_dim: int, theta: float) -> dict[str, JsonValue] | None:
    """Translates a file's position scaling.

    Args:
        file: The opened file.
        arch: Its architecture, the prefix of its keys.
        head_dim: Size of one attention head.
        theta: Base of the rotation frequencies.

    Returns:
        A `rope_scaling` of type linear, yarn or llama3; None for plain positions.

    Raises:
        UnsupportedModelError: A key has an effect that cannot be expressed so.
        ModelError: A key is missing or of the wrong type.
    """
    prefix = f"{arch}.rope."
    given = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = {name: value for name, value in given.items() if name.startswith("scal")}
    keys.pop("scaling.finetuned", None)  # says how the model was trained, changes no computation
    if keys.get("scaling.attn_factor", 1.0) == 1.0:
        keys.pop("scaling.attn_factor", None)

    def take(name: str, default: float | None = None) -> float:
        value: MetaValue | None = keys.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ModelError(f"{file.path} is damaged: {prefix}{name} is {value!r}")
        return float(str(np.float32(value)))

    kind = keys.pop("scaling.type", None)
    if kind is None and "scale_linear" in keys:  # the old spelling
        kind = "linear"
        keys["scaling.factor"] = keys.pop("scale_linear")
    if kind not in (None, "none", "linear", "yarn"):
        raise UnsupportedModelError(f"{prefix}scaling.type", kind)

    scaling: dict[str, JsonValue] | None = None
    if kind == "linear":
        factor = take("scaling.factor", 1.0)
        scaling = {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    elif kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": take("scaling.factor"),
            "original_max_position_embeddings": int(take("scaling.original_context_length")),
            "beta_fast": take("scaling.yarn_beta_fast", 32.0),
            "beta_slow": take("scaling.yarn_beta_slow", 1.0),
        }
    elif keys.get("scaling.factor") in (0.0, 1.0):
        keys.pop("scaling.factor")
    keys.pop("scaling.original_context_length", None) if scaling is None else None
    if keys:
        name, value = next(iter(keys.items()))
        raise UnsupportedModelError(f"{prefix}{name}", value)

    if FREQS_TENSOR in file.tensors:
        if scaling is not None:
            raise UnsupportedModelError(f"{prefix}scaling.type", kind, f"cannot be combined with {FREQS_TENSOR}")
        return _llama3(file, head_dim, theta)
    return scaling


def _llama3(file: GgufFile, head_dim: int, theta: float) -> dict[str, JsonValue] | None:
    row = file.tensors[FREQS_TENSOR]
    if row.type.name != "F32" or row.shape != (head_dim // 2,):
        raise ModelError(f"{file.path} is damaged: {FREQS_TENSOR} is {row.type.name} of shape {list(row.shape)}")
    divisors = np.frombuffer(file.data[row.start : row.start + row.nbytes], "<f4")
    factor = float(divisors.max())
    if np.all(divisors == 1.0):
        return None
    low, high, original = _LLAMA3
    if not np.allclose(divisors, llama3_divisors(head_dim, theta, factor, low, high, original), rtol=1e-4):
        raise UnsupportedModelError(FREQS_TENSOR, "[...]", "is not the scaling of a Llama 3 model")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def llama3_divisors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> NDArray[np.float64]:
    """Computes what each rotation frequency is divided by, `[head_dim / 2]`.

    Source: `convert_hf_to_gguf.py` of llama.cpp, which follows transformers' `_compute_llama3_parameters`.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelength - low) / (high - low)
    blended = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, blended))
