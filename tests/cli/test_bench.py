from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepinfra.bench.cache import CacheReport
from deepinfra.bench.compare.run import CompareReport
from deepinfra.bench.compare.serve import ServeReport
from deepinfra.bench.kv import KVReport
from deepinfra.bench.kvrestore import RestoreReport
from deepinfra.bench.load import LoadReport
from deepinfra.bench.offline import OfflineReport
from deepinfra.bench.overload import OverloadReport
from deepinfra.bench.quality import QualityReport
from deepinfra.bench.recipe import RecipeReport
from deepinfra.bench.roofline import RooflineReport
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


@pytest.mark.parametrize(
    "report",
    [
        *(OfflineReport, LoadReport, RecipeReport, KVReport, CacheReport, RestoreReport, OverloadReport),
        *(CompareReport, ServeReport, QualityReport, RooflineReport),
    ],
)
def test_every_field_of_the_json_is_documented(report: type) -> None:
    documented = set(re.findall(r"`([\w.\[\]]+)`", REFERENCE.read_text()))
    assert not set(paths(report)) - documented


@pytest.mark.parametrize("batch", ["", "1,,2", "1,x", "0", "-1"])
def test_a_batch_that_is_no_number_is_refused(batch: str) -> None:
    result = run("offline", "--batch", batch)
    assert result.exit_code == 1
    assert "--batch takes numbers like 1,8,32" in str(result.exception)


def test_what_a_started_server_is_told_is_refused_for_a_running_one() -> None:
    result = run("overload", "--url", "http://127.0.0.1:1/v1", "--max-queue", "4")
    assert "--max-queue and --config are for a server that is started here" in str(result.exception)
    assert "takes numbers of clients like 16,64" in str(run("overload", "--concurrency", "1,x").exception)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--ours", "fast"), "no form of ours is named 'fast'; known: stored, bfloat16, float32, torch"),
        (("--ours", "stored+odd"), "no form of ours is named 'stored+odd'"),
        (
            ("--llama-cpp", sys.executable, "--llama-forms", "q9"),
            "no format of llama.cpp is named 'q9'; known: shipped",
        ),
        (("--prefill", "x"), "--prefill takes numbers like 1,8,32"),
        (("--ours", ""), "--ours names nothing"),
        (("--chart", "nowhere/chart.html"), "--chart nowhere/chart.html is no file in a folder that exists"),
    ],
)
def test_what_a_comparison_does_not_know_is_refused_by_name(
    smollm2_path: Path, options: tuple[str, ...], why: str
) -> None:
    result = run("compare", str(smollm2_path), *options)
    assert why in str(result.exception)


def test_parts_of_a_step_add_up_to_it_and_name_what_bounds_them(smollm2_path: Path, tmp_path: Path) -> None:
    sizes = ("--prefill", "16", "--batch", "1,2", "--context", "16", "--steps", "2", "--threads", "1")
    chart = tmp_path / "chart.html"
    done = run("roofline", str(smollm2_path), *sizes, "--chart", str(chart), "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert [work["name"] for work in report["works"]] == ["prefill 16", "decode 1", "decode 2"]
    one, two = report["works"][1:]
    for work in report["works"]:
        assert sum(part["seconds"] for part in work["parts"]) == pytest.approx(work["seconds"], rel=0.5)
        assert work["limit_s"] == pytest.approx(sum(part["limit_s"] for part in work["parts"]))
    heads = [next(part for part in work["parts"] if part["name"] == "head") for work in (one, two)]
    assert heads[0]["nbytes"] == heads[1]["nbytes"] == 49152 * 576 // 32 * 34
    assert 2 * heads[0]["operations"] == heads[1]["operations"] == 4 * 49152 * 576
    assert "<figcaption>decode 2" in chart.read_text()


def test_what_torch_computes_is_limited_by_the_kind_its_products_are_of(smollm2_path: Path) -> None:
    sizes = ("--prefill", "16", "--batch", "1", "--context", "16", "--steps", "2", "--form", "torch")
    report = json.loads(run("roofline", str(smollm2_path), *sizes, "--json").stdout.splitlines()[-1])
    (part,) = report["works"][0]["parts"]
    kind = "bfloat16" if "bfloat16" in report["speed"] else "float32"
    least = part["nbytes"] / report["reached"]["bytes_per_s"], part["operations"] / report["reached"][kind]
    assert part["limit_s"] == pytest.approx(max(least))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ours_and_a_peer_compute_the_same_in_one_run(smollm2_path: Path, tmp_path: Path) -> None:
    sizes = ("--prefill", "32", "--batch", "1,3", "--prompt", "16", "--new", "8", "--repeat", "2", "--threads", "1")
    places = ("--weights", str(tmp_path / "weights"), "--chart", str(tmp_path / "chart.html"))
    done = run(
        *("compare", str(smollm2_path), "--ours", "bfloat16", "--transformers", sys.executable),
        *(*sizes, *places, "--json"),
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert [(side["label"], side["same_firsts"]) for side in report["sides"]] == [
        ("ours bfloat16", 1.0),
        ("transformers bf16", 1.0),
    ]
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["prefill 32", "decode 1", "decode 3", "start to ready", "peak memory"]
    for row in rows.values():
        assert row["best_peer"] == "transformers bf16"
        assert all(value > 0 for side in row["sides"] for value in side["values"])
    assert "transformers bf16" in (tmp_path / "chart.html").read_text()


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


def test_a_trace_is_replayed_for_each_size_and_policy(tmp_path: Path) -> None:
    turns = [{"timestamp": 1000 * i, "input_length": 1024, "hash_ids": [i % 3, 100 + i % 3]} for i in range(9)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(turn) for turn in turns))
    report = json.loads(run("cache", str(path), "--blocks", "2,6", "--json").stdout.splitlines()[-1])
    assert (report["kind"], report["asked"], report["distinct"], report["ideal"]) == ("cache", 18, 6, 12 / 18)
    hits = {(figure["policy"], figure["blocks"]): figure["hit"] for figure in report["figures"]}
    assert hits["lru", 2] == 0
    assert hits["lru", 6] == hits["reuse", 6] == 12 / 18
    assert set(hits) == {("lru", 2), ("lru", 6), ("reuse", 2), ("reuse", 6)}
    assert "66.7%" in run("cache", str(path), "--blocks", "6").stdout


@pytest.mark.parametrize("text", ["", '{"timestamp": 1}', "[]", "no json"])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    result = run("cache", str(path))
    assert "trace.jsonl cannot be replayed" in str(result.exception)
    assert "takes numbers of blocks" in str(run("cache", str(path), "--blocks", "many").exception)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_restored_prefix_gives_its_token_ten_times_sooner(tmp_path: Path) -> None:
    done = run("restore", "--path", str(tmp_path), "--repeat", "1", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["kind"], report["run"]["prefix"]) == ("restore", 2000)
    assert [figure["name"] for figure in report["figures"]] == ["cold", "warm"]
    assert all(figure["ratio"] >= 10 for figure in report["figures"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_overloaded_server_keeps_its_word_to_those_it_refuses(tmp_path: Path) -> None:
    config = tmp_path / "few.toml"
    # A process of its own: blocks that are used for the first time are no growth of the server.
    config.write_text('[pool.executor]\nuse = "torch"\nprocess = true\nmax_seqs = 4\nnum_blocks = 512\n')
    sizes = ("--concurrency", "4", "--calibrate", "5", "--prompt", "8", "--new", "8", "--max-queue", "16")
    done = run("overload", "--config", str(config), "--seconds", "10", *sizes, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["kind"], report["failed"], report["settled"]) == ("overload", 0, True)
    assert report["sent"] == report["served"] + report["refused"]
    assert report["waiting_most"] <= 16
    came = [report[kind] for kind in ("retries", "late_retries")]
    assert sum(each["came"] for each in came) == report["refused"] > 0
    assert sum(each["served"] for each in came) >= 0.8 * report["refused"]
    memory = report["memory"]
    assert memory["second_half"] - memory["before"] < 32 * 2**20
