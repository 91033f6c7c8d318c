from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from deepinfra.errors import ModelError
from deepinfra.models import open_model
from deepinfra.models.gguf_file import open_gguf


def test_metadata_comes_back_as_it_was_written(tiny: Any) -> None:
    path = tiny.folder / "m.gguf"
    values = {"a": 7, "b": -3, "c": 0.5, "d": True, "e": "text ▁", "f": [1, 2], "g": ["x", ""], "h": [[1], [2, 3]]}
    path.write_bytes(tiny.gguf_bytes(values))
    assert open_gguf(path).metadata == values


def test_shapes_are_row_major_and_bytes_are_the_tensors_own(tiny: Any) -> None:
    path = tiny.folder / "m.gguf"
    path.write_bytes(
        tiny.gguf_bytes({}, [("one", (2, 3), "F32", bytes(range(24))), ("two", (1, 32), "Q8_0", bytes(34))])
    )
    file = open_gguf(path)
    one, two = file.tensors["one"], file.tensors["two"]
    assert (one.shape, two.shape, two.nbytes) == ((2, 3), (1, 32), 34)
    assert bytes(file.data[one.start : one.start + one.nbytes]) == bytes(range(24))


def test_writing_to_a_mapped_file_does_not_change_it(tiny: Any) -> None:
    path = tiny.gguf()
    before = path.read_bytes()
    tensors = open_model(str(path)).tensors
    tensors.raw("model.norm.weight")[:4] = b"abcd"
    assert path.read_bytes() == before
    assert bytes(tensors.raw("model.norm.weight")[:4]) == b"abcd"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"GGU", "not a GGUF"),
        (b"PK\3\4" + bytes(100), "not a GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "string claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**61), "array claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 10, 3000) + bytes(3000), "past"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xfe" + struct.pack("<II", 4, 1), "UTF-8"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 4,
            "nested",
        ),
    ],
)
def test_a_header_that_lies_is_refused_in_one_sentence(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("t", (2**40, 2**40), "F32", b""), "cut short"),
        (("t", (4, 33), "Q8_0", bytes(999)), "blocks"),
        (("t", (0, 4), "F32", b""), "blocks"),
        (("t", (1, 1, 1, 1, 1), "F32", bytes(4)), "dimensions"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(tiny: Any, row: Any, message: str) -> None:
    path = tiny.folder / "bad.gguf"
    path.write_bytes(tiny.gguf_bytes({}, [row]))
    with pytest.raises(ModelError, match=message):
        open_gguf(path)


def test_tensors_that_overlap_are_refused(tiny: Any) -> None:
    path = tiny.folder / "bad.gguf"
    rows = [("one", (8,), "F32", bytes(32)), ("two", (8,), "F32", bytes(32))]
    whole = tiny.gguf_bytes({}, rows)
    offset = struct.pack("<IQ", 0, 32)
    assert whole.count(offset) == 1
    path.write_bytes(whole.replace(offset, struct.pack("<IQ", 0, 0)))
    with pytest.raises(ModelError, match="overlaps"):
        open_gguf(path)


def test_a_truncated_file_is_refused_wherever_it_ends(tiny: Any) -> None:
    whole = tiny.gguf().read_bytes()
    path = tiny.folder / "cut.gguf"
    for end in [*range(1, 400, 13), *range(400, len(whole) - 1, len(whole) // 40), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError):
            open_model(str(path))


def test_a_file_with_flipped_bytes_opens_or_is_refused_but_never_crashes(tiny: Any) -> None:
    whole = bytearray(tiny.gguf().read_bytes())
    header = whole.index(b"blk.0.ffn_down.weight") + 60
    path, draw = tiny.folder / "flipped.gguf", random.Random(5)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(4, header)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        path.write_bytes(data)
        try:
            model = open_model(str(path))
            model.special_tokens()
            model.tokenizer().encode("hello")
        except ModelError:
            refused += 1
    assert refused > 50
