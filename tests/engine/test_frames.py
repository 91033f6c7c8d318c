from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.engine.frames import frame_is_good, write_frame

KEY, OTHER = BlockKey(b"k" * 32), BlockKey(b"o" * 32)


def framed(payload: bytes) -> bytearray:
    record = bytearray(FRAME_NBYTES) + payload
    write_frame(memoryview(record), KEY)
    return record


def test_a_framed_record_is_good_under_its_own_key_only() -> None:
    record = memoryview(framed(b"payload"))
    assert frame_is_good(record, KEY)
    assert not frame_is_good(record, OTHER)
    assert not frame_is_good(record, KEY, "snapshot")


@given(st.binary(min_size=1, max_size=64), st.data())
def test_any_flipped_bit_that_matters_is_seen(payload: bytes, data: st.DataObject) -> None:
    record = framed(payload)
    # Bytes 72 to 127 are padding: they say nothing, so flipping them loses nothing.
    position = data.draw(st.one_of(st.integers(0, 71), st.integers(FRAME_NBYTES, len(record) - 1)))
    record[position] ^= 1 << data.draw(st.integers(0, 7))
    assert not frame_is_good(memoryview(record), KEY)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 200))
def test_a_truncated_record_is_no_record(payload: bytes, keep: int) -> None:
    record = framed(payload)
    if keep < len(record):
        assert not frame_is_good(memoryview(record)[:keep], KEY)
