"""`deepinfra cache export`, `import` and `forget`: records out of a folder, into one, and gone."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import anyio
import typer

from deepinfra.cli.cache.folder import PathOption, Place, advancing, now, place_of
from deepinfra.cli.progress import nbytes_text
from deepinfra.cli.setup import Config
from deepinfra.errors import ConfigError

if TYPE_CHECKING:
    from deepinfra.core.kv import KVRecord, KVStats, NamespaceFilter
    from deepinfra.kvstores import SsdStore
    from deepinfra.kvstores.portable import Portable
    from deepinfra.kvstores.ssd.listing import ListedRecord

__all__ = ("export", "forget", "import_")

Tenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Only records of this tenant.")]
ModelName = Annotated[str, typer.Option("--model", metavar="NAME", help="Only records of the model of this name.")]
NamespaceDigits = Annotated[
    str,
    typer.Option("--namespace", metavar="HEX", help="Only records of this namespace: 8 or more of its hex digits."),
]

_BATCH_NBYTES, _BATCH_RECORDS = 32 << 20, 256

_FILE_NBYTES = 8192
"""Beside its data: a header, a row, and where it begins a file that file's footer and last block."""


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Is replaced if it is there, once all is written.")],
    tenant: Tenant = "",
    model: ModelName = "",
    traffic: Annotated[
        Literal["default", "agent", "chat"] | None, typer.Option("--class", help="Only records of this class.")
    ] = None,
    path: PathOption = None,
    config: Config = None,
) -> None:
    """Write records into one file that `import` reads on any machine; damaged and expired ones are left out.

    A server may run meanwhile. The file holds token ids, from which prompts can be read: it is made for its owner only.
    Records are found again only by a server with the same weights, template, element type and tenant. Exits 1 if there
    is no such folder or the file cannot be written.

    Example: deepinfra cache export kv.dikv --tenant team-a --class agent
    """
    from deepinfra.kvstores.portable import Portable, PortableWriter
    from deepinfra.kvstores.ssd.listing import read_listed

    place = place_of(path, config)
    left_out = 0
    partial = file.with_name(f".{file.name}.partial")
    listed = [record for record in _newest(place.path) if _wanted(record, tenant, model, traffic)]
    with advancing(f"{file}: writing", sum(record.ref.nbytes for record in listed)) as advance:
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                writer = PortableWriter(out)
                for each in listed:
                    record = read_listed(place.path, each)
                    if record is None or not writer.add(Portable(record, each.created, each.expires)):
                        left_out += 1
                    advance(each.ref.nbytes)
                writer.end()
                out.flush()
                os.fsync(out.fileno())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    typer.echo(f"{writer.records} records, {nbytes_text(file.stat().st_size)}, in {file}")
    if left_out:
        typer.echo(f"{left_out} records were damaged, went meanwhile or are too large, and are not in it", err=True)


def _newest(folder: Path) -> list[ListedRecord]:
    """Records that can be found, one copy of each, in the order of the files: parents before what continues them."""
    from deepinfra.kvstores.ssd.listing import list_records, list_segments

    time = now()
    newest: dict[tuple[bytes, str], ListedRecord] = {}
    # By number, not by class and hour: that is the order in which they were saved.
    segments = sorted(list_segments(folder), key=lambda segment: segment.name.split("-")[2])
    for record in list_records(folder, segments):
        name = record.ref.key, record.ref.kind
        known = newest.get(name)
        if record.expires > time and (known is None or record.expires > known.expires):
            newest[name] = record
    return list(newest.values())


def _wanted(record: ListedRecord, tenant: str, model: str, traffic: str | None) -> bool:
    owner = record.owner
    return tenant in ("", owner.tenant) and model in ("", owner.model) and traffic in (None, record.traffic)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Written by `deepinfra cache export`.")],
    path: PathOption = None,
    config: Config = None,
) -> None:
    """Save the records of a file in a folder, made if it is not there; a server may run meanwhile.

    Nothing of others goes for it: import stops where the folder would become larger than the configured cap, or than it
    is already. With --path, cap and quotas are those of the configured store too, or the default ones if none is
    configured: if that cap is smaller than the running server's, name the server's configuration with --config.
    Records expire when they would have.
    Import only files that you trust: a record is what a model remembers of a prompt, and answers go on from there.
    Exits 1 if the file is damaged or of another kind; records before the damage are saved.

    Example: deepinfra cache import kv.dikv
    """
    place = place_of(None, config, must_exist=False) if path is None else place_of(path, config, must_exist=False)
    if path is not None:
        place = _limits_of(place, config)
    before, after, counted = anyio.run(_import, place, file)
    saved, expired = after.saved - before.saved, counted.expired
    dropped = after.dropped - before.dropped
    held = counted.read - expired - saved - dropped
    typer.echo(
        f"{saved} records saved in {place.path}, {held} were held already, {expired} had expired, {dropped} had no room"
    )
    if counted.full:
        typer.echo(f"the rest of {file} was left out: {counted.full}", err=True)


def _limits_of(place: Place, config: Config) -> Place:
    """A folder told on the command line, with the limits of the store that is configured."""
    from deepinfra.cli.cache.folder import configured_folders
    from deepinfra.cli.setup import blueprint_for

    configured = configured_folders(blueprint_for(config, {}))
    options = configured[0].options if configured else {}
    return place._replace(options={**options, "path": str(place.path)})


class _Counted(NamedTuple):
    """Records that were read, how many of them had expired, and why the rest of the file was not; empty: all was."""

    read: int
    expired: int
    full: str = ""


async def _import(place: Place, file: Path) -> tuple[KVStats, KVStats, _Counted]:
    """Statistics before and after, and what was read."""
    from deepinfra.kvstores.portable import read_portable

    room = _room_of(place)
    read = expired = 0
    full = ""
    batch: list[KVRecord] = []
    nbytes = 0
    with file.open("rb") as source, advancing(f"{file}: reading", os.fstat(source.fileno()).st_size) as advance:
        async with _store(room.place) as store:
            before = store.stats()
            try:
                for portable in _named(file, read_portable(source)):
                    left_s = portable.expires - now()
                    advance(portable.record.ref.nbytes)
                    if left_s <= 0:
                        read, expired = read + 1, expired + 1
                        continue
                    most = _most_nbytes(portable.record)
                    if nbytes >= _BATCH_NBYTES or len(batch) >= _BATCH_RECORDS or room.full(store, nbytes + most):
                        await store.save(batch)
                        batch, nbytes = [], 0
                        if full := room.full(store, most):
                            break
                    batch.append(_until(portable.record, left_s))
                    read, nbytes = read + 1, nbytes + most
            finally:
                await store.save(batch)
            return before, store.stats(), _Counted(read, expired, full)


class _Room(NamedTuple):
    """How far an import may fill a folder.

    Attributes:
        place: The folder, with a cap and no floor that make nothing go for it.
        capacity_nbytes: Its size at most.
        floor_nbytes: Bytes to leave free on its file system.
    """

    place: Place
    capacity_nbytes: int
    floor_nbytes: int

    def full(self, store: SsdStore, nbytes: int) -> str:
        """Why there is no room for so many bytes; empty: there is."""
        if store.stats().nbytes + nbytes > self.capacity_nbytes:
            return f"the folder may not become larger than {nbytes_text(self.capacity_nbytes)}"
        if self.floor_nbytes and shutil.disk_usage(self.place.path).free < self.floor_nbytes + nbytes:
            return f"{nbytes_text(self.floor_nbytes)} are to stay free on its file system"
        return ""


def _room_of(place: Place) -> _Room:
    from deepinfra.kvstores.options import SsdStoreOptions

    options = SsdStoreOptions.model_validate({**place.options, "path": str(place.path)})
    files = place.path.iterdir() if place.path.is_dir() else ()
    present = sum(file.stat().st_blocks * 512 for file in files if file.suffix == ".kvseg")
    capacity = max(options.capacity_nbytes, present)
    # Twice that, since running servers may have claimed room that they have not written yet.
    bounds = {
        "capacity_nbytes": 2 * capacity,
        "segment_nbytes": min(options.segment_nbytes, capacity // 8),
        "min_free_nbytes": 0,
    }
    return _Room(place._replace(options={**place.options, **bounds}), capacity, options.min_free_nbytes)


def _most_nbytes(record: KVRecord) -> int:
    """What a record may take on disk: a file of its own has its own block and footer."""
    return record.ref.nbytes + 4 * len(record.tokens) + _FILE_NBYTES


def _named(file: Path, records: Iterator[Portable]) -> Iterator[Portable]:
    """The same, with the file's name in what is wrong with it."""
    try:
        yield from records
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}; what was read is saved") from None


def _until(record: KVRecord, left_s: float) -> KVRecord:
    from dataclasses import replace

    return replace(record, retention=replace(record.retention, ttl_s=left_s))


def _store(place: Place) -> SsdStore:
    from deepinfra.kvstores import SsdStore
    from deepinfra.kvstores.options import SsdStoreOptions

    return SsdStore(**dict(SsdStoreOptions.model_validate({**place.options, "path": str(place.path)})))


def forget(
    tenant: Tenant = "",
    model: ModelName = "",
    namespace: NamespaceDigits = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    path: PathOption = None,
    config: Config = None,
) -> None:
    """Delete all records of a tenant, a model or a namespace, or of what they have in common.

    A namespace is a tenant's use of one model with one `cache_salt`: `du --by namespace` lists all, `explain` says
    which one a request is of. A server may run meanwhile. The bytes are overwritten or their files removed when this
    returns, and servers find them no more; what one holds in RAM or on its device stays there until it is needed for
    others. Exits 1 if it was not done, 2 if nothing is named, or several namespaces begin with these digits.

    Example: deepinfra cache forget --tenant team-a --yes
    """
    from deepinfra.core.kv import NamespaceFilter
    from deepinfra.kvstores.ssd.listing import list_records

    if not tenant and not model and not namespace:
        raise typer.BadParameter("name a tenant, a model, a namespace, or several of them", param_hint="--tenant")
    place = place_of(path, config)
    which = NamespaceFilter(tenant=tenant, model=model, namespace=_namespace_of(place.path, namespace))
    records, nbytes = 0, 0
    for record in list_records(place.path):
        if which.matches(record.owner.tenant, record.owner.model, record.owner.namespace):
            records += 1
            nbytes += record.ref.nbytes
    names = {"tenant": tenant, "model": model, "namespace": which.namespace.hex()}
    whose = " and ".join(f"{what} {name!r}" for what, name in names.items() if name)
    typer.echo(f"{place.path}: {records} records of {whose}, {nbytes_text(nbytes)}")
    if not yes and not typer.confirm("forget them?"):
        typer.echo("nothing was forgotten", err=True)
        raise typer.Exit(1)
    typer.echo(anyio.run(_forget, place, which))


def _namespace_of(folder: Path, digits: str) -> bytes:
    """The namespace in a folder that begins with these hex digits; empty if there are none."""
    from deepinfra.kvstores.ssd.listing import list_records

    if not digits:
        return b""
    if re.fullmatch("[0-9a-f]{8,64}", digits.lower()) is None:
        raise typer.BadParameter(f"{digits!r} is not 8 to 64 hex digits", param_hint="--namespace")
    held = {record.owner.namespace.hex() for record in list_records(folder)}
    fitting = sorted(each for each in held if each.startswith(digits.lower()))
    if not fitting:
        raise ConfigError(f"{folder} holds nothing of a namespace that begins with {digits}")
    if len(fitting) > 1:
        raise typer.BadParameter(f"several begin with {digits}: {', '.join(fitting)}", param_hint="--namespace")
    return bytes.fromhex(fitting[0])


async def _forget(place: Place, which: NamespaceFilter) -> str:
    # Nothing else may go because this command knows other limits than a server.
    boundless = {"path": str(place.path), "capacity_nbytes": 1 << 62, "min_free_nbytes": 0}
    async with _store(place._replace(options=boundless)) as store:
        forgotten = await store.forget(which)
    return f"forgot {forgotten.records} records, {nbytes_text(forgotten.nbytes)}"
