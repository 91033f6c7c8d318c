from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models import open_model


def permuted(weights: Any, heads: int) -> Any:
    """What convert_hf_to_gguf.py does to the q and k projections of a llama model."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def test_tensors_have_their_hugging_face_names(tiny: Any) -> None:
    names = set(open_model(str(tiny.gguf())).tensors.names())
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= names
    assert len(names) == 11


@pytest.mark.parametrize("dtype", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize(("name", "part", "rows", "heads"), [("q_proj", "attn_q", 64, 2), ("k_proj", "attn_k", 32, 1)])
def test_rows_of_q_and_k_come_back_in_hugging_face_order(
    tiny: Any, dtype: str, name: str, part: str, rows: int, heads: int
) -> None:
    weights = np.random.default_rng(1).standard_normal((rows, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[dtype]
    plain, stored = (gguf.quants.quantize(each, kind) for each in (weights, permuted(weights, heads)))
    row = (f"blk.0.{part}.weight", (rows, 64), dtype, stored.tobytes())
    tensors = open_model(str(tiny.gguf(without=[row[0]], extra=[row]))).tensors
    full = f"model.layers.0.self_attn.{name}.weight"
    assert bytes(tensors.raw(full)) == plain.tobytes()
    assert np.array_equal(tensors.read(full), gguf.quants.dequantize(plain, kind))
    assert tensors.info(full).dtype == dtype
    assert tensors.info(full).shape == (rows, 64)
    assert len(tensors.raw(full)) == tensors.info(full).nbytes


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_rows_of_qwen_models_stay_as_they_are(tiny: Any, arch: str) -> None:
    stored = {name: data for name, _, _, data in tiny.tensors(arch)}
    tensors = open_model(str(tiny.gguf(arch=arch))).tensors
    assert bytes(tensors.raw("model.layers.0.self_attn.q_proj.weight")) == stored["blk.0.attn_q.weight"]


def test_biases_of_q_and_k_are_reordered_with_their_rows(tiny: Any) -> None:
    bias = np.arange(64, dtype="<f4")
    extra = [
        ("blk.0.attn_q.bias", (64,), "F32", permuted(bias, 2).tobytes()),
        ("blk.0.attn_k.bias", (32,), "F32", bytes(128)),
        ("blk.0.attn_v.bias", (32,), "F32", bytes(128)),
        ("blk.0.attn_output.bias", (64,), "F32", bytes(256)),
    ]
    tensors = open_model(str(tiny.gguf(extra=extra))).tensors
    assert np.array_equal(tensors.read("model.layers.0.self_attn.q_proj.bias"), bias)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_is_read_as_float32(tiny: Any, dtype: str) -> None:
    values = np.array([1.0, -2.5, 0.15625] + [0.0] * 61, np.float32)
    half = values.astype("<f2") if dtype == "F16" else (values.view(np.uint32) >> 16).astype("<u2")
    row = ("output_norm.weight", (64,), dtype, half.tobytes())
    tensors = open_model(str(tiny.gguf(without=[row[0]], extra=[row]))).tensors
    read = tensors.read("model.norm.weight")
    assert read.dtype == np.float32
    assert np.array_equal(read, values)


def test_a_missing_tensor_is_named(tiny: Any) -> None:
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        open_model(str(tiny.gguf(without=["blk.0.ffn_up.weight"])))


@pytest.mark.parametrize("name", ["blk.0.attn_qkv.weight", "blk.1.attn_q.weight", "blk.0.attn_q_norm.weight", "v.proj"])
def test_a_tensor_without_a_place_is_named(tiny: Any, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name.replace(".", r"\.")):
        open_model(str(tiny.gguf(extra=[(name, (8,), "F32", bytes(32))])))


def test_a_tensor_of_the_wrong_shape_is_named(tiny: Any) -> None:
    row = ("blk.0.attn_k.weight", (16, 64), "F32", bytes(4096))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k\.weight"):
        open_model(str(tiny.gguf(without=[row[0]], extra=[row])))


def test_asking_for_an_unknown_tensor_is_an_error(tiny: Any) -> None:
    with pytest.raises(ModelError, match="nothing"):
        open_model(str(tiny.gguf())).tensors.info("nothing")


def test_smollm2_decodes_as_the_gguf_package_does(smollm2_path: Any) -> None:
    tensors = open_model(str(smollm2_path)).tensors
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_path).tensors}
    up, q = stored["blk.7.ffn_up.weight"], stored["blk.7.attn_q.weight"]
    assert np.array_equal(
        tensors.read("model.layers.7.mlp.up_proj.weight"), gguf.quants.dequantize(up.data, up.tensor_type)
    )
    read = tensors.read("model.layers.7.self_attn.q_proj.weight")
    assert np.array_equal(permuted(read, 9), gguf.quants.dequantize(q.data, q.tensor_type))
