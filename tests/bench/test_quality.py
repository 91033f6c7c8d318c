from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from deepinfra.bench.quality import QualityReport, QualityRun, manual, run_quality
from deepinfra.cli.bench import bench
from deepinfra.errors import ConfigError
from deepinfra.models import open_model

EXACT = {"dtype": "float32", "kernels": "torch"}


@pytest.fixture(scope="module")
def report(smollm2_path: Path) -> QualityReport:
    forms = {"itself": EXACT, "stored": {"weights": "stored"}}
    run = QualityRun(tokens=300, chunk=64)

    async def measure() -> QualityReport:
        return await run_quality(open_model(str(smollm2_path)), forms, run, threads=1)

    return anyio.run(measure)


def test_the_reference_differs_in_nothing_from_itself(report: QualityReport) -> None:
    itself = report.forms[0]
    assert (itself.change, itself.agreement, itself.max_error, itself.kept) == (0.0, 1.0, 0.0, True)
    assert itself.perplexity == report.perplexity
    assert report.predictions == 4 * 63


def test_a_coarser_form_is_told_from_the_reference_and_is_no_other_model(report: QualityReport) -> None:
    stored = report.forms[1]
    assert 0.0 < stored.mean_error < stored.max_error < 5.0
    assert 0.0 < abs(stored.change) < 0.05
    assert 0.9 < stored.agreement <= 1.0


def test_a_text_that_is_too_short_is_refused(smollm2_path: Path) -> None:
    async def measure() -> None:
        run = QualityRun(tokens=300, chunk=64)
        await run_quality(open_model(str(smollm2_path)), {}, run, text=("a word", "word"))

    with pytest.raises(ConfigError, match="a word has 1 tokens, fewer than the 300"):
        anyio.run(measure)


def test_less_than_a_chunk_is_refused(smollm2_path: Path) -> None:
    with pytest.raises(ConfigError, match="64 tokens are less than one chunk of 512"):
        anyio.run(run_quality, open_model(str(smollm2_path)), {}, QualityRun(tokens=64, chunk=512))


def test_the_manual_is_long_enough(smollm2_path: Path) -> None:
    assert len(open_model(str(smollm2_path)).tokenizer().encode(manual()).ids) > 50_688


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_thousand_tokens_keep_their_quality_as_stored_and_in_bfloat16(smollm2_path: Path) -> None:
    done = CliRunner().invoke(bench, ["quality", str(smollm2_path), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["predictions"] >= 50_000
    assert [form["form"] for form in report["forms"] if form["kept"]] == ["stored", "bfloat16"]
