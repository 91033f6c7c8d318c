"""A simulation on the terminal: the figures that decide, beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepinfra.bench.simulate.compare import Comparison, Figure, compare
from deepinfra.bench.simulate.html import figure_text, verdict_text
from deepinfra.bench.simulate.plots import seconds_text
from deepinfra.bench.simulate.report import SERVED, Summary

__all__ = ("table_lines",)


def table_lines(found: Sequence[Summary]) -> Iterator[str]:
    """Plain lines: a head, one row for each figure, and how requests ended."""
    yield f"{found[0].requests:,} requests, {seconds_text(found[0].span_s)} of virtual time"
    cells = [["by uncached prompt tokens", *(summary.name for summary in found)]]
    cells += [[row.name, *(_cell(figure, row) for figure in row.figures)] for row in compare(found)]
    codes = dict.fromkeys(code for summary in found for code in summary.outcomes if code != SERVED)
    cells += [[code, *(f"{summary.outcomes.get(code, 0):,}" for summary in found)] for code in codes]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        right = [cell.rjust(wide) for cell, wide in zip(row[1:], widths[1:], strict=True)]
        yield "   ".join([row[0].ljust(widths[0]), *right])


def _cell(figure: Figure, row: Comparison) -> str:
    return " ".join(filter(None, (figure_text(figure.value, row.unit), verdict_text(figure))))
