from __future__ import annotations

import pytest

from deepinfra.bench.simulate.plan.models import MODELS, model_named
from deepinfra.bench.simulate.plan.shape import ModelShape, transformer
from deepinfra.errors import ConfigError

MIB = 1 << 20


def read(model: ModelShape, context: int) -> float:
    return model.read_nbytes + context * model.read_token_nbytes


def attend(model: ModelShape, context: int) -> float:
    return model.attend_flops + context * model.attend_token_flops


def whole(model: ModelShape) -> float:
    """Parameters of all layers, with the table of embeddings if it is not the output layer."""
    return model.decode_params + model.experts * model.expert_params * model.expert_layers + model.embed_nbytes / 2


def test_v41_multiplies_reads_and_keeps_what_was_counted_in_its_checkpoint() -> None:
    """Others counted it from the released files (community inference profile, 2026-09-19)."""
    model = MODELS["deepseek-v4.1-flash"]
    assert model.active_prompt == pytest.approx(7.89e9, rel=0.01)
    assert model.active_decode == pytest.approx(16.13e9, rel=0.01)
    assert model.stored_nbytes == 890
    for context, mib, gflop in ((8192, 13.7, 3.9), (131_072, 33.6, 6.4), (1_048_576, 182, 25.2)):
        assert read(model, context) / MIB == pytest.approx(mib, rel=0.01)
        assert attend(model, context) / 1e9 == pytest.approx(gflop, rel=0.01)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("deepseek-v3", 671.0e9),
        ("llama-70b", 70_553_706_496),
        ("llama-8b", 8_030_261_248),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_a_model_has_as_many_parameters_as_its_makers_say(name: str, parameters: float) -> None:
    assert whole(MODELS[name]) == pytest.approx(parameters, rel=0.002)


def test_v3_has_37_billion_active_and_latent_kv() -> None:
    model = MODELS["deepseek-v3"]
    assert model.active_decode == pytest.approx(37e9, rel=0.02)
    assert model.stored_nbytes == 61 * 576 * 2


@pytest.mark.parametrize("wrong", [{"experts": 8}, {"experts": 2, "top_k": 4, "expert_ffn": 64}, {"top_k": 2}])
def test_experts_that_do_not_add_up_are_refused(wrong: dict[str, int]) -> None:
    shape = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 100}
    with pytest.raises(ConfigError, match=r"model\.mine: experts, top_k and expert_ffn go together"):
        transformer(name="mine", source="test", **(shape | wrong))


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model: none is named 'gpt'; known: deepseek-v4.1-flash, "):
        model_named("gpt")
