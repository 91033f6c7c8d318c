"""What processes on one folder tell each other: who lives, what each appends to and how far, and what was forgotten.

    <writer>.kvproc   locked as long as its process lives; two slots in turn: count | claims | xxh3_64
    forgotten         a row for each `forget`, when it begins and when it is done: flags (1: done, 2: of one namespace)
                      | tenant or namespace | model | xxh3_64

A claim is the name of a file that a process appends to, and the bytes on disk that it may take. The newer slot whose
checksum is right counts, so a write that fails or is cut short leaves what was claimed before.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from deepinfra.kvstores.ssd.disk import Disk, read_upto, write_all
from deepinfra.kvstores.ssd.format import Erased

__all__ = (
    "FORGOTTEN",
    "LOCK",
    "MOST_CLAIMS",
    "TOMBSTONE_NBYTES",
    "Others",
    "Tombstone",
    "interrupted",
    "pack_tombstone",
    "process_name",
    "read_others",
    "read_tombstones",
    "tells",
    "write_claims",
)

LOCK, FORGOTTEN = "lock", "forgotten"

MOST_CLAIMS = 96
"""Files that a process has open for appending at most; their names fit into a slot. With fewer than there are tenants
with quotas, times classes, every save would begin a file."""

_SLOT_NBYTES = 8192
_SLOT = struct.Struct("<4sIQ")
_CLAIM = struct.Struct("<HQ")
_SUM = struct.Struct("<Q")
_ROW = struct.Struct("<4sI32s32s")
TOMBSTONE_NBYTES = _ROW.size + _SUM.size
_MAGIC = b"DIkc"
_PROCESS = re.compile(r"([0-9a-f]{12})\.kvproc")


class Others(NamedTuple):
    """How many other processes live, and what they claim: bytes by name."""

    processes: int
    claims: dict[str, int]


class Tombstone(NamedTuple):
    """Whose records were forgotten, where the row ends in its file, and whether their bytes are gone."""

    end: int
    which: Erased
    done: bool


def process_name(writer: str) -> str:
    """Name of a process's file."""
    return f"{writer}.kvproc"


def tells(name: str) -> bool:
    """Whether a file is one of those here."""
    return name == FORGOTTEN or _PROCESS.fullmatch(name) is not None


def write_claims(disk: Disk, fd: int, turn: int, claims: Mapping[str, int]) -> None:
    """Claim files; `turn` grows with every call.

    Raises:
        OSError: What was claimed before still is.
    """
    body = _SLOT.pack(_MAGIC, len(claims), turn)
    for name, nbytes in claims.items():
        body += _CLAIM.pack(len(name), nbytes) + name.encode()
    slot = body + _SUM.pack(xxhash.xxh3_64_intdigest(body))  # what a longer one before it left behind is not read
    write_all(disk, fd, [slot], turn % 2 * _SLOT_NBYTES)


def read_others(disk: Disk, folder: Path, names: Iterable[str], mine: str) -> tuple[Others, list[str]]:
    """What living processes besides `mine` claim, of the files in a folder; and the files of dead ones.

    Raises:
        OSError: It cannot be told.
    """
    count, claims, dead = 0, dict[str, int](), list[str]()
    for name in names:
        match = _PROCESS.fullmatch(name)
        if match is None or match[1] == mine:
            continue
        if disk.locked(folder / name):
            count += 1
            claims |= _read_claims(disk, folder / name)
        else:
            dead.append(name)
    return Others(count, claims), dead


def _read_claims(disk: Disk, path: Path) -> dict[str, int]:
    try:
        fd = disk.open(path)
    except FileNotFoundError:  # it has just ended
        return {}
    try:
        data = bytes(read_upto(disk, fd, 2 * _SLOT_NBYTES, 0)).ljust(2 * _SLOT_NBYTES, b"\0")
    finally:
        disk.close(fd)
    slots = (_unpack(data[:_SLOT_NBYTES]), _unpack(data[_SLOT_NBYTES:]))
    return max(slots, key=lambda slot: slot[0])[1]


def _unpack(data: bytes) -> tuple[int, dict[str, int]]:
    nothing = -1, dict[str, int]()
    if data[:4] != _MAGIC:
        return nothing
    _, count, turn = _SLOT.unpack_from(data)
    claims, at = {}, _SLOT.size
    for _ in range(min(count, MOST_CLAIMS)):
        length, nbytes = _CLAIM.unpack_from(data, at)
        at += _CLAIM.size
        claims[data[at : at + length].decode("ascii", "replace")] = nbytes
        at += length
        if at > _SLOT_NBYTES - _CLAIM.size:
            return nothing
    good = _SUM.unpack_from(data, at)[0] == xxhash.xxh3_64_intdigest(data[:at])
    return (turn, claims) if good else nothing


def interrupted(tombstones: Iterable[Tombstone]) -> list[Erased]:
    """What was begun to be forgotten, and is not done."""
    left: dict[Erased, None] = {}
    for tombstone in tombstones:
        if tombstone.done:
            left.pop(tombstone.which, None)
        else:
            left[tombstone.which] = None
    return list(left)


def pack_tombstone(which: Erased, *, done: bool) -> bytes:
    """A row of the file `forgotten`."""
    body = _ROW.pack(_MAGIC, done | which.narrow << 1, which.whose, which.model)
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def read_tombstones(disk: Disk, fd: int, start: int) -> tuple[list[Tombstone], int]:
    """Rows behind `start`, and where the last whole one ends; damaged ones are passed over."""
    found = []
    data = bytes(read_upto(disk, fd, max(0, disk.size(fd) - start), start))
    end = len(data) // TOMBSTONE_NBYTES * TOMBSTONE_NBYTES
    for at in range(0, end, TOMBSTONE_NBYTES):
        body, checksum = data[at : at + _ROW.size], data[at + _ROW.size : at + TOMBSTONE_NBYTES]
        if checksum == _SUM.pack(xxhash.xxh3_64_intdigest(body)):
            _, flags, whose, model = _ROW.unpack(body)
            which = Erased(whose, model, narrow=bool(flags & 2))
            found.append(Tombstone(start + at + TOMBSTONE_NBYTES, which, done=bool(flags & 1)))
    return found, start + end
