from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from deepinfra.bench.invariance import Divergence, InvarianceReport, InvarianceRun, ModeReport
from deepinfra.cli import app
from deepinfra.cli.verify_invariance import _print

FEW = ("--prompts", "2", "--batch", "2", "--new", "3")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify-invariance", *arguments], obj={})


def test_a_mode_that_never_differed_exits_with_0(smollm2_path: Path) -> None:
    result = run(str(smollm2_path), *FEW, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["kept"]
    assert (report["invariant"]["prompts"], report["invariant"]["logprobs"]) == (2, 0)
    assert report["ordinary"]["about"]["kernels"].startswith("torch")
    assert report["invariant"]["about"]["numerics"].startswith("batch-invariant")


def test_without_such_a_mode_the_reason_is_said_and_it_exits_with_1(smollm2_path: Path, tmp_path: Path) -> None:
    config = tmp_path / "deepinfra.toml"
    config.write_text('[pool.executor]\nkernels = "torch"\n')
    result = run(str(smollm2_path), *FEW, "--config", str(config))
    assert result.exit_code == 1
    assert "invariant: " in result.stdout
    assert "batch_invariant cannot be kept with kernels = torch" in result.stdout
    assert "Batch invariance cannot be verified" in result.stdout


def test_both_texts_stand_side_by_side_with_the_tokens_marked(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    first = Divergence(
        prompt=4,
        question="Why?",
        at=3,
        common="It is so",
        alone=(" because", " the sea is deep and cold."),
        batched=(" as", " far as I know.\nOr not."),
        apart=0.25,
    )
    ordinary = ModeReport(name="ordinary", about={"kernels": "torch: so"}, prompts=8, texts=1, logprobs=8, first=first)
    invariant = ModeReport(name="invariant", prompts=8, logprobs=1)
    _print(
        InvarianceReport(
            kind="verify-invariance",
            model="m",
            run=InvarianceRun(),
            ordinary=ordinary,
            invariant=invariant,
            kept=False,
        )
    )
    lines = capsys.readouterr().out.splitlines()
    assert "ordinary (torch): of 8 prompts 1 gave another text, 8 other log-probabilities" in lines
    assert "they part at token 3: alone, its log-probability was 0.25 above the next one's" in lines
    assert "It is so⟦ because⟧ the sea   | It is so⟦ as⟧ far as I know." in lines
    assert "is deep and cold.            | Or not." in lines
    assert any(line.endswith("another text: none found") for line in lines)
    assert "The batch-invariant mode DIFFERED: that is a bug of deepinfra." in lines
