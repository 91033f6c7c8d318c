"""What a receipt says of the machine."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.machine import machine_kind


def test_the_kind_is_told_by_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 sse avx512_bf16\n\n"
        "processor\t: 1\nvendor_id\t: Other\nflags\t\t: fpu\n"
    )
    assert machine_kind(cpuinfo) == f"{platform.machine()} AuthenticAMD avx2 avx512_bf16"
    cpuinfo.write_text("processor : 0\nFeatures : fp asimd bf16\nCPU implementer : 0x41\n")
    assert machine_kind(cpuinfo) == f"{platform.machine()} 0x41 asimd bf16"


def test_a_machine_that_tells_nothing_has_its_architecture(tmp_path: Path) -> None:
    assert machine_kind(tmp_path / "none") == platform.machine()


async def test_the_executor_tells_how_it_computes(made: Any) -> None:
    async with TorchExecutor(str(made("llama")[0]), dtype="float32", num_blocks=8, threads=1) as executor:
        computing = executor.computing
    assert computing.dtype == "float32"
    assert computing.path
    assert computing.library.startswith("torch 2")
    assert computing.machine == machine_kind()
