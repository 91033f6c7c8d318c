"""Reading records back: neighbours in one call, every byte checked. Runs in offloaded functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from deepinfra.kvstores.ssd.disk import BUFFERS_PER_CALL, Disk, read_upto
from deepinfra.kvstores.ssd.format import Entry, Header, unpack_header

__all__ = ("Piece", "read_header", "read_pieces")


class Piece(NamedTuple):
    """A record to be read, and where to."""

    entry: Entry
    buffer: memoryview


def read_pieces(disk: Disk, path: Path, pieces: Sequence[Piece]) -> int:
    """Read records of one segment into their buffers.

    Returns:
        How many leading ones are whole and are what the index says; the one behind them is damaged.
    """
    done = 0
    try:
        fd = disk.open(path)
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


def read_header(disk: Disk, path: Path, entry: Entry) -> Header | None:
    """A record's header, or `None` if it cannot be read or is another's."""
    try:
        fd = disk.open(path)
        try:
            header = unpack_header(read_upto(disk, fd, entry.header_nbytes, entry.offset))
        finally:
            disk.close(fd)
    except OSError:
        return None
    return header if header is not None and header.id == entry.id else None


def _neighbours(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    start, end = 0, -1
    for i, (entry, _) in enumerate(pieces):
        if i > start and (entry.offset != end or i - start >= BUFFERS_PER_CALL // 2):
            yield pieces[start:i]
            start = i
        end = entry.offset + entry.header_nbytes + entry.nbytes
    yield pieces[start:]


def _read_run(disk: Disk, fd: int, run: Sequence[Piece]) -> int:
    headers = [bytearray(entry.header_nbytes) for entry, _ in run]
    buffers = [part for header, piece in zip(headers, run, strict=True) for part in (memoryview(header), piece.buffer)]
    try:
        whole = _fill(disk, fd, buffers, run[0].entry.offset)
    except OSError:
        whole = 0
    for i, ((entry, buffer), data) in enumerate(zip(run, headers, strict=True)):
        whole -= entry.header_nbytes + entry.nbytes
        header = unpack_header(data)
        if (
            whole < 0
            or header is None
            or header.id != entry.id
            or header.nbytes != entry.nbytes
            or header.payload_sum != xxhash.xxh3_128_digest(buffer)
        ):
            return i
    return len(run)


def _fill(disk: Disk, fd: int, buffers: list[memoryview], offset: int) -> int:
    """Read until `buffers` are full or the file ends; returns the bytes read."""
    rest = [buffer for buffer in buffers if buffer.nbytes]
    total = 0
    while rest:
        got = disk.preadv(fd, rest, offset + total)
        if got == 0:
            break
        total += got
        while rest and got >= rest[0].nbytes:
            got -= rest.pop(0).nbytes
        if got:
            rest[0] = rest[0][got:]
    return total
