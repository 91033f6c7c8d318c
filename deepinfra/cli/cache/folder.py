"""Which folder the cache's tools look into: the one that `serve` would use, or the one they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from deepinfra.cli.progress import shown_progress
from deepinfra.cli.setup import Config, blueprint_for
from deepinfra.errors import ConfigError

if TYPE_CHECKING:
    from deepinfra.config import Blueprint
    from deepinfra.kvstores.ssd.census import Census

__all__ = (
    "AsJson",
    "PathOption",
    "Place",
    "advancing",
    "census_of",
    "configured_folders",
    "expanded",
    "now",
    "place_of",
    "time_text",
    "visible",
)

PathOption = Annotated[
    Path | None,
    typer.Option("--path", metavar="DIR", help="Folder of the store; default: the one that `deepinfra serve` uses."),
]
_LONG_NBYTES = 256 << 20
"""Work on fewer bytes is done before anybody asks how far it is."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Place(NamedTuple):
    """A store's folder, and the options of the store as configured; empty for a folder that is not configured."""

    path: Path
    options: Mapping[str, object]

    @property
    def capacity_nbytes(self) -> int | None:
        """Bytes that it may take, if that is configured."""
        value = self.options.get("capacity_nbytes")
        return value if isinstance(value, int) else None


def place_of(path: Path | None, config: Config | Blueprint, *, must_exist: bool = True) -> Place:
    """The folder to look into.

    Args:
        path: As told on the command line.
        config: The configuration, or its file; read only if `path` is not told.
        must_exist: Whether a folder that is not there is an error.

    Raises:
        ConfigError: The configuration has no folder, or several; or it is not there.
    """
    if path is not None:
        place = Place(expanded(path), {})
    else:
        # Public prefixes are files that may be elsewhere, and say nothing about a folder.
        bare: dict[str, object] = {"public_prefixes": []}
        blueprint = blueprint_for(config, bare) if config is None or isinstance(config, Path) else config
        places = configured_folders(blueprint)
        if not places:
            raise ConfigError("the configuration keeps no KV on a disk; name the folder to look into with --path")
        if len(places) > 1:
            paths = ", ".join(str(place.path) for place in places)
            raise ConfigError(f"the configuration has several folders; name one of them with --path: {paths}")
        place = places[0]
    if must_exist and not place.path.is_dir():
        raise ConfigError(
            f"there is no folder {place.path.absolute()}: "
            "nothing was saved yet, or the KV is elsewhere (--path, --config)"
        )
    return place


def expanded(path: Path) -> Path:
    """A path told on the command line, `~` expanded.

    Raises:
        ConfigError: It is in the home of nobody.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"--path {path}: {path.parts[0]} is no user's home") from None


def configured_folders(blueprint: Blueprint) -> list[Place]:
    """Folders of all ssd stores, those inside other stores too; one that pools share is there once."""
    stores = [part for pool in blueprint.pools if pool.store for part in pool.store.flat() if part.entry.name == "ssd"]
    every = [part.options.model_dump() for part in stores]
    places = [Place(Path(str(options["path"])).expanduser(), options) for options in every]
    return list({place.path.resolve(): place for place in reversed(places)}.values())[::-1]


@contextmanager
def advancing(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Takes bytes that were done, and shows how far that is where it takes a while."""
    if nbytes < _LONG_NBYTES:
        yield lambda nbytes: None
        return
    with shown_progress() as progress:
        progress.start(what, nbytes)
        yield progress.advance
        progress.done()


def census_of(folder: Path) -> Census:
    """What a folder holds."""
    from deepinfra.kvstores.ssd.census import take_census

    nbytes = sum(file.stat().st_size for file in folder.glob("*.kvseg"))
    with advancing(f"{folder}: counting", nbytes // 16) as advance:  # lists of records are a part of the files
        return take_census(folder, now(), lambda nbytes: advance(nbytes // 16))


def now() -> float:
    """Unix seconds."""
    from deepinfra.interfaces.given import SystemClock

    return SystemClock().wall()


def time_text(seconds: float) -> str:
    """`3 s`, `5 min`, `2.1 h`, `3.4 d`."""
    for unit, length in (("d", 86400), ("h", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(0.0, seconds):.0f} s"


def visible(text: str) -> str:
    """On one line, with line breaks to be seen; what others wrote does nothing to the terminal it is shown on."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
