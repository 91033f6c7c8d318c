"""Forms of ours that are measured: which weights are multiplied, by whose operations, in which mode."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfra.errors import ConfigError
from deepinfra.executors.torch.choice import Kernels, choose
from deepinfra.executors.torch.config import decoder_config
from deepinfra.models import Model

__all__ = ("FORMS", "default_forms", "form_options")

FORMS: Mapping[str, Mapping[str, object]] = {
    "stored": {"weights": "stored"},
    "bfloat16": {"weights": "dense", "dtype": "bfloat16"},
    "float32": {"weights": "dense", "dtype": "float32"},
    "torch": {"weights": "auto", "kernels": "torch"},
}
"""By name, the executor's options that make them; what a form says nothing about is as configured."""

_SUFFIXES: Mapping[str, Mapping[str, object]] = {
    "torch": {"kernels": "torch"},
    "invariant": {"batch_invariant": True},
}
"""What may stand behind a name and a plus: `float32+torch`, `stored+invariant`."""


def form_options(form: str) -> dict[str, object]:
    """Options of the executor that make a form; without `+invariant` it is of the ordinary mode.

    Raises:
        ConfigError: There is no such form.
    """
    name, *suffixes = form.split("+")
    if name not in FORMS or set(suffixes) - set(_SUFFIXES) or len(set(suffixes)) < len(suffixes):
        behind = " and ".join(f"+{suffix}" for suffix in _SUFFIXES)
        raise ConfigError(f"no form of ours is named {form!r}; known: {', '.join(FORMS)}, with {behind} behind it")
    options = {**FORMS[name], "batch_invariant": False}
    for suffix in suffixes:
        options |= _SUFFIXES[suffix]
    return options


def default_forms(model: Model, kernels: Kernels) -> tuple[tuple[str, ...], str]:
    """Forms in which a model is measured unless others are named, the usual one first, and why these.

    Args:
        model: Opened; its headers are read.
        kernels: As configured.

    Raises:
        ConfigError: Such kernels cannot run here.
        UnsupportedModelError: The torch executor does not know the model.
    """
    chosen = choose(decoder_config(model.config), model.tensors, kernels, "auto")
    if chosen.stored:
        return ("stored", "bfloat16"), f"stored is {chosen.why_weights}"
    return ("bfloat16",), f"not stored: {chosen.why_weights if chosen.paths else chosen.why_path}"
