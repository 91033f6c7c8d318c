"""Which paths this machine's CPU runs."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

__all__ = ("PATHS", "paths", "why_not")

PATHS: Final[dict[str, tuple[str, ...]]] = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
}
"""Every path, best first, with what it needs of a CPU, as the kernel calls it."""


def paths() -> tuple[str, ...]:
    """The paths that this CPU runs, best first."""
    return tuple(path for path in PATHS if not why_not(path))


def why_not(path: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Why this CPU does not run a path; empty if it does.

    The kernel lists an extension only where it saves its registers, so what is listed can be used.

    Raises:
        ValueError: There is no such path.
    """
    if path not in PATHS:
        raise ValueError(f"{path!r} is not a path; known: {', '.join(PATHS)}")
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"this CPU is of kind {platform.machine()}, not x86-64"
    try:
        with cpuinfo.open() as lines:
            flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    except OSError:
        return f"{cpuinfo} does not say what this CPU can do"
    missing = [flag for flag in PATHS[path] if flag not in flags]
    return f"this CPU lacks {', '.join(missing)}" if missing else ""
