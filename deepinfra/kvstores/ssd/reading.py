"""Reading records back: neighbours in one call, every byte checked. Runs in offloaded functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import xxhash

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, RecordRef, Retention
from deepinfra.kvstores.ssd.disk import BUFFERS_PER_CALL, Disk, read_upto
from deepinfra.kvstores.ssd.format import KEY_NBYTES, Entry, payload_sum, unpack_header

__all__ = ("Piece", "read_pieces", "read_records")


RUN_NBYTES = 1 << 20
"""Bytes per call: small enough for checksums to find them in the cache, large enough for the disk."""


class Piece(NamedTuple):
    """A record to be read: its id, its row, and where to."""

    id: bytes
    entry: Entry
    buffer: memoryview


def read_pieces(disk: Disk, path: Path, pieces: Sequence[Piece]) -> int:
    """Read records of one segment into their buffers.

    Returns:
        How many leading ones are whole and are what the index says; the one behind them is damaged.

    Raises:
        FileNotFoundError: The segment is gone.
    """
    done = 0
    try:
        fd = disk.open(path)
    except FileNotFoundError:
        raise
    except OSError:
        return 0
    try:
        for run in _neighbours(pieces):
            good = _read_run(disk, fd, run)
            done += good
            if good < len(run):
                break
    finally:
        disk.close(fd)
    return done


def read_records(disk: Disk, places: Sequence[tuple[Path, bytes, Entry]]) -> list[KVRecord | None]:
    """Whole records, checked, without the retention they were saved with; `None` for one that cannot be read."""
    found: list[KVRecord | None] = []
    for path, of_path in groupby(places, key=lambda place: place[0]):
        wanted = [(id_, entry) for _, id_, entry in of_path]
        try:
            fd = disk.open(path)
        except OSError:
            found += [None] * len(wanted)
            continue
        try:
            found += [_read_record(disk, fd, id_, entry) for id_, entry in wanted]
        finally:
            disk.close(fd)
    return found


def _read_record(disk: Disk, fd: int, id_: bytes, entry: Entry) -> KVRecord | None:
    try:
        data = memoryview(read_upto(disk, fd, entry.header_nbytes + entry.nbytes, entry.offset))
    except OSError:
        return None
    header, payload = unpack_header(data[: entry.header_nbytes]), data[entry.header_nbytes :]
    if (
        header is None
        or not header.kind
        or header.id != id_
        or header.nbytes != payload.nbytes
        or header.payload_sum != xxhash.xxh3_128_digest(payload)
    ):
        return None
    return KVRecord(
        ref=RecordRef(BlockKey(id_[:KEY_NBYTES]), header.kind, entry.nbytes),
        parent=BlockKey(header.parent),
        namespace=header.owner.namespace,
        tenant=header.owner.tenant,
        model=header.owner.model,
        tokens=header.tokens,
        retention=Retention(),
        data=payload,
    )


def _neighbours(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Runs of records that lie one behind another, as many as are still in the CPU's cache when they are checked."""
    start, end, nbytes = 0, -1, 0
    for i, (_, entry, _) in enumerate(pieces):
        if i > start and (entry.offset != end or nbytes >= RUN_NBYTES or i - start >= BUFFERS_PER_CALL // 2):
            yield pieces[start:i]
            start, nbytes = i, 0
        nbytes += entry.header_nbytes + entry.nbytes
        end = entry.offset + entry.header_nbytes + entry.nbytes
    yield pieces[start:]


def _read_run(disk: Disk, fd: int, run: Sequence[Piece]) -> int:
    headers = memoryview(bytearray(sum(piece.entry.header_nbytes for piece in run)))
    buffers: list[memoryview] = []
    at = 0
    for _, entry, buffer in run:
        buffers += (headers[at : at + entry.header_nbytes], buffer)
        at += entry.header_nbytes
    try:
        whole = _fill(disk, fd, buffers, run[0].entry.offset)
    except OSError:
        whole = 0
    for i, (id_, entry, buffer) in enumerate(run):
        whole -= entry.header_nbytes + entry.nbytes
        if whole < 0 or payload_sum(buffers[2 * i], id_, entry.nbytes) != xxhash.xxh3_128_digest(buffer):
            return i
    return len(run)


def _fill(disk: Disk, fd: int, buffers: list[memoryview], offset: int) -> int:
    """Read until `buffers` are full or the file ends; returns the bytes read."""
    wanted = sum(buffer.nbytes for buffer in buffers)
    total = disk.preadv(fd, buffers, offset)
    while 0 < total < wanted:
        skip, rest = total, []
        for buffer in buffers:
            if skip < buffer.nbytes:
                rest.append(buffer[skip:])
            skip = max(0, skip - buffer.nbytes)
        got = disk.preadv(fd, rest, offset + total)
        if got == 0:
            break
        total += got
    return total
