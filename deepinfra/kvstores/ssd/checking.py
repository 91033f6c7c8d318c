"""Reading every byte of a folder's files to find what is damaged, and dropping it. Blocking.

A check locks and writes nothing. A repair is for whoever holds the folder's `lock`, and for files that no process
appends to; processes that use the folder meanwhile find the same records where they were, and miss the dropped ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import xxhash

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, RecordRef, Retention
from deepinfra.kvstores.ssd.disk import Disk, read_upto, write_all
from deepinfra.kvstores.ssd.format import (
    FIXED_NBYTES,
    KEY_NBYTES,
    PREFIX_NBYTES,
    ROW,
    Entry,
    Header,
    dead_header,
    header_nbytes,
    pack_footer,
    pack_header,
    parse_name,
)
from deepinfra.kvstores.ssd.recovery import entry_of, read_footer, scan
from deepinfra.kvstores.ssd.segment import Segment

__all__ = ("Checked", "Damage", "What", "check_file", "repair_file")

What: TypeAlias = Literal["header", "payload", "footer", "tail"]

_CHUNK_NBYTES = 1 << 20


class Damage(NamedTuple):
    """Bytes that are not what they should be.

    Attributes:
        what: `header` or `payload` of a record, a `footer` that names a record which is not there, or a `tail` that is
            neither record nor footer: a write that was cut short, or a damaged footer.
    """

    file: str
    offset: int
    nbytes: int
    what: What


class Checked(NamedTuple):
    """A file that was read to its end.

    Attributes:
        records: Those that are whole.
        rows: Where they are, in order; what a repair writes into the footer.
        size: Where the records end.
    """

    file: str
    records: int
    damages: tuple[Damage, ...]
    rows: tuple[tuple[Entry, Header], ...]
    size: int


def check_file(
    folder: Path,
    name: str,
    *,
    living: bool,
    seen: Callable[[int], None] = lambda nbytes: None,
    disk: Disk | None = None,
) -> Checked:
    """Read a file and check all its records.

    Args:
        folder: The store's.
        name: Of the file.
        living: A process appends to it, so its end may be unfinished.
        seen: Told the bytes that were read.
        disk: Whose system calls.

    Raises:
        OSError: It cannot be read.
    """
    disk = disk or Disk()
    fd = disk.open(folder / name)
    try:
        return _checked(disk, fd, name, living, seen)
    finally:
        disk.close(fd)


def _checked(disk: Disk, fd: int, name: str, living: bool, seen: Callable[[int], None]) -> Checked:
    file_nbytes = disk.size(fd)
    footer = read_footer(disk, fd, file_nbytes)
    listed = {} if footer is None else {entry.offset: entry for entry in map(Entry._make, ROW.iter_unpack(footer[0]))}
    end = file_nbytes if footer is None else footer[2]
    damages: list[Damage] = []
    good: list[tuple[Entry, Header]] = []
    found = set[int]()
    at = 0
    while at < end:
        for offset, length, header in scan(disk, fd, end, at):
            at = offset + length + header.nbytes
            seen(at - offset)
            whole = footer is None or _names(listed.get(offset), length, header)
            if whole or not header.kind:
                found.add(offset)
            if not header.kind:
                continue
            if _sum(disk, fd, offset + length, header.nbytes) != header.payload_sum:
                damages.append(Damage(name, offset, at - offset, "payload"))
                found.add(offset)
            elif whole:
                good.append((entry_of(offset, length, header, 0), header))
        if at >= end:
            break
        # Behind a bad header only the footer knows where the next record begins.
        following = min((offset for offset in listed if offset > at), default=end)
        if footer is None:
            if not living:
                damages.append(Damage(name, at, end - at, "tail"))
            break
        damages.append(Damage(name, at, following - at, "header"))
        seen(following - at)
        found.add(at)
        at = following
    damages += [
        Damage(name, entry.offset, entry.header_nbytes + entry.nbytes, "footer")
        for entry in listed.values()
        if entry.kind and entry.offset not in found
    ]
    return Checked(name, len(good), tuple(damages), tuple(good), min(at, end))


def _names(entry: Entry | None, header_length: int, header: Header) -> bool:
    """Whether a footer's row is of this record; one that has no row is dead."""
    return entry is not None and (entry.prefix, entry.header_nbytes, entry.nbytes) == (
        header.id[:PREFIX_NBYTES],
        header_length,
        header.nbytes,
    )


def _sum(disk: Disk, fd: int, offset: int, nbytes: int) -> bytes:
    checksum = xxhash.xxh3_128()
    while nbytes > 0:
        piece = read_upto(disk, fd, min(nbytes, _CHUNK_NBYTES), offset)
        if not piece:
            break
        checksum.update(piece)
        offset, nbytes = offset + len(piece), nbytes - len(piece)
    return checksum.digest()


def repair_file(folder: Path, checked: Checked, disk: Disk | None = None) -> bool:
    """Drop what is damaged: blank it, list what is whole in a new footer; a file without records goes.

    The caller holds the folder's lock, and checked the file since it has.

    Returns:
        Whether the file is still there.

    Raises:
        OSError: It cannot be written.
    """
    disk = disk or Disk()
    parsed = parse_name(checked.file)
    assert parsed is not None, "a file of records was checked"
    if not checked.rows:
        disk.unlink(folder / checked.file)
        return False
    segment = Segment(*parsed)
    for entry, header in checked.rows:
        segment.add(entry._replace(tag=segment.owner(header.owner) << 2 | entry.kind))
    used = (folder / checked.file).stat().st_mtime_ns  # when it was last of use, which a repair is not
    fd = disk.open(folder / checked.file, write=True)
    try:
        for damage in checked.damages:
            if damage.what in ("header", "payload") and damage.nbytes > FIXED_NBYTES + 8:
                write_all(disk, fd, [_blank(damage.nbytes)], damage.offset)
        disk.truncate(fd, checked.size)
        write_all(disk, fd, [pack_footer(checked.size, segment.rows, segment.owners)], checked.size)
        disk.sync(fd)
        disk.stamp(fd, used)
    finally:
        disk.close(fd)
    return True


def _blank(nbytes: int) -> bytes:
    """A dead record of so many bytes."""
    key = BlockKey(bytes(KEY_NBYTES))
    empty = KVRecord(
        ref=RecordRef(key, "block", 0),
        parent=key,
        namespace=key,
        tenant="",
        model="",
        tokens=(),
        retention=Retention(),
        data=memoryview(b""),
    )
    payload = memoryview(bytes(nbytes - header_nbytes(empty)))
    whole = replace(empty, ref=RecordRef(key, "block", payload.nbytes), data=payload)
    return dead_header(pack_header(whole, 0.0, 0.0, 0.0)) + payload.tobytes()
