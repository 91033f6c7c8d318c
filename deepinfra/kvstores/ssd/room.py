"""Which files must go so that another may grow: of a tenant over its quota its own, then the least recently used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ("File", "victims")


class File(NamedTuple):
    """A file of records in the folder.

    Attributes:
        nbytes: Bytes on disk that it takes, or may take while a process appends to it.
        used: When it was last used, in nanoseconds.
        serial: From its name: of files used at once, the one made last goes first.
        free: Whether it may go: no other process appends to it, and it is not the one that is to grow.
    """

    name: str
    tag: str
    nbytes: int
    used: int
    serial: int
    free: bool


def victims(files: Sequence[File], tag: str, over_nbytes: int, short_nbytes: int) -> list[File] | None:
    """Files that have to go, in that order; `None` if even all that may go are not enough.

    Args:
        files: All of the folder.
        tag: Of the tenant that is to write; only its own files go for `over_nbytes`.
        over_nbytes: Bytes that the tenant would have too many.
        short_nbytes: Bytes that the folder would have too many.
    """
    going: list[File] = []
    candidates = sorted((file for file in files if file.free), key=lambda file: (file.used, -file.serial))
    for wanted in ([f for f in candidates if f.tag == tag] if over_nbytes > 0 else [], candidates):
        missing = over_nbytes if wanted is not candidates else short_nbytes - sum(file.nbytes for file in going)
        for file in wanted:
            if missing <= 0:
                break
            if file not in going:
                going.append(file)
                missing -= file.nbytes
        if missing > 0:
            return None
    return going
