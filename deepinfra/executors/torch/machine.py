"""Which kind of machine this is, as far as it decides which instructions compute."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ("machine_kind",)

_EXTENSIONS = frozenset(
    (
        *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"),
        *("avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
        *("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
    )
)
"""Extensions by which libraries of matrix products choose their code."""


def machine_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Architecture, maker and extensions of this CPU, such as `x86_64 AuthenticAMD avx2 fma`.

    The maker is told because MKL, which torch multiplies float32 with, has other code for each.
    """
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    except OSError:
        lines = []
    told = {name.strip(): value for name, _, value in reversed(lines)}  # the first processor's
    maker = told.get("vendor_id", told.get("CPU implementer", "")).split()
    flags = told.get("flags", told.get("Features", "")).split()
    return " ".join((platform.machine(), *maker, *sorted(_EXTENSIONS.intersection(flags))))
