"""Receipts from anywhere: nothing in them is believed before it was checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from deepinfra.engine.receipts.record import VERSION, Receipt, digest_of
from deepinfra.errors import ReceiptError

__all__ = ("MAX_NBYTES", "decoded", "receipt_in", "receipt_of")

MAX_NBYTES = 64 * 2**20
"""Largest JSON that is read for one receipt: ten million tokens."""

_WRAPPERS = ("response", "body")
"""Where a response's body stands in an event of `/v1/responses`, and in most logs."""


def decoded(data: bytes) -> Any:
    """One JSON value.

    Raises:
        ReceiptError: It is none, or larger than any receipt.
    """
    if len(data) > MAX_NBYTES:
        raise ReceiptError(f"JSON of more than {MAX_NBYTES} bytes is not read")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReceiptError(f"no JSON: {error}") from None
    except RecursionError:
        raise ReceiptError("JSON that is nested too deeply is not read") from None


def receipt_in(value: Any) -> Any:
    """What a JSON value has for a receipt, unchecked: itself, its `receipt`, or that of a response inside.

    Looked for in the few places where this server writes one, and nowhere where a model or a caller could.

    Returns:
        `None` if there is none.
    """
    for each in _bodies(value, len(_WRAPPERS)):
        if "version" in each and "requests" in each:
            return each
        told = each.get("deepinfra")
        for holder in (each, told):
            if isinstance(holder, dict) and holder.get("receipt") is not None:
                return holder["receipt"]
    return None


def _bodies(value: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Objects that may be a receipt or have one: a value and what it wraps."""
    if isinstance(value, dict):
        yield value
        for name in _WRAPPERS if depth else ():
            yield from _bodies(value.get(name), depth - 1)


def receipt_of(value: Any) -> Receipt:
    """A receipt from a JSON value.

    Raises:
        ReceiptError: Names the field that is wrong; or it is of another version, or was altered.
    """
    if not isinstance(value, dict):
        raise ReceiptError("a receipt is an object")
    version = value.get("version")
    if type(version) is not int or version != VERSION:
        told = str(version) if type(version) is int and 0 <= version < 2**31 else "no version"
        raise ReceiptError(f"'version' is {told}; this release reads version {VERSION}")
    try:
        receipt = msgspec.convert(value, Receipt)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        field = where.removesuffix("`")
        raise ReceiptError(f"{field!r}: {what[:200]}" if field else what[:200]) from None
    except RecursionError:
        raise ReceiptError("a receipt that is nested too deeply is not read") from None
    for number, asked in enumerate(receipt.requests):
        if int(asked.seed) >= 2**64:
            raise ReceiptError(f"'requests[{number}].seed' is 2^64 or more")
        for choice, answer in enumerate(asked.answers):
            if len(answer.tokens) > asked.max_tokens:
                raise ReceiptError(
                    f"'requests[{number}].answers[{choice}].tokens' are {len(answer.tokens)}, more than 'max_tokens' "
                    f"{asked.max_tokens}"
                )
    if receipt.digest != digest_of(receipt):
        raise ReceiptError("'digest' is not that of the receipt: it was altered, or something of it was lost")
    return receipt
