from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepinfra.cli.failures import sentence_for
from deepinfra.cli.simulate import simulate
from deepinfra.cli.simulate.variants import fleets_for, variants_for
from deepinfra.cli.simulate.workloads import GENERATORS, workload_for

SETTINGS = """
[pool]
store = { use = "none" }

[pool.executor]
use = "simulated"
num_blocks = 512
cost = { step = 0.005, chunk_token = 2e-5, decode_row = 1e-4 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a configuration and a trace of 20 requests, every other one a giant."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "deepinfra.toml").write_text(SETTINGS)
    rows = [
        {"timestamp": 100 * n, "input_length": 9000 if n % 2 else 60, "output_length": 4, "hash_ids": [*range(18)]}
        for n in range(20)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(simulate, ["run", *arguments])


def table(*arguments: str) -> Any:
    done = run(*arguments, "--json", "-")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_configuration_is_put_through_a_trace(folder: Path) -> None:
    done = run("trace.jsonl", "--html", "report.html", "--price", "2")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("20 requests, ")
    assert re.search(r"^served requests +100\.0 %$", done.stdout, re.MULTILINE)
    assert re.search(r"^cost per million output tokens +\d", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("report: report.html\n")
    text = (folder / "report.html").read_text()
    assert "Time to first token, by uncached prompt tokens" in text
    assert "trace.jsonl" in text


def test_the_numbers_are_those_of_its_rows(folder: Path) -> None:
    (simulation,) = table("trace.jsonl", "--rows")["simulations"]
    rows = simulation["rows"]
    assert [row["output"] for row in rows] == [4] * 20
    assert [row["at_s"] for row in rows] == pytest.approx([0.1 * n for n in range(20)])
    assert simulation["hit_rate"] == sum(sum(row["cached"].values()) for row in rows) / sum(r["prompt"] for r in rows)
    assert simulation["hit_rate"] > 0.3
    assert simulation["all"]["first_token_s"]["worst"] == max(row["first_s"] for row in rows)
    assert simulation["settings"]["scheduler"] == "bucketed"


def test_another_scheduler_is_compared_with(folder: Path) -> None:
    told = table("trace.jsonl", "--against", "fcfs", "--against", "pool.scheduler.max_overtakes=0")
    assert [each["name"] for each in told["simulations"]] == [
        "fcfs",
        "pool.scheduler.max_overtakes=0",
        "deepinfra.toml",
    ]
    schedulers = [each["settings"]["scheduler"] for each in told["simulations"]]
    assert schedulers == ["fcfs", "bucketed max_overtakes=0", "bucketed"]
    row = next(row for row in told["comparison"] if row["name"] == "output tokens per second")
    base = row["figures"][0]["value"]
    assert [figure["ratio"] for figure in row["figures"][1:]] == [
        figure["value"] / base for figure in row["figures"][1:]
    ]


def test_numbers_of_replicas_are_compared(folder: Path) -> None:
    told = table("mix:requests=20,prompt=3000,output=4", "--replicas", "1,3", "--scale", "20", "--price", "1")
    assert [each["name"] for each in told["simulations"]] == ["1 replica", "3 replicas"]
    assert [each["devices"] for each in told["simulations"]] == [1, 3]
    assert [len(each["pools"]) for each in told["simulations"]] == [1, 3]
    lasts = [each["all"]["first_token_s"]["worst"] for each in told["simulations"]]
    assert lasts[1] < lasts[0]


def test_prefill_and_decode_are_split_in_ratios(folder: Path) -> None:
    told = table("trace.jsonl", "--split", "1:1,2:1")
    assert [[pool["name"] for pool in each["pools"]] for each in told["simulations"]] == [
        ["prefill", "decode"],
        ["prefill-0", "prefill-1", "decode"],
    ]
    assert all(each["served_share"] == 1.0 for each in told["simulations"])


def test_configured_prefill_and_decode_pools_are_simulated_as_they_are(folder: Path) -> None:
    pool = 'executor = { use = "simulated" }\nstore = { use = "memory" }\n'
    (folder / "deepinfra.toml").write_text(f"[[prefill]]\n{pool}[[prefill]]\n{pool}[[decode]]\n{pool}")
    (told,) = table("trace.jsonl")["simulations"]
    assert [each["name"] for each in told["pools"]] == ["prefill-0", "prefill-1", "decode"]
    assert [each["output_tokens"] > 40 for each in told["pools"]] == [False, False, True]
    assert "several pools of a kind" in str(run("trace.jsonl", "--replicas", "2").exception)


def test_the_same_command_gives_the_same_numbers(folder: Path) -> None:
    first, second = (table("trace.jsonl", "--against", "fcfs", "--rows") for _ in range(2))
    for each in (*first["simulations"], *second["simulations"]):
        assert each.pop("took_s") > 0
    assert first == second


def test_a_file_or_a_name_says_what_steps_cost(folder: Path) -> None:
    (folder / "slow.json").write_text('{"cost": {"step": 1.0}, "steps": []}')
    slow, fast = (
        table("mix:requests=3,prompt=50,output=4", "--cost", name)["simulations"][0]
        for name in ("slow.json", "b200/llama-8b")
    )
    assert slow["all"]["first_token_s"]["worst"] > 1.0 > fast["all"]["first_token_s"]["worst"]
    assert (slow["settings"]["steps cost"], fast["settings"]["steps cost"]) == ("slow.json", "b200/llama-8b")


def test_progress_tells_requests_and_virtual_time(folder: Path) -> None:
    lines = run("trace.jsonl").stderr.splitlines()
    assert len(lines) == 11
    assert re.fullmatch(r"bucketed: 20 of 20, [\d.]+ s of virtual time", lines[-1])


def test_a_function_that_chooses_a_pool_that_is_not_there_ends_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "wrong_route.py").write_text("def beyond(spec, views):\n    return len(views)\n")
    monkeypatch.syspath_prepend(folder)
    done = run("trace.jsonl", "--replicas", "2", "--route", "wrong_route:beyond")
    assert done.exception is not None
    assert "the route chose pool 2; there are 2, from 0 on" in (sentence_for(done.exception) or "")


def test_a_function_of_ones_own_routes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_route.py").write_text("def last(spec, views):\n    return len(views) - 1\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    pools = table("trace.jsonl", "--replicas", "2", "--route", "my_route:last")["simulations"][0]["pools"]
    assert [pool["output_tokens"] > 0 for pool in pools] == [False, True]


def test_length_buckets_have_pools_of_their_own(folder: Path) -> None:
    route = "by-bucket:pool-0+pool-1/pool-1/pool-2/pool-2"
    rows = table("trace.jsonl", "--replicas", "3", "--route", route, "--rows")["simulations"][0]["rows"]
    assert {(row["prompt"], row["pool"] == 2) for row in rows} == {(60, False), (9000, True)}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("nothing", "'nothing' is neither a file nor one of mix, bursts, giant, agents"),
        ("mix:foo=1", "mix has no parameter 'foo'; known: requests, per_s"),
        ("mix:requests=1.5", "mix:requests takes a whole number, not '1.5'"),
        ("mix:per_s=-1", "mix:per_s takes a number from 0 up, not -1"),
        ("mix:per_s=0", "mix:per_s=0: no request would ever come"),
        ("mix:requests=0", "mix:requests=0: there are no requests in it"),
        ("mix --replicas 0", "--replicas takes numbers like 4 or 2,4,8; '0' is something else"),
        ("mix --split 3", "--split takes prefill:decode like 3:5 or 2:6,4:4; '3' is something else"),
        ("mix --split 1:1 --replicas 1", "--replicas and --split exclude each other"),
        ("mix --replicas 1,2,3,4,5,6,7", "7 simulations are too many to compare; at most 6"),
        ("mix --replicas 2,2", "'2 replicas' would be compared with itself"),
        ("mix --against lifo", r"--against takes a file, KEY=VALUE or a scheduler \(.*fcfs.*\); 'lifo'"),
        ("mix --against pool.scheduler.edgs=[4]", "unknown setting pool.scheduler.edgs; did you mean 'edges'"),
        ("mix --route fastest", "--route takes least-loaded, cache-aware, by-bucket:.* 'fastest' is something else"),
        ("mix --route by-bucket:pool/a/a/a", "there is no pool 'a'; there are pool"),
        ("mix --route by-bucket:pool/pool", "3 edges make 4 buckets"),
        ("mix --route json:nothing", "--route json:nothing: .*no attribute 'nothing'"),
        ("mix --route cache-aware", "--route cache-aware: there is one pool"),
        ("mix --html same --json same", "--html and --json would both write same"),
        ("mix --cost h100", "'h100' is no device, number and model like h100x8/llama-70b"),
        ("mix --cost wrong.json", "wrong.json: unknown figure 'speed'; known: step, chunk_token"),
        ("mix --rows", "--rows says what --json writes"),
        ("mix --html .", "--html . cannot be written: Is a directory"),
        ("mix --html nowhere/report.html", "--html nowhere/report.html cannot be written: No such file or directory"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, arguments: str, why: str) -> None:
    (folder / "wrong.json").write_text('{"speed": 1}')
    done = run(*arguments.split())
    assert done.exit_code == 1
    assert re.search(why, str(done.exception)), done.exception


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "not a JSON object of seconds"),
        ('{"step": "x"}', "not a JSON object of seconds"),
        ('{"step": -1}', "step must be seconds, at least 0, not -1"),
        ('{"step": 0}', "no figure is above 0"),
    ],
)
def test_figures_that_are_none_are_refused(folder: Path, text: str, why: str) -> None:
    (folder / "cost.json").write_text(text)
    assert why in str(run("mix", "--cost", "cost.json").exception)


def test_without_any_figures_profile_is_recommended(folder: Path) -> None:
    (folder / "deepinfra.toml").write_text('[pool.executor]\nuse = "toy"\n')
    assert "executor 'toy' cost was not measured here: run `deepinfra profile`" in str(run("mix").exception)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_makes_requests_by_time(name: str) -> None:
    found = workload_for(name)
    assert len(found) > 10
    assert sorted(found, key=lambda arrival: arrival.at_s) == found
    assert workload_for(name) == found


def test_parameters_of_a_generator_are_obeyed() -> None:
    found = workload_for("mix:requests=50,per_s=5,burstiness=0,prompt=2_000,output=10,scatter=0")
    assert {(arrival.prompt, arrival.output) for arrival in found} == {(2000, 10)}
    assert (len(found), found[-1].at_s) == (50, pytest.approx(10.0))


def test_what_is_compared_with_comes_first_and_every_fleet_with_it(folder: Path) -> None:
    names = [variant.name for variant in variants_for(None, ["fcfs"], fleets_for("1,2", None))]
    assert names == ["fcfs 1 replica", "fcfs 2 replicas", "bucketed 1 replica", "bucketed 2 replicas"]
