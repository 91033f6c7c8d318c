"""Comparisons and rooflines as charts, each one HTML file that needs nothing else; comparisons as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

_OURS, _PEER, _INVARIANT = 0, 1, 2
"""Colours of bars."""


def page(report: CompareReport | ServeReport) -> str:
    """The whole file."""
    title = f"{report.model}, {report.threads} threads, medians of {report.run.repeat}"
    styles = {side.label: _style(side.label) for side in report.sides}
    names = {_OURS: "ours", _INVARIANT: "ours, batch-invariant", _PEER: "others"}
    key = "".join(
        f'<span><svg viewBox="0 0 36 12" aria-hidden="true"><rect class="mark c{style}" width="36" height="12"/></svg>'
        f"{escape(name)}</span>"
        for style, name in names.items()
        if style in styles.values()
    )
    words = "Medians, the best first; dashed lines span the single values."
    if _PEER in styles.values():
        words += " Ratios are ours to the best of the others: above 1 is better."
    return document(
        title,
        [
            f"<h1>{escape(title)}</h1><p>{escape(cpu_text(report.cpu))}</p>",
            f'<div class="key">{key}</div>',
            section("Measured", words, drawn([_plot(row, styles) for row in report.rows])),
            _costs(report),
            section("Who took part", "", _sides(report)),
            f"<footer><p>deepinfra {escape(__version__)}</p></footer>",
        ],
    )


def _style(label: str) -> int:
    if not label.startswith("ours"):
        return _PEER
    return _INVARIANT if label.endswith("+invariant") else _OURS


def _costs(report: CompareReport | ServeReport) -> str:
    if not isinstance(report, CompareReport) or not report.slowdowns:
        return ""
    cells = [[each.row, each.side, f"×{each.slowdown:.2f}", each.fastest] for each in report.slowdowns]
    heads = ["", "in batch-invariant mode", "times slower", "than the fastest ordinary mode of the same format"]
    return section(
        "What batch invariance costs",
        "Below 1 is faster.",
        table(heads, [list(map(escape, row)) for row in cells]),
    )


def _sides(report: CompareReport | ServeReport) -> str:
    told = "".join(
        f"<dt>{escape(each.label)} <small>{escape(each.name)}</small></dt>"
        + "".join(f"<dd>{escape(name)}: {escape(words)}</dd>" for name, words in each.about.items())
        for each in report.sides
    )
    return f"<dl>{told}</dl>"


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
                f"{part.seconds / work.seconds:.0%}; {part.share:.0%} of its {part.bound} limit",
            )
            for part in work.parts
        ]
        ends = [max(part.seconds, part.limit_s) for part in work.parts]
        caption = f"{work.name}: {seconds_text(work.seconds)}, {work.share:.0%} of what could be reached"
        plots.append(Plot(caption, bars(caption, axis_for("", ends, text=seconds_text), rows)))
    words = (
        "Bars are medians, each with its share of the step; the dashed line in it is the least that its bytes and "
        "operations take on this machine."
    )
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
        yield f"{row.name}, {_goal(row)}"
        text, most = _text(row.unit), max(values.median for values in row.sides) or 1.0
        for values in _best_first(row):
            bar = "█" * max(1, round(_WIDE * values.median / most))
            yield f"  {values.side:{wide}} {text(values.median):>12}  {bar:{_WIDE}} {_note(row, values)}".rstrip()
    yield from _slowdown_lines(report, wide)
    yield cpu_text(report.cpu)


def _slowdown_lines(report: CompareReport | ServeReport, wide: int) -> Iterator[str]:
    if not isinstance(report, CompareReport) or not report.slowdowns:
        return
    yield "batch-invariant mode, times slower than the fastest ordinary mode of the same format (below 1: faster)"
    names = max(len(each.row) for each in report.slowdowns)
    for each in report.slowdowns:
        yield f"  {each.row:{names}}  {each.side:{wide}}  ×{each.slowdown:.2f}  beside {each.fastest}"


def cpu_text(cpu: CpuUse) -> str:
    """What the processor did."""
    noisy = "   NOISY: not to be trusted" if cpu.noisy else ""
    return f"processor: {cpu.own_cores:.2f} cores here, {cpu.others_cores:.2f} cores in other programs{noisy}"


def _plot(row: CompareRow, styles: Mapping[str, int]) -> Plot:
    values = [value for side in row.sides for value in side.values]
    found = [
        Bar(styles[each.side], each.side, each.median, (min(each.values), max(each.values)), _note(row, each))
        for each in _best_first(row)
    ]
    caption = f"{row.name}, {_goal(row)}"
    return Plot(caption, bars(caption, axis_for("", values, text=_text(row.unit)), found))


def _best_first(row: CompareRow) -> list[SideValues]:
    return sorted(row.sides, key=lambda each: each.median, reverse=row.unit == "tok/s")


def _goal(row: CompareRow) -> str:
    return row.unit if row.unit == "tok/s" else "less is better"


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
