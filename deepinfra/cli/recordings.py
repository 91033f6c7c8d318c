"""Files with receipts: one, a response's body, a recorded stream, or a line for each of many."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from deepinfra.engine.receipts import Receipt

__all__ = ("Recording", "recordings")

_PIECE_NBYTES = 2**20

_SSE = (b"event:", b"id:", b"retry:", b":")
"""Beginnings of lines in a recorded stream that carry no data."""


class Recording(NamedTuple):
    """JSON that should have a receipt, as bytes: of a file of many only one is decoded at a time."""

    where: str
    data: bytes

    def receipt(self) -> Receipt:
        """What it says.

        Raises:
            ReceiptError: Why it cannot be read; names the field.
        """
        from deepinfra.engine.receipts import decoded, receipt_in, receipt_of
        from deepinfra.errors import ReceiptError

        found = receipt_in(decoded(self.data))
        if found is None:
            raise ReceiptError("there is no receipt in it, neither as such nor as 'deepinfra.receipt'")
        return receipt_of(found)


def recordings(file: str) -> list[Recording]:
    """What a file has; `-` reads standard input. Of a file of many, lines without a receipt are left out.

    Raises:
        ReceiptError: It is neither one JSON value, nor a recorded stream, nor lines of JSON; or it has no receipt.
        OSError: It cannot be read.
    """
    from deepinfra.engine.receipts import MAX_NBYTES, decoded
    from deepinfra.errors import ReceiptError

    name = "standard input" if file == "-" else file
    with sys.stdin.buffer if file == "-" else Path(file).open("rb") as stream:
        head = stream.read(MAX_NBYTES + 1)
        if len(head) <= MAX_NBYTES:
            try:
                decoded(head)
            except ReceiptError as error:
                whole: str | None = str(error)
            else:
                return [Recording(name, head)]
        else:
            whole = None
        found = list(_of_many(name, stream, head, whole))
    if not found:
        raise ReceiptError(f"{name} has no receipt")
    return found


def _of_many(name: str, stream: BinaryIO, head: bytes, whole: str | None) -> Iterator[Recording]:
    """`whole` says why the file is no single JSON value, which it is told if it is nothing else either."""
    from deepinfra.errors import ReceiptError

    first = True
    for number, line in enumerate(_lines(name, stream, head), 1):
        data = line.strip()
        if not data or data.startswith(_SSE):
            first = first and not data
            continue
        data = data.removeprefix(b"data:").lstrip()
        if first and not data.startswith(b"{"):
            raise ReceiptError(f"{name} is neither JSON nor lines of JSON: {whole or f'line {number} is no object'}")
        first = False
        if b'"requests"' in data:
            yield Recording(f"{name}:{number}", data)


def _lines(name: str, stream: BinaryIO, rest: bytes) -> Iterator[bytes]:
    from deepinfra.engine.receipts import MAX_NBYTES
    from deepinfra.errors import ReceiptError

    while True:
        *lines, rest = rest.split(b"\n")
        yield from lines
        if len(rest) > MAX_NBYTES:
            raise ReceiptError(f"{name} has a line of more than {MAX_NBYTES} bytes")
        more = stream.read(_PIECE_NBYTES)
        if not more:
            yield rest
            return
        rest += more
