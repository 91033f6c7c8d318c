"""`deepinfra cache fsck`: reads every record of a folder, says what is damaged and drops it if told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.cache.folder import AsJson, PathOption, advancing, place_of
from deepinfra.cli.setup import Config
from deepinfra.errors import ResourceError

if TYPE_CHECKING:
    from deepinfra.kvstores.ssd.checking import Checked

__all__ = ("fsck",)

_LOCK_TRIES, _LOCK_WAIT_S = 100, 0.1

_WORDS = {
    "header": "what is said about a record is damaged",
    "payload": "a record's bytes are damaged",
    "footer": "the list of records names one that is not there",
    "tail": "the end is neither a record nor a list of records: a write was cut short, or the list is damaged",
}


def fsck(
    path: PathOption = None,
    config: Config = None,
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged; all other records stay.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every record of a folder and check it; exits 1 if something is damaged, also if it was repaired.

    A server that runs never serves what is damaged: it computes it again. Checking locks nothing. A repair is safe
    beside running servers: files that one of them appends to are left alone.

    Example: deepinfra cache fsck --repair
    """
    place = place_of(path, config)
    checked, repaired, skipped = anyio.run(_run, place.path, repair)
    damages = [damage for each in checked for damage in each.damages]
    records = sum(each.records for each in checked)
    if as_json:
        document = {
            "path": str(place.path),
            "files": len(checked),
            "records": records,
            "damages": [damage._asdict() for damage in damages],
            "repaired": repaired,
            "skipped": skipped,
        }
        typer.echo(json.dumps(document))
    else:
        for damage in damages:
            typer.echo(f"{damage.file} at {damage.offset}, {damage.nbytes} bytes: {_WORDS[damage.what]}")
        typer.echo(f"{place.path}: {records} whole records in {len(checked)} files, {len(damages)} damages")
        if repaired:
            typer.echo(f"repaired {len(repaired)} files")
        for name in skipped:
            typer.echo(f"left alone: {name}, which a running process appends to or has removed", err=True)
        if damages and not repair:
            typer.echo("damaged records are misses, never wrong answers; --repair drops them")
    if damages:
        raise typer.Exit(1)


async def _run(folder: Path, repair: bool) -> tuple[list[Checked], list[str], list[str]]:
    """What was found; with `repair`, which files were repaired and which could not be."""
    checked = _check_all(folder)
    broken = [each.file for each in checked if each.damages]
    if not repair or not broken:
        return checked, [], []
    from deepinfra.kvstores.ssd.claims import LOCK
    from deepinfra.kvstores.ssd.disk import Disk

    disk = Disk()
    for _ in range(_LOCK_TRIES):
        try:
            lock = disk.lock(folder / LOCK)
            break
        except BlockingIOError:
            await anyio.sleep(_LOCK_WAIT_S)
    else:
        raise ResourceError(f"another process holds the lock of {folder}; try again")
    try:
        return (checked, *_repair_all(folder, broken))
    finally:
        disk.close(lock)


def _check_all(folder: Path) -> list[Checked]:
    from deepinfra.kvstores.ssd.checking import check_file
    from deepinfra.kvstores.ssd.listing import list_segments

    found: list[Checked] = []
    segments = list_segments(folder)
    with advancing(f"{folder}: reading", sum(segment.nbytes for segment in segments)) as advance:
        for segment in segments:
            # Asked for each file anew: what was sealed meanwhile has an end.
            living = segment.name in _claimed(folder)
            try:
                found.append(check_file(folder, segment.name, living=living, seen=advance))
            except OSError as error:
                typer.echo(f"{segment.name} cannot be read: {error.strerror or error}", err=True)
    return found


def _repair_all(folder: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """Check once more under the lock, and repair; what a process appends to, or is gone, is skipped."""
    from deepinfra.kvstores.ssd.checking import check_file, repair_file

    repaired, skipped = list[str](), list[str]()
    claimed = _claimed(folder)
    for name in names:
        try:
            if name in claimed:
                skipped.append(name)
                continue
            checked = check_file(folder, name, living=False)
        except FileNotFoundError:
            skipped.append(name)
            continue
        if checked.damages:
            repair_file(folder, checked)
            repaired.append(name)
    return repaired, skipped


def _claimed(folder: Path) -> set[str]:
    """Files that running processes append to."""
    from deepinfra.kvstores.ssd.claims import read_others
    from deepinfra.kvstores.ssd.disk import Disk

    disk = Disk()
    return set(read_others(disk, folder, disk.names(folder), "")[0].claims)
