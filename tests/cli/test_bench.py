from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepinfra.bench.kv import KVReport
from deepinfra.bench.kvrestore import RestoreReport
from deepinfra.bench.load import LoadReport
from deepinfra.bench.offline import OfflineReport
from deepinfra.bench.recipe import RecipeReport
from deepinfra.cli.bench import bench

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "bench.md"


def run(*arguments: str) -> typing.Any:
    return CliRunner().invoke(bench, arguments)


def paths(kind: type, prefix: str = "") -> list[str]:
    """Dotted names of all fields of a report."""
    found = []
    for name, hint in typing.get_type_hints(kind).items():
        found.append(f"{prefix}{name}")
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                found += paths(
                    part, f"{prefix}{name}{'[]' if hint is not part and not isinstance(hint, types.UnionType) else ''}."
                )
    return found


@pytest.mark.parametrize("report", [OfflineReport, LoadReport, RecipeReport, KVReport, RestoreReport])
def test_every_field_of_the_json_is_documented(report: type) -> None:
    documented = set(re.findall(r"`([\w.\[\]]+)`", REFERENCE.read_text()))
    assert not set(paths(report)) - documented


@pytest.mark.parametrize("batch", ["", "1,,2", "1,x", "0", "-1"])
def test_a_batch_that_is_no_number_is_refused(batch: str) -> None:
    result = run("offline", "--batch", batch)
    assert result.exit_code == 1
    assert "takes numbers of sequences like 1,8,32" in str(result.exception)


def test_an_unknown_peer_is_refused_by_name() -> None:
    result = run("offline", "--peer", "vllm")
    assert "no peer is named 'vllm'; known: transformers" in str(result.exception)


def test_nobody_at_the_address_is_an_error() -> None:
    assert isinstance(run("serve", "--url", "http://127.0.0.1:1/v1").exception, OSError)


def test_a_recipe_is_measured_beside_plain_tokenisation(smollm2_path: Path) -> None:
    options = ("recipe", "--model", str(smollm2_path), "--chars", "2000", "--turn", "100", "--repeat", "2")
    report = json.loads(run(*options, "--json").stdout.splitlines()[-1])
    assert report["recipe"] == "ChatTemplate"
    first, following, feed = report["figures"]
    assert first["ratio"] == first["ours"] / first["plain"]
    assert (following["name"], len(following["values"])) == ("next", 10)
    assert (feed["plain"], feed["ours"] > 0) == (None, True)
    assert "plain tokenisation" in run(*options).stdout


def test_the_disk_cache_is_measured_beside_plain_calls(tmp_path: Path) -> None:
    sizes = ("--records", "150", "--nbytes", "50000", "--repeat", "1")
    done = run("kv", "--path", str(tmp_path), *sizes, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["kind"] == "kv"
    assert (report["open"]["records"], report["open"]["hits"]) == (150, report["open"]["asked"])
    assert [figure["name"] for figure in report["figures"]] == ["save", "warm", "cold"]
    assert all(figure["ours"] > 0 < figure["ratio"] for figure in report["figures"])
    assert list(tmp_path.iterdir()) == []
    assert "plain" in run("kv", "--path", str(tmp_path), *sizes).stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_restored_prefix_gives_its_token_ten_times_sooner(tmp_path: Path) -> None:
    done = run("restore", "--path", str(tmp_path), "--repeat", "1", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["kind"], report["run"]["prefix"]) == ("restore", 2000)
    assert [figure["name"] for figure in report["figures"]] == ["cold", "warm"]
    assert all(figure["ratio"] >= 10 for figure in report["figures"])
