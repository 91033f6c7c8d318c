from __future__ import annotations

from pathlib import Path

import pytest

from deepinfra.bench.simulate.plan.asked import Asked, layout_for, tokens_of
from deepinfra.bench.simulate.plan.devices import DEVICES
from deepinfra.bench.simulate.plan.fleets import FLEETS
from deepinfra.bench.simulate.plan.models import MODELS
from deepinfra.errors import ConfigError

FILE = """
[device.mine]
fp4_flops = 1e15
fp8_flops = 1e15
bf16_flops = 5e14
memory_nbytes = 96e9
memory_bytes_s = 4e12
link_bytes_s = 1e11
domain = 8
usd_hour = 3

[model.small]
source = "its makers"
layers = 24
hidden = 2048
heads = 16
kv_heads = 4
head_dim = 128
ffn = 5632
vocab = 32000
tied = true

[traffic]
tokens_day = 1e12
hit_rate = 0.5

[efficiency]
products = 0.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(FILE)
    return path


def test_nothing_asked_for_is_the_known_fleet() -> None:
    assert Asked().assembled() == FLEETS["deepseek-2026"]


def test_a_file_defines_devices_and_models_and_changes_figures(file: Path) -> None:
    fleet = Asked(path=file, prefill="mine", decode="mine", model="small").assembled()
    assert (fleet.decode.name, fleet.model.name, fleet.model.layers, fleet.decode.usd_hour) == ("mine", "small", 24, 3)
    assert (fleet.traffic.hit_rate, fleet.efficiency.products, fleet.efficiency.memory) == (0.5, 0.5, 0.9)
    sources = {given.name: given.source for given in fleet.givens()}
    assert sources["model.layers"] == "its makers"
    assert sources["decode.fp8_flops"] == sources["traffic.hit_rate"] == str(file)
    assert sources["traffic.prompt"] == FLEETS["deepseek-2026"].traffic.source
    assert fleet.plan().usd_million > 0.0


def test_what_is_asked_for_wins_over_the_file(file: Path) -> None:
    fleet = Asked(path=file, figures={"traffic": {"hit_rate": 0.7}}).assembled()
    assert (fleet.traffic.hit_rate, fleet.traffic.tokens_day) == (0.7, 1e12)


def test_a_context_is_that_of_requests_of_one_length() -> None:
    traffic = Asked(context=10_000, figures={"traffic": {"output": 500.0}}).assembled().traffic
    assert (traffic.prompt, traffic.position, traffic.context, traffic.output) == (9750.0, 4875.0, 10_000, 500.0)


def test_a_price_makes_tokens_cost() -> None:
    fleet = Asked(price=4.0, figures={"service": {"batch": 40}}).assembled()
    plan, traffic = fleet.plan(), fleet.traffic
    assert plan.usd_million == pytest.approx(plan.devices * 4.0 * 24 / (traffic.requests_day * traffic.output / 1e6))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[traffic]\nhit = 1", r"traffic\.hit: unknown; known: source, tokens_day, "),
        ("[traffic]\nhit_rate = 2", r"traffic\.hit_rate: 2 must be at least 0 and at most 1"),
        ("[traffic]\nhit_rate = 'x'", r"traffic\.hit_rate: 'x' must be a number"),
        ("[traffic]\nhit_rate = true", r"traffic\.hit_rate: True must be a number"),
        ("[decode_layout]\nwidth = 1.5", r"decode_layout\.width: 1\.5 must be a whole number"),
        ("[other]\na = 1", r"other is no table of a plan; known: device, model, traffic, "),
        ("traffic = 1", r"traffic: 1 must be a table"),
        (
            "[device.mine]\nfp8_flops = 1e15",
            r"device\.mine: fp4_flops, bf16_flops, memory_nbytes, memory_bytes_s missing",
        ),
        (FILE.replace("memory_nbytes = 96e9", "memory_nbytes = 0"), r"device\.mine\.memory_nbytes: 0 must be above 0"),
        (FILE.replace("vocab = 32000", ""), r"model\.small: vocab missing"),
        (FILE.replace("tied = true", "tied = 1"), r"model\.small\.tied: 1 must be true or false"),
        (
            FILE.replace("tied = true", "precision = 'int3'"),
            r"model\.small\.precision: 'int3' is none of fp4, fp8, bf16",
        ),
        ("[model", "plan.toml: cannot be read: "),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        Asked(path=path).assembled()


def test_a_context_shorter_than_its_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"context: 100 is too short for answers of 342\.62 tokens"):
        Asked(context=100).assembled()


@pytest.mark.parametrize(
    ("text", "number"), [("155T", 155e12), ("12k", 12e3), ("4096", 4096.0), ("1.5G", 1.5e9), ("10B", 1e10)]
)
def test_numbers_of_tokens_have_suffixes(text: str, number: float) -> None:
    assert tokens_of(text, "--context") == number


@pytest.mark.parametrize("text", ["", "T", "12q", "many"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--context: '.*' is no number like 4096, 12k, 10B or 155T"):
        tokens_of(text, "--context")


@pytest.mark.parametrize(
    ("device", "model", "width"),
    [
        ("h100", "llama-8b", 1),
        ("h100", "llama-70b", 2),
        ("gb200", "deepseek-v4.1-flash", 64),
        ("h100", "deepseek-v3", 32),
    ],
)
def test_a_layout_leaves_half_of_memory_to_kv(device: str, model: str, width: int) -> None:
    assert layout_for(DEVICES[device], MODELS[model]).width == width
