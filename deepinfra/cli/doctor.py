"""`deepinfra doctor`: what this machine has."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import typer

__all__ = ("doctor",)

_WANTED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_LITTLE_NBYTES = 2 * 2**30


class Finding(NamedTuple):
    """One line: `ok`, `warn` or `fail`."""

    level: str
    what: str
    words: str


def doctor() -> None:
    """Check this machine, one line for each thing; exits 1 if something that is needed is missing."""
    findings = list(_findings())
    for finding in findings:
        typer.echo(f"{finding.level:4}  {finding.what:12}  {finding.words}")
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def _findings() -> Iterator[Finding]:
    from deepinfra import __version__

    yield Finding("ok", "deepinfra", __version__)
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _distributions()
    yield from _plugins()
    flags = [flag for flag in _WANTED_FLAGS if flag in _cpu_flags()]
    yield Finding("ok", "cpu", f"{_usable_cpus()} usable cores; {' '.join(flags) or 'no vector extensions known'}")
    yield _kernels()
    yield from _folders()


def _kernels() -> Finding:
    from deepinfra.executors.torch.choice import survey

    found = survey()
    words = "; ".join(f"{path}: {state}" for path, state in found.items())
    if any(state == "built" or state.startswith("to be built") for state in found.values()):
        return Finding("ok", "kernels", words)
    hint = "deepinfra-kernels is not installed; install deepinfra-serve[kernels]"
    return Finding("warn", "kernels", f"{words or hint}: torch computes, slower")


def _distributions() -> Iterator[Finding]:
    for name in ("torch", "uvicorn", "httptools", "tokenizers"):
        try:
            yield Finding("ok", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            hint = "; install deepinfra-serve[torch]" if name == "torch" else ""
            yield Finding("fail", name, f"not installed{hint}")
    loop = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio (uvloop is not installed)"
    yield Finding("ok", "event loop", loop)


def _plugins() -> Iterator[Finding]:
    from deepinfra.errors import PluginError
    from deepinfra.registry import load_plugins

    try:
        origins = load_plugins().origins
    except PluginError as error:
        yield Finding("fail", "plug-ins", str(error))
        return
    level = "ok" if origins else "fail"
    yield Finding(level, "plug-ins", ", ".join(map(str, origins)) or "none, not even the built-in ones: install it")


def _folders() -> Iterator[Finding]:
    from deepinfra.cli.progress import nbytes_text
    from deepinfra.config.folders import kv_folder
    from deepinfra.models.cache import default_cache_dir

    for what, folder in (("models in", default_cache_dir()), ("KV in", kv_folder())):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        words = f"{folder}, {nbytes_text(free)} free"
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            yield Finding("fail", what, f"{words}; cannot be written: {error.strerror}")
        else:
            yield Finding("ok" if free > _LITTLE_NBYTES else "warn", what, words)


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.lower().startswith(("flags", "features")))
    return frozenset(next(lines, "").split())


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))
