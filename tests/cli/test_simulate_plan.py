from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepinfra.cli.simulate import simulate

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "plan.md"
TRACE = Path(__file__).parents[1] / "data" / "traces" / "mooncake_synthetic.jsonl.xz"
QUICK = ("--batch", "16", "--model", "llama-8b", "--device", "h100", "--context", "1k")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(simulate, ("plan", *arguments))


def paths(value: object, prefix: str = "") -> set[str]:
    """Dotted names of all fields of an object."""
    if isinstance(value, list):
        return set().union(*(paths(each, f"{prefix}[]") for each in value[:1]))
    if not isinstance(value, dict) or prefix.endswith((".less", ".more")):
        return {prefix}
    return set().union(*(paths(each, f"{prefix}.{name}" if prefix else name) for name, each in value.items()))


def test_a_plan_fits_on_a_screen() -> None:
    lines = run().stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert any(re.match(r"output tokens/s per decode device +[\d,]+ +14,000 +[+-]\d+%$", line) for line in lines)


def test_every_field_of_the_json_is_documented_and_no_other() -> None:
    result = run(*QUICK, "--hit-rate", "0.5", "--check", "10", "--sensitivity", "--json", "-")
    compared = json.loads(run("--json", "-").stdout)["compared"]
    found = paths({**json.loads(result.stdout), "compared": compared})
    documented = set(re.findall(r"`([\w.\[\]]+)`", REFERENCE.read_text().partition("|---|---|")[2]))
    assert found <= documented
    assert {name for name in documented if "." in name} <= found


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    result = run("--html", str(path))
    assert result.exit_code == 0
    text = path.read_text()
    page = ET.fromstring(text.partition("\n")[2])
    assert len(page.findall(".//polyline")) >= 6
    assert not re.search(r"(src|href)=|url\(|@import", text)


def test_lengths_come_from_a_trace() -> None:
    assert "prompts of 15,325, answers of 149, contexts of 7,292 tokens" in run("--trace", str(TRACE)).stdout


def test_every_input_is_printed_with_its_source() -> None:
    lines = run("--fleet", "deepseek-2025", "--inputs").stdout.splitlines()
    assert any(re.match(r"traffic\.hit_rate +0\.563 +deepseek-ai/open-infra-index", line) for line in lines)
    assert any(re.match(r"efficiency\.products +0\.78 +1550 of 1979 TFLOPS", line) for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "abacus"), "device: none is named 'abacus'; known: h100, "),
        (("--model", "m"), "model: none is named 'm'; known: "),
        (("--fleet", "mine"), "fleet: none is named 'mine'; known: "),
        (("--hit-rate", "1.5"), "traffic.hit_rate: 1.5 must be at least 0 and at most 1"),
        (("--tokens-per-day", "lots"), "--tokens-per-day: 'lots' is no number like"),
        (("--user-speed", "1e9"), "user_speed: 1e+09 tokens per second are more than"),
        (("--file", "nowhere.toml"), "nowhere.toml: cannot be read: "),
        (("--html", "nowhere/plan.html"), "nowhere/plan.html: cannot be written: "),
        (("--price", "-1"), "prefill.usd_hour: -1 must be at least 0"),
        (("--batch", "0"), "--batch"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert words in str(result.exception) + result.output
