"""Which kind of machine this is, as far as it decides which instructions compute."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Literal

__all__ = ("Dtype", "choose_dtype", "machine_kind", "processor", "usable_cores")

Dtype = Literal["float32", "bfloat16"]

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


def usable_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Physical cores that this process may run on: two threads on one core multiply no faster than one."""
    cores: set[str] = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return min(max(1, len(cores)), 256)  # kernels take no more


def processor() -> str:
    """The processor's name, as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(names, platform.machine())


def choose_dtype(wanted: Literal["auto", "float32", "bfloat16"]) -> tuple[Dtype, str]:
    """The element type of KV and activations, and why that."""
    if wanted != "auto":
        return wanted, "as configured"
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    for flag in ("amx_bf16", "avx512_bf16", "bf16"):  # the last is Arm's
        if flag in flags:
            return "bfloat16", f"this CPU multiplies bfloat16 in hardware ({flag})"
    return "float32", "this CPU does not multiply bfloat16 in hardware, where it would be slower than float32"
