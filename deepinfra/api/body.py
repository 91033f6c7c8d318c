"""A request's body: bytes up to a limit, then JSON under rules that keep everything behind it safe."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NoReturn

from starlette.types import Receive, Scope

from deepinfra.core.conversation import JsonValue
from deepinfra.core.digits import read_float
from deepinfra.errors import BodyTooLargeError, InvalidJsonError

__all__ = ("MAX_CONTAINERS", "MAX_DEPTH", "ClientGone", "parse_object", "read_body")

MAX_DEPTH = 64
"""Levels of nesting in a body; JSON Schemas of real tools reach about 20."""

MAX_CONTAINERS = 100_000
"""Objects and arrays in a body. 8 MB of empty ones are 2.6 million, which take seconds to read and hold every thread
up; 4096 messages of several parts, with 128 tools, are some 30,000."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string, or what begins like one: it always matches, so that no body is looked at twice."""


class ClientGone(Exception):
    """Raised when the client left before its request was complete."""


async def read_body(scope: Scope, receive: Receive, max_nbytes: int) -> bytes:
    """The whole body, counted as it arrives.

    Raises:
        BodyTooLargeError: Announced or sent more than `max_nbytes`; the rest is not read.
        ClientGone: The client left first.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_nbytes:
            raise BodyTooLargeError(max_nbytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_nbytes:
            raise BodyTooLargeError(max_nbytes)
        if not message.get("more_body", False):
            return bytes(body)


def parse_object(body: bytes) -> dict[str, JsonValue]:
    """Decode a JSON object.

    Refused besides what JSON forbids: repeated keys (readers disagree about which one counts), NaN, infinities and
    numbers that overflow to them, text that UTF-8 cannot carry (lone surrogates), nesting beyond `MAX_DEPTH`, more
    objects and arrays than `MAX_CONTAINERS`. Numbers keep their digits, see `Digits`.

    Raises:
        InvalidJsonError: Says what is wrong and where.
    """
    if _brackets(body) > MAX_CONTAINERS and _brackets(_STRING.sub(b"", body)) > MAX_CONTAINERS:
        raise InvalidJsonError(f"the body has more than {MAX_CONTAINERS} objects and arrays")
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant, parse_float=_float
        )
    except UnicodeDecodeError as error:
        raise InvalidJsonError(
            f"the body is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    except json.JSONDecodeError as error:
        raise InvalidJsonError(
            f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise InvalidJsonError(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # an integer of thousands of digits
        raise InvalidJsonError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidJsonError("the body must be a JSON object")
    _check(value)
    return value


def _brackets(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidJsonError(f"the key {key[:64]!r} appears twice in one object", key[:64])
            seen.add(key)
    return found


def _constant(name: str) -> NoReturn:
    raise InvalidJsonError(f"{name} is not JSON")


def _float(text: str) -> float:
    number = read_float(text)
    if number in (float("inf"), float("-inf")):
        raise InvalidJsonError(f"the number {text[:32]} is too large")
    return number


def _check(root: dict[str, JsonValue]) -> None:
    """Depth and surrogates, without recursion; only containers are put on the stack."""
    stack: list[tuple[JsonValue, str, int]] = [(root, "", 1)]
    while stack:
        value, path, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise InvalidJsonError(f"the body is nested deeper than {MAX_DEPTH} levels", path or None)
        items = value.items() if isinstance(value, Mapping) else enumerate(value)  # type: ignore[arg-type]
        for key, item in items:
            if type(key) is str and not key.isascii():
                _encodable(key, path)
            if type(item) is str:
                if not item.isascii():
                    _encodable(item, f"{path}.{key}" if path else str(key))
            elif type(item) is dict or type(item) is list:
                stack.append((item, f"{path}.{key}" if path else str(key), depth + 1))


def _encodable(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidJsonError(
            f"character {error.start} is half a surrogate pair, which UTF-8 cannot carry",
            path.encode("ascii", "backslashreplace").decode() or None,
        ) from None
