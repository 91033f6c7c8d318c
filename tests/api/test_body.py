from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.api.body import MAX_CONTAINERS, MAX_DEPTH, ClientGone, parse_object, read_body
from deepinfra.errors import BodyTooLargeError, InvalidJsonError

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(value=st.dictionaries(st.text(), json_values, max_size=5), ascii_only=st.booleans())
def test_every_json_object_is_read_as_it_was_written(value: dict[str, Any], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize("kind", [b"[]", b"{}", b'{"a":"]"}'])
def test_too_many_objects_and_arrays_are_refused_before_they_are_read(kind: bytes) -> None:
    def holding(count: int) -> bytes:
        return b'{"a":[' + b",".join([kind] * (count - 2)) + b"]}"

    assert parse_object(holding(MAX_CONTAINERS))
    with pytest.raises(InvalidJsonError, match=f"more than {MAX_CONTAINERS} objects and arrays"):
        parse_object(holding(MAX_CONTAINERS + 1))


def test_brackets_in_text_are_no_objects_and_arrays() -> None:
    text = '[{"\\"}]' * MAX_CONTAINERS
    assert parse_object(json.dumps({"a": text}).encode()) == {"a": text}


@pytest.mark.parametrize("tail", [b"", b"\\", b'"', b'"}'])
def test_a_string_that_never_ends_costs_no_more_than_its_length(tail: bytes) -> None:
    begun = time.perf_counter()
    with suppress(InvalidJsonError):
        parse_object(b'{"a":"' + b'\\"[{' * 500_000 + tail)
    assert time.perf_counter() - begun < 5  # in quadratic time it would be hours


@given(junk=st.binary(max_size=60))
def test_junk_is_an_object_or_a_refusal(junk: bytes) -> None:
    with suppress(InvalidJsonError):
        assert isinstance(parse_object(junk), dict)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"{", "line 1 column 2"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8: byte 7 is 0xff"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "'b' appears twice"),
        (rb'{"a": {"b": ["\ud83d"]}}', "surrogate"),
        (rb'{"\udc00": 1}', "surrogate"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested deeper"),
        (b'{"a":' + b"[" * 90_000, "nested deeper"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_what_no_reader_agrees_on_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(InvalidJsonError, match=says.replace("(", "\\(")):
        parse_object(body)


def test_the_path_of_a_lone_surrogate_is_named() -> None:
    with pytest.raises(InvalidJsonError) as caught:
        parse_object(rb'{"messages": [{"content": "ok"}, {"content": "\ud83d!"}]}')
    assert caught.value.param == "messages.1.content"


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_object(rb'{"a": "\ud83d\ude00"}') == {"a": "😀"}


def test_the_deepest_allowed_nesting_is_allowed() -> None:
    depth = MAX_DEPTH - 1
    assert "a" in parse_object(b'{"a":' + b"[" * depth + b"]" * depth + b"}")


class Wire:
    """Plays a server: messages in order, counting how many were taken."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages, self.taken = list(messages), 0

    async def receive(self) -> dict[str, Any]:
        self.taken += 1
        return self.messages.pop(0)


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_is_joined_from_its_parts() -> None:
    wire = Wire(part(b"ab"), part(b""), part(b"c", more=False))
    assert await read_body({"headers": []}, wire.receive, 3) == b"abc"


async def test_an_announced_length_above_the_limit_is_refused_unread() -> None:
    wire = Wire(part(b"abcd", more=False))
    with pytest.raises(BodyTooLargeError):
        await read_body({"headers": [(b"content-length", b"4")]}, wire.receive, 3)
    assert wire.taken == 0


async def test_a_body_without_length_is_counted_as_it_comes() -> None:
    wire = Wire(part(b"ab"), part(b"cd"), part(b"ef", more=False))
    with pytest.raises(BodyTooLargeError):
        await read_body({"headers": []}, wire.receive, 3)
    assert wire.taken == 2


async def test_a_client_that_leaves_before_its_body_is_complete_is_gone() -> None:
    wire = Wire(part(b"ab"), {"type": "http.disconnect"})
    with pytest.raises(ClientGone):
        await read_body({"headers": []}, wire.receive, 100)
