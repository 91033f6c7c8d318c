"""Gets the library of kernels that was chosen, or says why it is not to be had."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from deepinfra.errors import ConfigError
from deepinfra.executors.torch.choice import Choice, by_torch
from deepinfra.models.cache import kernel_cache_dir

if TYPE_CHECKING:
    from deepinfra_kernels.library import Library

__all__ = ("open_library",)

_log = logging.getLogger("deepinfra.executors")


def open_library(choice: Choice) -> tuple[Library | None, Choice]:
    """Load the first of the paths that can be built, building it if it has to be: half a minute, once.

    Where something slower than what was hoped for computes, and nobody asked for that, one warning says why.

    Returns:
        The library, `None` if torch computes, and what was chosen in the end.

    Raises:
        ConfigError: Nothing that was asked for can run; names the option.
    """
    if not choice.paths:
        if choice.kernels == "auto":
            _log.warning("torch computes, which is slower than kernels: %s", choice.why_path)
        return None, choice
    from deepinfra_kernels.build import BuildError
    from deepinfra_kernels.library import load

    reasons: list[str] = []
    for path in choice.paths:
        try:
            library = load(path, kernel_cache_dir(), tell=_log.warning)
        except (BuildError, OSError) as error:
            reasons.append(f"the {path} kernels cannot be built: {error}")
            continue
        if reasons:
            _log.warning("%s kernels compute: %s", path, "; ".join(reasons))
        return library, replace(choice, paths=(path,), why_path="; ".join(reasons) or choice.why_path)
    if choice.invariant:
        raise ConfigError(f"batch_invariant cannot be kept: {reasons[0]}, and torch would compute instead")
    chosen = by_torch(choice.kernels, choice.asked, "; ".join(reasons))
    _log.warning("torch computes, which is slower than kernels: %s", chosen.why_path)
    return None, chosen
