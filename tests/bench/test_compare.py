"""Comparisons of programs that take as long as they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deepinfra.bench.compare.draw import page, text_lines
from deepinfra.bench.compare.run import CompareReport, CompareRun, figure_row, run_compare
from deepinfra.bench.compare.sides import SideSpec
from deepinfra.errors import EngineError

LINES = Path(sys.modules["deepinfra.bench.compare"].__path__[0]) / "peers"

SIDE = """
import sys
sys.path.insert(0, {lines!r})
from lines import answer_lines, options, own_output
wire, given = own_output(), options()
print("a line that is no answer")

def prefill(prompt):
    if given["ends"]:
        sys.exit("out of breath")
    return {{"seconds": len(prompt) / given["speed"]}}

def decode(prompts, new):
    return {{"seconds": 2.0, "tokens": 2 * given["speed"] * len(prompts), "firsts": [given["first"]] * len(prompts)}}

answer_lines(wire, given["name"], given["about"], {{"prefill": prefill, "decode": decode}})
"""

RUN = CompareRun(prefills=(8, 16), batches=(1, 2), prompt=4, new=4, repeat=3)


def spec(
    tmp_path: Path, label: str, *, speed: float, ours: bool = False, first: int = 5, ends: int = 0, **about: str
) -> SideSpec:
    path = tmp_path / "side.py"
    path.write_text(SIDE.format(lines=str(LINES)))
    told = json.dumps({"name": f"{label} 1.0", "speed": speed, "first": first, "ends": ends, "about": about})
    return SideSpec(label=label, ours=ours, command=(sys.executable, str(path), told))


async def compared(tmp_path: Path, log: list[str]) -> CompareReport:
    sides = [
        spec(tmp_path, "ours", speed=60, ours=True),
        spec(tmp_path, "slow", speed=30),
        spec(tmp_path, "fast", speed=40, first=6),
    ]
    return await run_compare(sides, RUN, model="toy", vocab_size=100, threads=1, progress=log.append)


async def test_ours_is_compared_with_the_best_peer_of_each_row(tmp_path: Path) -> None:
    report = await compared(tmp_path, [])
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["prefill 8", "prefill 16", "decode 1", "decode 2", "start to ready", "peak memory"]
    for name, batch in (("prefill 8", 1), ("decode 1", 1), ("decode 2", 2)):
        assert rows[name].best_peer == "fast"
        found = {side.side: (side.median, len(side.values), side.ratio) for side in rows[name].sides}
        assert found["ours"] == (pytest.approx(60 * batch), 3, pytest.approx(1.5))
        assert found["fast"] == (pytest.approx(40 * batch), 3, None)
    assert all(side.median > 2**20 for side in rows["peak memory"].sides)
    assert (report.kind, report.model, len(report.rounds)) == ("compare", "toy", 3)


async def test_sides_take_turns_in_going_first(tmp_path: Path) -> None:
    log: list[str] = []
    await compared(tmp_path, log)
    turns = [line.split(": ")[1].split(",")[0] for line in log if line.endswith("prefill of 16")]
    order = ["ours", "slow", "fast"]
    assert turns == [*order, *order[::-1], *order]


async def test_a_side_with_other_tokens_is_told_of(tmp_path: Path) -> None:
    report = await compared(tmp_path, [])
    assert {side.label: side.same_firsts for side in report.sides} == {"ours": 1.0, "slow": 1.0, "fast": 0.0}
    assert {side.name for side in report.sides} == {"ours 1.0", "slow 1.0", "fast 1.0"}


async def test_what_a_side_said_last_is_told_when_it_ends(tmp_path: Path) -> None:
    sides = [spec(tmp_path, "tired", speed=1, ends=1)]
    with pytest.raises(EngineError, match=r"tired ended: [^:]*out of breath"):
        await run_compare(sides, RUN, model="toy", vocab_size=100, threads=1)


async def test_a_side_that_says_nothing_is_told_of(tmp_path: Path) -> None:
    mute = SideSpec(label="mute", ours=False, command=("true",))
    with pytest.raises(EngineError, match="mute ended: it said nothing"):
        await run_compare([mute], RUN, model="toy", vocab_size=100, threads=1)


async def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    missing = SideSpec(label="gone", ours=False, command=(str(tmp_path / "python"), "-c", ""))
    with pytest.raises(EngineError, match=r"gone ended: [^\n]*No such file"):
        await run_compare([missing], RUN, model="toy", vocab_size=100, threads=1)


def test_of_seconds_and_bytes_less_is_better() -> None:
    row = figure_row("first token", "s", {"ours": [1.0, 3.0, 2.0], "a": [4.0], "b": [8.0]}, {"ours"})
    assert row.best_peer == "a"
    assert row.sides[0].ratio == 2.0
    assert figure_row("x", "tok/s", {"ours": [1.0]}, {"ours"}).sides[0].ratio is None


async def test_a_chart_is_one_file_and_says_what_the_lines_say(tmp_path: Path) -> None:
    report = await compared(tmp_path, [])
    drawn = page(report)
    ElementTree.fromstring(drawn.removeprefix("<!doctype html>\n"))
    lines = list(text_lines(report))
    for row in report.rows:
        assert f"<figcaption>{row.name}, " in drawn
        assert any(line.startswith(row.name) for line in lines)
    assert "http" not in drawn
    assert ">ours</span>" in drawn
    assert ">others</span>" in drawn
    assert "batch-inv" not in drawn
    best = lines[lines.index("decode 2, tok/s") + 1]
    assert best.split()[0] == "ours"
    assert best.endswith("×1.50")


INVARIANT = "batch-invariant avx2 and more"


async def test_batch_invariance_costs_what_it_is_slower_than_the_fastest_ordinary_mode_of_its_format(
    tmp_path: Path,
) -> None:
    half, ordinary = {"dtype": "bfloat16: so", "weights": "dense: so"}, {"numerics": "ordinary"}
    sides = [
        spec(tmp_path, "ours kernels", speed=60, ours=True, **half, **ordinary),
        spec(tmp_path, "ours torch", speed=90, ours=True, **half, **ordinary),
        spec(tmp_path, "ours stored", speed=500, ours=True, dtype="bfloat16", weights="stored: so", **ordinary),
        spec(tmp_path, "ours x+invariant", speed=45, ours=True, **half, numerics=INVARIANT),
        spec(tmp_path, "ours y+invariant", speed=45, ours=True, dtype="float32", weights="dense", numerics=INVARIANT),
        spec(tmp_path, "a peer", speed=900, **half, **ordinary),
    ]
    report = await run_compare(sides, RUN, model="toy", vocab_size=100, threads=1)
    assert [each.row for each in report.slowdowns] == ["prefill 8", "prefill 16", "decode 1", "decode 2"]
    for each in report.slowdowns:  # nothing was measured beside y
        assert (each.format, each.side, each.fastest) == ("bfloat16", "ours x+invariant", "ours torch")
        assert each.slowdown == pytest.approx(2.0)
    assert "  decode 2    ours x+invariant  ×2.00  beside ours torch" in list(text_lines(report))
    drawn = page(report)
    assert "ours, batch-invariant</span>" in drawn
    assert "<td>×2.00</td><td>ours torch</td>" in drawn
