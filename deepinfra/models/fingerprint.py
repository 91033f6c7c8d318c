"""The identity of a model's weights: a hash over their bytes, remembered under the file's stat."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfra.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deepinfra.models.records import JsonValue, Progress

__all__ = ("file_sha256", "fingerprint_of")

_CHUNK = 4 * 2**20
_TICK_NS = 20_000_000  # kernels stamp files with a clock of up to 10 ms a tick


def fingerprint_of(files: Sequence[Path], config: Mapping[str, JsonValue], cache_dir: Path, progress: Progress) -> str:
    """Hashes weight files and a config.

    Args:
        files: The weight files; their names and order do not matter.
        config: The model's config.
        cache_dir: Folder whose `fingerprints` folder remembers the hash of each file.
        progress: Told about the bytes that are hashed.

    Returns:
        64 hex digits.

    Raises:
        ModelError: A file cannot be read.
    """
    digest = hashlib.sha256(b"deepinfra weights 1\n")
    for each in sorted(_file_digest(path, cache_dir, progress) for path in files):
        digest.update(each.encode())
    digest.update(json.dumps(config, sort_keys=True, default=dict).encode())
    return digest.hexdigest()


def _file_digest(path: Path, cache_dir: Path, progress: Progress) -> str:
    sidecar = cache_dir / "fingerprints" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    try:
        with path.open("rb") as file:
            before = _identity(os.fstat(file.fileno()))
            with suppress(OSError, ValueError, AttributeError):
                known = json.loads(sidecar.read_bytes())
                if known.get("identity") == before and isinstance(known.get("sha256"), str):
                    return str(known["sha256"])
            digest = hashlib.sha256()
            progress.start(f"{path.name}: fingerprint", before[0])
            try:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    progress.advance(len(chunk))
            finally:
                progress.done()
            after = _identity(os.fstat(file.fileno()))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if after == before:  # else somebody writes to it: the answer is not one to remember
        _remember(sidecar, {"path": str(path), "identity": before, "sha256": digest.hexdigest()}, before[2])
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, 64 hex digits.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(stat: os.stat_result) -> list[int]:
    # The change time is there because a copy can restore the modification time, but nobody can set this one.
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _remember(sidecar: Path, record: Mapping[str, object], changed_ns: int) -> None:
    # A cache folder that cannot be written costs time on the next start, no more.
    with suppress(OSError):
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=sidecar.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record, file)
                # A file that changed within the last tick of the file system's clock can change again unseen.
                settled = os.fstat(file.fileno()).st_mtime_ns - changed_ns > _TICK_NS
            if settled:
                Path(name).replace(sidecar)
        finally:
            Path(name).unlink(missing_ok=True)
