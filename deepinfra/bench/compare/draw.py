"""Comparisons and rooflines as charts, each one HTML file that needs nothing else; comparisons as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from typing import TYPE_CHECKING

from deepinfra import __version__
from deepinfra.bench.compare.run import CompareReport, CompareRow, SideValues
from deepinfra.bench.compare.serve import ServeReport
from deepinfra.bench.machine import CpuUse
from deepinfra.bench.simulate.figures import Plot
from deepinfra.bench.simulate.html import document, drawn, section, table
from deepinfra.bench.simulate.plots import Bar, axis_for, bars, number_text, seconds_text

if TYPE_CHECKING:
    from deepinfra.bench.roofline import RooflineReport

__all__ = ("cpu_text", "page", "roofline_page", "text_lines")

_WIDE = 30
"""Characters of the longest bar in a terminal."""

_OURS, _PEER = 0, 1
"""Colours of bars."""


def page(report: CompareReport | ServeReport) -> str:
    """The whole file."""
    title = f"{report.model}, {report.threads} threads, medians of {report.run.repeat}"
    labels = {side.label for side in report.sides if side.label.startswith("ours")}
    plots = [_plot(row, labels) for row in report.rows]
    sides = [
        [escape(each.label), escape(each.name), escape("; ".join(f"{k}: {v}" for k, v in each.about.items()))]
        for each in report.sides
    ]
    return document(
        title,
        [
            f"<h1>{escape(title)}</h1><p>{escape(cpu_text(report.cpu))}</p>",
            section("Measured", _WORDS, drawn(plots)),
            section("Who took part", "", table(["side", "program", "about itself"], sides)),
            f"<footer><p>deepinfra {escape(__version__)}</p></footer>",
        ],
    )


_WORDS = "Medians as bars; dashed lines span the single values. Ratios are to the best peer: above 1 is better."


def roofline_page(report: RooflineReport) -> str:
    """Where the time of steps goes, the whole file."""
    title, reached = f"{report.model}: where a step's time goes", report.reached
    peaks = ", ".join(
        f"{kind} {number_text(value)} operations/s"
        for kind, value in (("float32", reached.float32), ("bfloat16", reached.bfloat16), ("int8", reached.int8))
    )
    plots = []
    for work in report.works:
        rows = [
            Bar(
                _OURS,
                part.name,
                part.seconds,
                (0.0, part.limit_s),
                f"{part.seconds / work.seconds:.0%} of the step, {part.share:.0%} of its limit ({part.bound})",
            )
            for part in work.parts
        ]
        ends = [max(part.seconds, part.limit_s) for part in work.parts]
        caption = f"{work.name}: {seconds_text(work.seconds)}, {work.share:.0%} of what could be reached"
        plots.append(Plot(caption, bars(caption, axis_for("seconds of a step", ends, text=seconds_text), rows)))
    words = "Bars are medians; the dashed line in each is the least that its bytes and operations take on this machine."
    return document(
        title,
        [
            f"<h1>{escape(title)}</h1><p>{escape(report.speed)}</p>",
            f"<p>{escape(f'{report.threads} threads reach {number_text(reached.bytes_per_s)}B/s, {peaks}')}</p>",
            f"<p>{escape(cpu_text(report.cpu))}</p>",
            section("Parts of a step", words, drawn(plots)),
            f"<footer><p>deepinfra {escape(__version__)}</p></footer>",
        ],
    )


def text_lines(report: CompareReport | ServeReport) -> Iterator[str]:
    """The same for a terminal."""
    yield f"{report.model}, {report.threads} threads, medians of {report.run.repeat}"
    wide = max(len(side.label) for side in report.sides)
    for row in report.rows:
        yield f"{row.name}, {row.unit if row.unit == 'tok/s' else 'less is better'}"
        text, most = _text(row.unit), max(values.median for values in row.sides) or 1.0
        for values in sorted(row.sides, key=lambda each: each.median, reverse=row.unit == "tok/s"):
            bar = "█" * max(1, round(_WIDE * values.median / most))
            yield f"  {values.side:{wide}} {text(values.median):>12}  {bar:{_WIDE}} {_note(row, values)}".rstrip()
    yield cpu_text(report.cpu)


def cpu_text(cpu: CpuUse) -> str:
    """What the processor did."""
    noisy = "   NOISY: not to be trusted" if cpu.noisy else ""
    return f"processor: {cpu.own_cores:.2f} cores here, {cpu.others_cores:.2f} cores in other programs{noisy}"


def _plot(row: CompareRow, ours: set[str]) -> Plot:
    values = [value for side in row.sides for value in side.values]
    found = [
        Bar(_OURS if each.side in ours else _PEER, each.side, each.median, (min(each.values), max(each.values)), note)
        for each in row.sides
        for note in [_note(row, each)]
    ]
    axis = axis_for("" if row.unit == "B" else row.unit, values, text=_text(row.unit))
    return Plot(row.name, bars(row.name, axis, found))


def _note(row: CompareRow, values: SideValues) -> str:
    if values.ratio is not None:
        return f"×{values.ratio:.2f}"
    return "best peer" if values.side == row.best_peer else ""


def _text(unit: str) -> Callable[[float], str]:
    if unit == "s":
        return seconds_text
    if unit == "B":
        return lambda value: f"{number_text(value / 1e6)} MB"
    return number_text
