"""A plan as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from deepinfra import __version__
from deepinfra.bench.simulate.html import STYLE
from deepinfra.bench.simulate.plan.compare import Compared
from deepinfra.bench.simulate.plan.fleet import Batch, Plan
from deepinfra.bench.simulate.plan.outcome import Outcome
from deepinfra.bench.simulate.plan.text import checked_rows, plan_rows, sensitivity_rows, title_of
from deepinfra.bench.simulate.plots import Line, axis_for, lines

__all__ = ("plan_page",)

_METHOD = (
    "A step takes what its arithmetic or its bytes take, part by part, at the share of a device's peak that the best "
    "public kernels reach, plus the latency of kernels and collectives. No engine was measured and nothing was fitted, "
    "so this is what devices could do at most. What was published is printed beside it and read by no prediction."
)
_FRONTIER = (
    "Each batch is a point: what a decode device does, and what a user of it sees. A corner marks the batch that is "
    "planned, another one what was published."
)


def plan_page(outcome: Outcome) -> str:
    """The whole file."""
    fleet, plan, compared = outcome.fleet, outcome.plan, outcome.compared
    title = title_of(fleet)
    inputs = [("", "value", "source"), *((each.name, f"{each.value:.6g}", each.source) for each in fleet.givens())]
    sections = [
        f"<h1>{escape(title[0])}</h1>" + "".join(f"<p>{escape(line)}</p>" for line in title[1:]),
        _section("Plan", _METHOD, _table(plan_rows(plan, compared))),
        _section("Speed of users and of devices", _FRONTIER, _frontier(fleet.batches(), plan, compared)),
        _section("Simulated", "", _table(checked_rows(plan, outcome.checked))) if outcome.checked else "",
        _section("What moves it", "With 20 % less / 20 % more.", _table(sensitivity_rows(outcome.moves)))
        if outcome.moves
        else "",
        _section("What it is given", "", _table(inputs)),
        f"<footer><p>deepinfra {escape(__version__)}</p></footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title[0])}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + "\n</body></html>\n"
    )


def _section(name: str, words: str, inside: str) -> str:
    return f"<section><h2>{escape(name)}</h2>{f'<p>{escape(words)}</p>' if words else ''}{inside}</section>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _frontier(batches: Sequence[Batch], plan: Plan, compared: Sequence[Compared]) -> str:
    told = {each.quantity: each.published for each in compared}
    points = {"planned": (plan.user_tokens_s, plan.decode_tokens_s)}
    if {"user_tokens_s", "decode_tokens_s"} <= told.keys():
        points["published"] = (told["user_tokens_s"], told["decode_tokens_s"])
    x = axis_for(
        "output tokens/s per user", [each.user_tokens_s for each in batches] + [at for at, _ in points.values()]
    )
    y = axis_for("output tokens/s per device", [each.tokens_s for each in batches] + [at for _, at in points.values()])
    curves = [Line(0, "frontier", sorted((each.user_tokens_s, each.tokens_s) for each in batches))]
    curves += [
        Line(style, name, [(x.low, high), (at, high), (at, y.low)])
        for style, (name, (at, high)) in enumerate(points.items(), 1)
    ]
    keys = "".join(
        f'<span><svg viewBox="0 0 36 12" aria-hidden="true"><polyline class="line c{curve.style}" points="1,6 35,6"/>'
        f"</svg>{escape(curve.name)}</span>"
        for curve in curves
    )
    return f'<div class="key">{keys}</div><div class="plots"><figure>{lines("Frontier", x, y, curves)}</figure></div>'
