from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

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
        (("--ours", "stored+invariant+invariant"), "no form of ours is named 'stored+invariant+invariant'"),
        (("--ours", "bfloat16,bfloat16"), "--ours bfloat16,bfloat16 names something twice"),
        (("--ours", "torch+invariant"), "--ours torch+invariant: batch_invariant cannot be kept with kernels = torch"),
        (("--ours", "stored+torch"), "--ours stored+torch: weights = stored needs kernels"),
        (("--batch", "1,1"), "--batch takes numbers like 1,8,32, each once"),
        (("--vllm", "/nonexistent"), "--vllm /nonexistent is no program"),
        (
            ("--llama-cpp", sys.executable, "--llama-forms", "q9"),
            "no format of llama.cpp is named 'q9'; known: shipped",
        ),
        (("--prefill", "x"), "--prefill takes numbers like 1,8,32"),
        (("--ours", ""), "--ours names nothing"),
        (("--chart", "chart.svg"), "--chart chart.svg: a chart is an HTML file"),
        (("--chart", "nowhere/chart.html"), "--chart nowhere/chart.html cannot be written: No such file"),
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
    drawn = chart.read_text()
    assert "<figcaption>decode 2" in drawn
    labels = re.findall('<text class="row"[^>]*>([^<]*)</text>', drawn)
    assert len(labels) == sum(len(work["parts"]) for work in report["works"])
    assert max(map(len, labels)) < 60  # what is longer does not fit beside its bar


def test_what_torch_computes_is_limited_by_the_kind_its_products_are_of(smollm2_path: Path) -> None:
    sizes = ("--prefill", "16", "--batch", "1", "--context", "16", "--steps", "2", "--form", "torch")
    report = json.loads(run("roofline", str(smollm2_path), *sizes, "--json").stdout.splitlines()[-1])
    (part,) = report["works"][0]["parts"]
    kind = "bfloat16" if "bfloat16" in report["speed"] else "float32"
    least = part["nbytes"] / report["reached"]["bytes_per_s"], part["operations"] / report["reached"][kind]
    assert part["limit_s"] == pytest.approx(max(least))


TINY = ("--prefill", "8", "--batch", "1", "--threads", "1")
COMPARED = (*TINY, "--prompt", "4", "--new", "4", "--repeat", "1")
READ = ("--tokens", "16", "--chunk", "8", "--threads", "1")


@pytest.mark.parametrize(
    ("command", "option", "sizes"),
    [
        ("compare", "--ours", COMPARED),
        ("quality", "--forms", READ),
        ("roofline", "--form", (*TINY, "--context", "8", "--steps", "2")),
    ],
)
def test_what_is_measured_by_default_is_chosen_by_the_model_and_told(
    dense: Path, command: str, option: str, sizes: tuple[str, ...]
) -> None:
    done = run(command, str(dense), *sizes, "--json")
    assert done.exit_code in (0, 1 if command == "quality" else 0), done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert f"{option} bfloat16 (not stored: the model's matrices are BF16)" in done.stderr
    said = {
        "compare": lambda: [side["label"] for side in report["sides"]] == ["ours bfloat16"],
        "quality": lambda: [form["form"] for form in report["forms"]] == ["bfloat16"],
        "roofline": lambda: "weights dense" in report["speed"],
    }
    assert said[command]()


def test_stored_is_refused_at_once_where_nothing_is_stored_in_blocks(dense: Path) -> None:
    for command, option in (("compare", "--ours"), ("quality", "--forms"), ("roofline", "--form")):
        result = run(command, str(dense), option, "stored")
        assert f"{option} stored: weights = stored: the model's matrices are BF16" in str(result.exception)


def test_the_executor_is_measured_as_configured(dense: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deepinfra.toml").write_text(
        '[pool.executor]\nkernels = "avx2"\nthreads = 1\nblock_size = 32\nmax_step_tokens = 64\nnum_blocks = 20\n'
    )
    sizes = ("--prefill", "8", "--batch", "1", "--context", "8", "--steps", "2")
    done = run("roofline", str(dense), *sizes, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["threads"] == 1
    assert "kernels avx2 weights dense threads 1 block 32" in report["speed"]
    refused = run("roofline", str(dense), "--prefill", "100", "--batch", "1")
    assert "a prompt in one step: 100 are asked for, 64 are the most (max_step_tokens)" in str(refused.exception)
    refused = run("roofline", str(dense), "--prefill", "8", "--batch", "8", "--context", "100")
    assert "are the most (num_blocks)" in str(refused.exception)

    done = run("quality", str(dense), "--tokens", "16", "--chunk", "8", "--forms", "bfloat16", "--json")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["forms"][0]["about"]["kernels"].startswith("avx2")
    assert "pool.executor.num_blocks = 20 (deepinfra.toml:6) is not used: bench quality has its own" in done.stderr

    done = run("compare", str(dense), "--ours", "bfloat16", *COMPARED[:4], *COMPARED[6:], "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    about = report["sides"][0]["about"]
    assert report["threads"] == 1
    assert about["kernels"] == "avx2: as configured"
    assert about["num_blocks"] == "20: as configured"


def test_what_a_form_decides_is_told_where_something_else_is_configured(
    dense: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("DEEPINFRA_POOL__EXECUTOR__DTYPE", "float32")
    monkeypatch.setenv("DEEPINFRA_POOL__EXECUTOR__PROCESS", "true")
    done = run("quality", str(dense), *READ, "--forms", "bfloat16,float32")
    where = "environment DEEPINFRA_POOL__EXECUTOR__"
    assert f"pool.executor.dtype = float32 ({where}DTYPE) is not used: it is part of bfloat16\n" in done.stderr
    assert f"pool.executor.process = true ({where}PROCESS) is not used: bench quality times" in done.stderr


@pytest.mark.parametrize("command", ["compare", "quality", "roofline"])
@pytest.mark.parametrize(
    ("written", "why"),
    [
        ('[pool.executor]\nuse = "toy"\n', "measures forms of the torch executor; pool.executor.use is 'toy'"),
        ("[[prefill]]\n[[decode]]\n", "measures one pool; this configuration splits prefill and decode"),
    ],
)
def test_an_executor_without_forms_is_refused_by_name(tmp_path: Path, command: str, written: str, why: str) -> None:
    config = tmp_path / "deepinfra.toml"
    config.write_text(written)
    assert f"bench {command} {why}" in str(run(command, "--config", str(config)).exception)


def test_what_is_wrong_with_a_request_is_one_sentence_of_its_side(dense: Path) -> None:
    result = run("compare", str(dense), "--ours", "float32", "--prefill", "999", *COMPARED[2:])
    assert str(result.exception).startswith("ours float32 ended: This model's maximum context length is 256 tokens.")


def test_a_chunk_longer_than_the_models_context_is_refused(dense: Path) -> None:
    result = run("quality", str(dense), "--tokens", "2000", "--chunk", "999", "--forms", "float32")
    assert "a chunk of 999 tokens is longer than the model's context of 256" in str(result.exception)


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


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999/v1", "http://127.0.0.1:x/v1", "https://127.0.0.1/v1", "nowhere"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    for command in ("serve", "overload"):
        assert "is not an address like http://127.0.0.1:8000/v1" in str(run(command, "--url", url).exception)


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    assert f"--html {tmp_path} cannot be written: Is a directory" in str(run("mix", "--html", str(tmp_path)).exception)
    kept = tmp_path / "chart.html"
    kept.write_text("an older one")
    assert "no form of ours" in str(run("compare", "--chart", str(kept), "--ours", "x").exception)
    assert kept.read_text() == "an older one"
    assert "no form of ours" in str(run("compare", "--chart", str(tmp_path / "new.html"), "--ours", "x").exception)
    assert not (tmp_path / "new.html").exists()


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
