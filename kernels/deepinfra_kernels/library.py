"""A built library in this process, with the signatures of its functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepinfra_kernels import decoder, linear, sampling, status
from deepinfra_kernels.build import build

__all__ = ("Library", "load")


@dataclass(frozen=True, slots=True)
class Library:
    """One path's functions.

    A call through `functions` gives up the interpreter's lock and raises what `status.raising` says; its arguments are
    not checked, so only the modules of this package call them.

    Attributes:
        path: `avx512` or `avx2`.
        file: Where it was loaded from.
        functions: With declared signatures.
    """

    path: str
    file: Path
    functions: ctypes.CDLL

    @property
    def fingerprint(self) -> str:
        """Digests of sources, flags and torch's version, and of the compiler's version: the same on other machines."""
        return self.file.stem.removeprefix(f"{self.path}-")


def load(path: str, cache: Path, *, tell: Callable[[str], None] = lambda line: None) -> Library:
    """Loads a path's library, built first if it has to be; arguments as those of `build`.

    Ask `cpu.why_not` first: on a CPU that lacks an extension the process dies at the first call.

    Raises:
        BuildError: It could not be built.
        OSError: It could not be loaded.
    """
    file = build(path, cache, tell=tell)
    functions = ctypes.CDLL(str(file))
    try:
        for part in (status, linear, decoder, sampling):
            part.declare(functions)
    except AttributeError as error:
        raise OSError(f"{file} is no library of kernels: {error}") from None
    return Library(path, file, functions)
