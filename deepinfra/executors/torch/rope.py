"""Rotary positions: the variants of `rope_scaling`, as inverse frequencies, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfra.errors import ModelError, UnsupportedModelError

__all__ = ("Rope", "rope_from_config")

_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of query and key halves `(i, i + head_dim / 2)`.

    Attributes:
        kind: `default`, `linear`, `dynamic`, `llama3` or `yarn`.
        inv_freq: Radians per position, float32 `[head_dim / 2]`.
        factor: What cos and sin are multiplied by.
        max_positions: Longest sequence for which this is the model's own rotation.
    """

    kind: str
    inv_freq: NDArray[np.float32]
    factor: float
    max_positions: int


def rope_from_config(config: Mapping[str, object], head_dim: int, max_positions: int) -> Rope:
    """Reads `rope_theta` with `rope_scaling`, or `rope_parameters`, which holds both.

    `dynamic` rotates as `default` up to the trained length and by a base that grows with the sequence beyond it. Keys
    rotated by an earlier base stay in the cache, so beyond that length a token would depend on how its prompt was cut
    and on which prefix was found: `max_positions` ends there, where the model equals its definition.

    Source: `modeling_rope_utils.py` of transformers.

    Raises:
        UnsupportedModelError: A type or a key with an effect that is not implemented.
        ModelError: A key is missing or of the wrong type.
    """
    scaling: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ModelError(f"model field {name} is {given!r}, not a table")
        if any(isinstance(value, Mapping) for value in given.values()):
            raise UnsupportedModelError(name, dict(given), "differs between kinds of layers, which is not implemented")
        scaling.update(given)
    theta = _number(scaling, "rope_theta", _number(config, "rope_theta", 10_000.0))
    scaling.pop("rope_theta", None)
    partial = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError("partial_rotary_factor", partial)
    old = scaling.pop("type", None)
    kind = scaling.pop("rope_type", None) or old or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedModelError("rope_scaling.rope_type", kind, f"is not implemented; known: {', '.join(_KEYS)}")
    for key, value in scaling.items():
        if value is not None and key not in _KEYS[kind]:
            raise UnsupportedModelError(f"rope_scaling.{key}", value, f"has no known effect on {kind} positions")
    base = (1.0 / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)
    if kind == "linear":
        base = (base / np.float32(_number(scaling, "factor"))).astype(np.float32)
    elif kind == "llama3":
        base = _llama3(base, scaling)
    elif kind == "yarn":
        return Rope(kind, *_yarn(scaling, theta, head_dim, max_positions), max_positions)
    elif kind == "dynamic":
        _number(scaling, "factor")
        if scaling.get("original_max_position_embeddings") not in (None, max_positions):
            raise UnsupportedModelError(
                "rope_scaling.original_max_position_embeddings",
                scaling["original_max_position_embeddings"],
                "differs from max_position_embeddings under dynamic positions",
            )
    return Rope(kind, base, 1.0, max_positions)


def _number(table: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = table.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"model field {key} is {value!r}, where a positive number is needed")
    return float(value)


def _llama3(base: NDArray[np.float32], scaling: Mapping[str, object]) -> NDArray[np.float32]:
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    original = _number(scaling, "original_max_position_embeddings")
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    long = np.where(wavelength > original / low, base / factor, blended)
    return np.where(wavelength < original / high, base, long).astype(np.float32)


def _yarn(
    scaling: Mapping[str, object], theta: float, head_dim: int, max_positions: int
) -> tuple[NDArray[np.float32], float]:
    original = _number(scaling, "original_max_position_embeddings", float(max_positions))
    factor = _number(scaling, "factor", max_positions / original)
    beta_fast, beta_slow = _number(scaling, "beta_fast", 32.0), _number(scaling, "beta_slow", 1.0)

    def correction(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(beta_fast), correction(beta_slow)
    if scaling.get("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    freqs = np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    inv_freq = ((1.0 / (factor * freqs)) * ramp + (1.0 / freqs) * (1 - ramp)).astype(np.float32)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return inv_freq, _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return inv_freq, magnitude(_number(scaling, "mscale")) / magnitude(_number(scaling, "mscale_all_dim"))
    return inv_freq, magnitude(1.0)
