"""Records in one file: what was written is read, and nothing else is."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.kv import Retention
from deepinfra.errors import ConfigError
from deepinfra.kvstores.portable import Portable, PortableWriter, read_portable
from deepinfra.testing.kvrecords import chain

RECORDS = [
    Portable(record, created, created + 60.0)
    for created, record in enumerate(
        [
            *chain(*range(8), tenant="a", model="m", nbytes=300),
            *chain(*range(4), tenant="ü", kind="snapshot", nbytes=50, retention=Retention(traffic="agent")),
            *chain(1, 2, tenant="", model="", nbytes=1, retention=Retention(traffic="chat")),
        ]
    )
]


def written(records: list[Portable]) -> bytes:
    file = io.BytesIO()
    writer = PortableWriter(file)
    for each in records:
        assert writer.add(each)
    writer.end()
    return file.getvalue()


def read(data: bytes) -> tuple[list[Portable], str]:
    """Records up to the first wrong one, and what is wrong."""
    found: list[Portable] = []
    try:
        found.extend(read_portable(io.BytesIO(data)))
    except ConfigError as error:
        return found, str(error)
    return found, ""


FILE = written(RECORDS)


def test_what_was_written_is_read() -> None:
    assert read(FILE) == (RECORDS, "")


def test_a_file_without_records_is_whole() -> None:
    assert read(written([])) == ([], "")


@given(st.integers(0, len(FILE) - 1))
def test_a_cut_file_gives_its_whole_records_and_an_error(length: int) -> None:
    found, why = read(FILE[:length])
    assert found == RECORDS[: len(found)]
    assert "cut" in why or "short" in why


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
def test_a_flipped_byte_never_becomes_a_record(place: int, flip: int) -> None:
    data = bytearray(FILE)
    data[place] ^= flip
    found, why = read(bytes(data))
    assert found == RECORDS[: len(found)]
    assert why


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    assert read(data)[0] == []
    assert read(FILE[:20] + data)[0] == []
    assert read(FILE[:20] + data)[1]


@pytest.mark.parametrize(
    ("created", "expires"), [(0.0, 1e12), (5.0, 4.0), (-1.0, 4.0), (float("nan"), 4.0), (0.0, float("inf"))]
)
def test_a_life_that_makes_no_sense_is_refused(created: float, expires: float) -> None:
    found, why = read(written([RECORDS[0], RECORDS[1]._replace(created=created, expires=expires)]))
    assert found == RECORDS[:1]
    assert "makes no sense" in why


def test_another_version_is_named() -> None:
    assert "version 2" in read(FILE[:16] + b"\2" + FILE[17:])[1]


def test_a_record_that_is_too_large_is_left_out() -> None:
    long = replace(RECORDS[0].record, tokens=tuple(range(2 << 20)))
    writer = PortableWriter(io.BytesIO())
    assert not writer.add(RECORDS[0]._replace(record=long))
    assert writer.records == 0
