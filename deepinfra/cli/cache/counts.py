"""`deepinfra cache stats` and `du`: how much a folder holds, and of whom."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from deepinfra.cli.cache.folder import AsJson, PathOption, Place, census_of, now, place_of, time_text, visible
from deepinfra.cli.progress import nbytes_text
from deepinfra.cli.setup import Config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfra.kvstores.ssd.census import Census

__all__ = ("du", "stats")

By = Literal["tenant", "class", "model", "namespace", "kind", "age"]
_AGES_S = (("under 1 h", 3600.0), ("1 to 6 h", 6 * 3600.0), ("6 to 24 h", 86400.0), ("1 to 3 d", 3 * 86400.0))
_OLDEST = "over 3 d"


def stats(path: PathOption = None, config: Config = None, as_json: AsJson = False) -> None:
    """Print what a folder holds: records, bytes, files, ages, and the processes that use it now.

    Reads the files' lists of records, no payloads; locks nothing, so a server may run. `dead` bytes are of records that
    expired or were written again, and go with their files. Exits 1 if there is no such folder.

    Example: deepinfra cache stats --path /data/kv
    """
    place = place_of(path, config)
    document = _stats(place, census_of(place.path))
    if as_json:
        typer.echo(json.dumps(document))
        return
    _print_stats(document)


def du(
    by: Annotated[
        str, typer.Option(metavar="KEYS", help=f"What to group by, separated by commas: {', '.join(get_args(By))}.")
    ] = "tenant,class",
    path: PathOption = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Print who holds how many bytes and records, the largest first.

    A namespace is a tenant's use of one model with one template; its first 12 hex digits are shown. Exits 1 if there
    is no such folder.

    Example: deepinfra cache du --by tenant,model
    """
    keys = [key.strip() for key in by.split(",")]
    for key in keys:
        if key not in get_args(By):
            raise typer.BadParameter(f"{key!r} is none of {', '.join(get_args(By))}", param_hint="--by")
    place = place_of(path, config)
    census = census_of(place.path).living()
    rows = _grouped(census, keys)
    total = {"records": len(census.rows), "nbytes": int(census.nbytes.sum())}
    if as_json:
        groups = [{**dict(zip(keys, names, strict=True)), "records": n, "nbytes": b} for names, n, b in rows]
        typer.echo(json.dumps({"path": str(place.path), "by": keys, "groups": groups, "total": total}))
        return
    lines = [(*map(visible, names), str(records), nbytes_text(nbytes)) for names, records, nbytes in rows]
    lines.append(("total", *[""] * (len(keys) - 1), str(total["records"]), nbytes_text(total["nbytes"])))
    _print_table((*keys, "records", "bytes"), lines, left=len(keys))


def _stats(place: Place, whole: Census) -> dict[str, object]:
    census, time = whole.living(), now()
    files, count = census.files, len(census.rows)
    hours: dict[tuple[str, int], list[int]] = {}
    for file in files:
        hours.setdefault((file.traffic, file.hour), [0, 0, 0])[0] += 1
    for index, nbytes in zip(census.file.tolist(), census.nbytes.tolist(), strict=True):
        cell = hours[files[index].traffic, files[index].hour]
        cell[1] += 1
        cell[2] += nbytes
    groups = [
        {
            "class": traffic,
            "expires": datetime.fromtimestamp((hour + 1) * 3600, UTC).isoformat() if hour < 1 << 23 else str(hour),
            "files": cell[0],
            "records": cell[1],
            "nbytes": cell[2],
        }
        for (traffic, hour), cell in sorted(hours.items())
    ]
    return {
        "path": str(place.path),
        "records": count,
        "live_nbytes": int(census.nbytes.sum()),
        "dead_nbytes": whole.dead_nbytes,
        "disk_nbytes": sum(file.disk_nbytes for file in files),
        "capacity_nbytes": place.capacity_nbytes,
        "files": len(files),
        "sealed": sum(file.sealed for file in files),
        "open": sum(not file.sealed for file in files),
        "processes": census.processes,
        "tenants": len({census.owners[owner].tenant for owner in set(census.owner.tolist())}),
        "oldest_s": time - float(census.rows["created"].min()) if count else None,
        "newest_s": time - float(census.rows["created"].max()) if count else None,
        "groups": groups,
    }


def _print_stats(document: dict[str, object]) -> None:
    def nbytes(name: str) -> str:
        value = document[name]
        return nbytes_text(value) if isinstance(value, int) else ""

    def age(name: str) -> str:
        value = document[name]
        return f"{time_text(value)} ago" if isinstance(value, float) else "none"

    capacity = nbytes("capacity_nbytes")
    for name, words in (
        ("folder", document["path"]),
        ("records", f"{document['records']} of {document['tenants']} tenants, {nbytes('live_nbytes')}"),
        ("dead", nbytes("dead_nbytes")),
        ("on disk", nbytes("disk_nbytes") + (f" of {capacity}" if capacity else "")),
        ("files", f"{document['files']}: {document['sealed']} sealed, {document['open']} open"),
        ("processes", document["processes"]),
        ("oldest", age("oldest_s")),
        ("newest", age("newest_s")),
    ):
        typer.echo(f"{name:10} {words}")
    groups = document["groups"]
    assert isinstance(groups, list)
    if groups:
        typer.echo("")
        lines = [
            (
                g["class"],
                g["expires"].removesuffix("+00:00"),
                str(g["files"]),
                str(g["records"]),
                nbytes_text(g["nbytes"]),
            )
            for g in groups
        ]
        _print_table(("class", "expires before (UTC)", "files", "records", "bytes"), lines, left=2)


def _grouped(census: Census, keys: Sequence[str]) -> list[tuple[tuple[str, ...], int, int]]:
    """Names by the keys, records and bytes, the largest first."""
    import numpy as np

    labels: list[list[str]] = []
    codes: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    age_s = now() - census.rows["created"]
    kinds = ("dead", "block", "snapshot", "tail")
    for key in keys:
        match key:
            case "tenant":
                names, code = [owner.tenant for owner in census.owners], census.owner
            case "model":
                names, code = [owner.model for owner in census.owners], census.owner
            case "namespace":
                names, code = [owner.namespace.hex()[:12] for owner in census.owners], census.owner
            case "class":
                names, code = [file.traffic for file in census.files], census.file
            case "kind":
                names, code = list(kinds), (census.rows["tag"] & 3).astype(np.int64)
            case _:
                names = [*(name for name, _ in _AGES_S), _OLDEST]
                code = np.digitize(age_s, [limit for _, limit in _AGES_S])
        unique = list(dict.fromkeys(names))
        numbers = np.array([unique.index(name) for name in names] or [0], np.int64)
        labels.append(unique)
        codes.append(numbers[code])
    if not len(census.rows):
        return []
    cells, inverse = np.unique(np.stack(codes), axis=1, return_inverse=True)
    records = np.bincount(inverse)
    nbytes = np.zeros(len(records), np.int64)
    np.add.at(nbytes, inverse, census.nbytes)
    rows = [
        (tuple(label[code] for label, code in zip(labels, cell, strict=True)), int(n), int(b))
        for cell, n, b in zip(cells.T.tolist(), records, nbytes, strict=True)
    ]
    return sorted(rows, key=lambda row: (-row[2], row[0]))


def _print_table(head: Sequence[str], lines: Sequence[Sequence[str]], *, left: int) -> None:
    """Columns, the first `left` of them aligned to the left."""
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    for line in (head, *lines):
        cells = [
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())
