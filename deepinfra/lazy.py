"""Packages whose names are loaded when first used, so that importing one loads none of its modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

__all__ = ("lazily",)


def lazily(package: str, home: Mapping[str, str]) -> Callable[[str], object]:
    """A module's `__getattr__`.

    Args:
        package: The package's own `__name__`.
        home: Public names, each with the module it is defined in.
    """

    def getattr_(name: str) -> object:
        if name in home:
            return getattr(importlib.import_module(home[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_
