"""The cache folder: where it is, one puller at a time, and files that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from deepinfra.errors import ModelDownloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("default_cache_dir", "kernel_cache_dir", "locked", "publish", "unwritable", "workspace")


def default_cache_dir() -> Path:
    """Returns the folder for downloaded models, `~/.cache/deepinfra/models` unless `XDG_CACHE_HOME` says otherwise."""
    return platformdirs.user_cache_path("deepinfra", appauthor=False) / "models"


def kernel_cache_dir() -> Path:
    """Returns the folder for kernels built on this machine, `kernels` beside the models."""
    return default_cache_dir().with_name("kernels")


@contextmanager
def locked(cache_dir: Path, name: str) -> Iterator[None]:
    """Holds the lock of one model's download against other processes and threads; waits as long as it takes.

    The kernel drops the lock when its holder dies, so a killed download never blocks the next.

    Raises:
        ModelDownloadError: The cache folder cannot be written.
    """
    folder = cache_dir / ".locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def workspace(cache_dir: Path, name: str) -> Iterator[Path]:
    """Gives an empty folder on the cache's own file system, removed afterwards; call it with the lock held.

    What killed downloads of the same model left is removed first: with the lock held nobody else works there.

    Raises:
        ModelDownloadError: The cache folder cannot be written.
    """
    parent = cache_dir / ".partial" / name
    try:
        shutil.rmtree(parent, ignore_errors=True)
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent))
    except OSError as error:
        raise unwritable(parent, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def publish(finished: Path, target: Path) -> None:
    """Moves a complete, checked file to its name, so the name never shows less, not even after a power cut."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(finished, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    finished.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(folder)
    finally:
        os.close(folder)


def unwritable(path: Path, error: OSError) -> ModelDownloadError:
    """Builds the error for a cache folder that takes no files."""
    return ModelDownloadError(
        f"cannot write to {path} ({error.strerror or error}); free some space there or name another cache folder"
    )
