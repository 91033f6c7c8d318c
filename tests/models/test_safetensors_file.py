from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models.safetensors_file import SafeTensors, find_shards


def source(folder: Path) -> SafeTensors:
    return SafeTensors(folder, find_shards(folder))


def with_header(path: Path, header: object, body: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.parametrize(
    ("dtype", "stored", "values"),
    [
        ("F32", np.array([1.5, -2.0], "<f4"), [1.5, -2.0]),
        ("F16", np.array([1.5, -2.0], "<f2"), [1.5, -2.0]),
        ("BF16", np.array([0x3FC0, 0xC000], "<u2"), [1.5, -2.0]),
        ("F64", np.array([1.5, -2.0], "<f8"), [1.5, -2.0]),
        ("I8", np.array([7, -2], "i1"), [7.0, -2.0]),
        ("U8", np.array([7, 200], "u1"), [7.0, 200.0]),
    ],
)
def test_every_plain_type_is_read_as_float32(tiny: Any, dtype: str, stored: Any, values: list[float]) -> None:
    tiny.safetensors(tiny.folder / "model.safetensors", {"t": (dtype, (1, 2), stored.tobytes())})
    tensors = source(tiny.folder)
    info = tensors.info("t")
    assert (info.dtype, info.shape, info.nbytes) == (dtype, (1, 2), stored.nbytes)
    assert bytes(tensors.raw("t")) == stored.tobytes()
    read = tensors.read("t")
    assert read.dtype == np.float32
    assert read.tolist() == [values]


def test_the_package_that_defines_the_format_writes_what_is_read(tiny: Any) -> None:
    from safetensors.numpy import save_file

    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    save_file({"a": values, "b": values[:1] + 1}, tiny.folder / "model.safetensors")
    tensors = source(tiny.folder)
    assert set(tensors.names()) == {"a", "b"}
    assert np.array_equal(tensors.read("a"), values)
    assert np.array_equal(tensors.read("b"), values[:1] + 1)


def test_eight_bit_floats_are_given_raw_and_not_guessed_at(tiny: Any) -> None:
    tiny.safetensors(tiny.folder / "model.safetensors", {"t": ("F8_E4M3", (2, 2), b"abcd")})
    tensors = source(tiny.folder)
    assert bytes(tensors.raw("t")) == b"abcd"
    with pytest.raises(UnsupportedModelError, match="F8_E4M3"):
        tensors.read("t")


def test_shards_make_one_model(tiny: Any) -> None:
    whole, parts = source(tiny.hf_folder("whole")), source(tiny.hf_folder("parts", shards=3))
    assert sorted(whole.names()) == sorted(parts.names())
    for name in whole.names():
        assert np.array_equal(whole.read(name), parts.read(name))


def test_a_missing_shard_is_named(tiny: Any) -> None:
    folder = tiny.hf_folder(shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        source(folder)


def test_a_tensor_that_its_shard_does_not_hold_is_named(tiny: Any) -> None:
    folder = tiny.hf_folder(shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["extra.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"does not hold extra\.weight"):
        source(folder)


def test_a_tensor_in_two_shards_is_refused(tiny: Any) -> None:
    folder = tiny.hf_folder(shards=2)
    (folder / "model-00002-of-00002.safetensors").write_bytes(
        (folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    with pytest.raises(ModelError, match="two of its files"):
        source(folder)


@pytest.mark.parametrize("index", ["[]", "{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_a_damaged_index_is_refused(tiny: Any, index: str) -> None:
    folder = tiny.hf_folder(shards=2)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="damaged"):
        source(folder)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "weights.bin"])
def test_an_index_cannot_point_out_of_its_folder(tiny: Any, shard: str) -> None:
    folder = tiny.hf_folder(shards=2)
    tiny.json(folder / "model.safetensors.index.json", {"weight_map": {"a": shard}})
    with pytest.raises(ModelError, match="damaged"):
        source(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "weights.ckpt"])
def test_pickled_weights_are_refused_by_name(tiny: Any, name: str) -> None:
    (tiny.folder / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModelError, match=name):
        find_shards(tiny.folder)


def test_a_folder_without_weights_says_so(tiny: Any) -> None:
    with pytest.raises(ModelError, match="holds no weights"):
        find_shards(tiny.folder)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b"not json", b""),
        (b"\xff\xfe", b""),
        (b"[]", b""),
        ({"t": 3}, b""),
        ({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(8)),
        ({"t": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(8)),
        ({"t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(8)),
        ({"t": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(8)),
        ({"t": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, bytes(8)),
        ({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, bytes(8)),
        ({"t": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}, bytes(8)),
        ({"t": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 2**66]}}, bytes(8)),
        ({"t": {"dtype": "F4", "shape": [1], "data_offsets": [0, 0]}}, bytes(8)),
        (
            {
                "t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "u": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
            },
            bytes(8),
        ),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object, body: bytes) -> None:
    with_header(tmp_path / "model.safetensors", header, body)
    with pytest.raises(ModelError, match=r"damaged|cut short"):
        source(tmp_path)


def test_a_header_length_that_lies_costs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(ModelError, match="claims a header"):
        source(tmp_path)


def test_an_unknown_type_is_refused_by_name(tmp_path: Path) -> None:
    with_header(tmp_path / "model.safetensors", {"t": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8))
    with pytest.raises(UnsupportedModelError, match="C64"):
        source(tmp_path)


def test_a_truncated_file_is_refused_wherever_it_ends(tiny: Any) -> None:
    path = tiny.hf_folder() / "model.safetensors"
    whole = path.read_bytes()
    for end in range(0, len(whole), 17):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError):
            source(path.parent)


def test_flipped_bytes_never_crash_the_reader(tiny: Any) -> None:
    path = tiny.hf_folder() / "model.safetensors"
    whole, draw = path.read_bytes(), random.Random(9)
    for _ in range(300):
        data = bytearray(whole)
        data[draw.randrange(len(data) - 60)] = draw.randrange(256)
        path.write_bytes(data)
        try:
            tensors = source(path.parent)
            for name in tensors.names():
                tensors.read(name)
        except ModelError:
            pass
