"""Small plots as inline SVG: no scripts, colours and dashes by CSS class, a hover title on every mark.

Drawn here and not by a library: a report must stand alone in one small file and follow its reader's dark mode, and the
libraries that draw SVG either fetch scripts when it is viewed or bake fonts and colours into it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

__all__ = (
    "Axis",
    "Bar",
    "Line",
    "Range",
    "Segment",
    "axis_for",
    "bars",
    "lines",
    "number_text",
    "ranges",
    "seconds_text",
    "stacks",
)

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 360, 50, 14, 10, 36
"""Of a plot, in its own units: a plot is about as wide as a phone, so that its text is never scaled down."""

STRIPS = 48
"""Places along a line where the pointer finds a title."""


class Axis(NamedTuple):
    """A scale: what it measures, from where to where, and how its values are written."""

    label: str
    low: float
    high: float
    log: bool
    text: Callable[[float], str]

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1; what is outside lies at the end."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = log10(max(value, low)), log10(low), log10(high)
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Round values that lie on it."""
        if not self.log:
            step = _round_step((self.high - self.low) / 4)
            first = ceil(self.low / step - 1e-9)
            return [step * each for each in range(first, floor(self.high / step + 1e-9) + 1)]
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        every = max(1, ceil(len(decades) / 6))
        marks = (1,) if len(decades) > 3 else (1, 2, 5)
        found = [mark * 10.0**decade for decade in decades if decade % every == 0 for mark in marks]
        return [each for each in found if self.low * 0.999 <= each <= self.high * 1.001]


class Line(NamedTuple):
    """A curve: style, name, its points by x, and, if it has one, the band (low, high) around each."""

    style: int
    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()


class Range(NamedTuple):
    """A row of marks: style, its label, and (name, value) of each mark, ascending; none says that nothing was there."""

    style: int
    label: str
    marks: Sequence[tuple[str, float]]


class Segment(NamedTuple):
    """A part of a stacked bar: number of its shade, name, and share from 0 to 1."""

    shade: int
    name: str
    share: float


class Bar(NamedTuple):
    """A bar from 0: style, what it is of, its value, from where to where single values lay, and what is said of it."""

    style: int
    label: str
    value: float
    spread: tuple[float, float]
    note: str = ""


def axis_for(
    label: str, values: Sequence[float], *, log: bool = False, text: Callable[[float], str] | None = None
) -> Axis:
    """An axis that holds all values: from 0, or from a round value below the smallest positive one if `log`."""
    text = text or number_text
    if not log:
        high = max((value for value in values), default=0.0) or 1.0
        step = _round_step(high / 4)
        return Axis(label, 0.0, step * ceil(high / step - 1e-9), False, text)
    positive = [value for value in values if value > 0.0] or [1.0]
    low, high = _round_down(min(positive)), _round_up(max(positive))
    return Axis(label, low, high if high > low else 10.0 * low, True, text)


def seconds_text(seconds: float) -> str:
    """`12.3 ms`, `1.23 s`, `4.5 min`."""
    if seconds == 0.0:
        return "0 s"
    for below, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (600.0, 1.0, "s"), (36000.0, 1 / 60, "min")):
        if seconds < below * 0.9995:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds / 3600.0)} h"


def number_text(value: float) -> str:
    """Three digits that count: `0.123`, `12.3`, `12,300`, `1.23 M`."""
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if abs(value) >= 0.9995 * unit:
            return f"{_three(value / unit)}{name}"
    return _three(value)


# -- plots ----------------------------------------------------------------------------------------


def lines(title: str, x: Axis, y: Axis, curves: Sequence[Line]) -> str:
    """Curves over one axis, each with its band if it has one."""
    height = 210
    across, up = _across(x), _up(y, height)
    drawn = [_grid(x, y, height)]
    for curve in curves:
        if curve.band:
            edge = [
                f"{across(at):.1f},{up(high):.1f}" for (at, _), (_, high) in zip(curve.points, curve.band, strict=True)
            ]
            back = [
                f"{across(at):.1f},{up(low):.1f}" for (at, _), (low, _) in zip(curve.points, curve.band, strict=True)
            ]
            drawn.append(f'<polygon class="band c{curve.style}" points="{" ".join(edge + back[::-1])}"/>')
    for curve in curves:
        points = " ".join(f"{across(at):.1f},{up(value):.1f}" for at, value in curve.points)
        drawn.append(f'<polyline class="line c{curve.style}" points="{points}"/>')
    drawn.append(_strips(x, y, height, curves))
    return _svg(title, height, "".join(drawn))


def ranges(
    title: str,
    x: Axis,
    rows: Sequence[tuple[str, Sequence[Range]]],
    *,
    limits: Sequence[tuple[str, float]] = (),
) -> str:
    """Groups of rows, each row with marks joined by a line; `limits` are named lines across all."""
    step, head = 17, 18
    height = TOP + BOTTOM + sum(head + step * len(group) for _, group in rows)
    across = _across(x, left=16)
    drawn = [_grid(x, None, height, left=16)]
    for name, limit in limits:
        at = across(limit)
        drawn.append(f'<g><line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        drawn.append(f"<title>{escape(name)}: at most {escape(x.text(limit))}</title></g>")
    y = float(TOP)
    for name, group in rows:
        drawn.append(f'<text class="row" x="16" y="{y + 13:.0f}">{escape(name)}</text>')
        y += head
        for row in group:
            drawn.append(_marks(row, x, across, y + step / 2))
            y += step
    return _svg(title, height, "".join(drawn))


def stacks(title: str, x: Axis, rows: Sequence[tuple[str, Sequence[Segment]]]) -> str:
    """One bar per row, its segments side by side."""
    height = TOP + BOTTOM + 44 * len(rows)
    across = _across(x, left=16)
    drawn = [_grid(x, None, height, left=16)]
    for index, (name, segments) in enumerate(rows):
        y, at = TOP + 44 * index, 0.0
        drawn.append(f'<text class="row" x="16" y="{y + 13}">{escape(name)}</text>')
        for segment in segments:
            begin, end = across(at), across(at + segment.share)
            at += segment.share
            told = f"{escape(segment.name)}: {100 * segment.share:.1f} %"
            bar = f'<rect class="t{segment.shade}" x="{begin:.1f}" y="{y + 19}" width="{end - begin:.1f}" height="18"/>'
            drawn.append(f"<g>{bar}<title>{told}</title></g>")
    return _svg(title, height, "".join(drawn))


def bars(title: str, x: Axis, rows: Sequence[Bar]) -> str:
    """One bar per row, below its label and note; a thin line spans its single values."""
    step = 34
    height = TOP + BOTTOM + step * len(rows)
    across = _across(x, left=16)
    drawn = [_grid(x, None, height, left=16)]
    for index, row in enumerate(rows):
        y, end = TOP + step * index, across(row.value)
        told = f"{row.label}: {x.text(row.value)}" + (f", {row.note}" if row.note else "")
        drawn.append(f'<text class="row" x="16" y="{y + 12}">{escape(told)}</text>')
        bar = f'<rect class="mark c{row.style}" x="16" y="{y + 16}" width="{max(1.0, end - 16):.1f}" height="12"/>'
        low, high = (across(value) for value in row.spread)
        spread = f'<line class="limit" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 22}" y2="{y + 22}"/>'
        between = f"{x.text(row.spread[0])} to {x.text(row.spread[1])}"
        drawn.append(f"<g>{bar}{spread}<title>{escape(told)} ({escape(between)})</title></g>")
    return _svg(title, height, "".join(drawn))


# -- parts of a plot ------------------------------------------------------------------------------


def _svg(title: str, height: float, inside: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{inside}</svg>"
    )


def _across(x: Axis, *, left: int = LEFT) -> Callable[[float], float]:
    return lambda value: left + (WIDTH - left - RIGHT) * x.at(value)


def _up(y: Axis, height: float) -> Callable[[float], float]:
    return lambda value: height - BOTTOM - (height - TOP - BOTTOM) * y.at(value)


def _grid(x: Axis, y: Axis | None, height: float, *, left: int = LEFT) -> str:
    across, foot, drawn = _across(x, left=left), height - BOTTOM, []
    for tick in x.ticks():
        at = across(tick)
        drawn.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{foot:.0f}"/>')
        drawn.append(_tick(x.text(tick), at, foot + 14))
    if y is not None:
        up = _up(y, height)
        for tick in y.ticks():
            at = up(tick)
            drawn.append(f'<line class="grid" x1="{left}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            drawn.append(f'<text x="{left - 5}" y="{at + 4:.1f}" text-anchor="end">{escape(y.text(tick))}</text>')
    middle = left + (WIDTH - left - RIGHT) / 2
    drawn.append(f'<text x="{middle:.0f}" y="{height - 5:.0f}" text-anchor="middle">{escape(x.label)}</text>')
    return "".join(drawn)


def _tick(text: str, at: float, y: float) -> str:
    """A label below an axis, kept inside the drawing."""
    if at < 30:
        anchor, at = "start", max(2.0, at - 14)
    elif at > WIDTH - 30:
        anchor, at = "end", min(WIDTH - 2.0, at + 14)
    else:
        anchor = "middle"
    return f'<text x="{at:.1f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def _strips(x: Axis, y: Axis, height: float, curves: Sequence[Line]) -> str:
    """Invisible strips that tell, under the pointer, each curve's value there."""
    drawn, across = [], _across(x)
    wide = (WIDTH - LEFT - RIGHT) / STRIPS
    starts = [[at for at, _ in curve.points] for curve in curves]
    for strip in range(STRIPS):
        share = (strip + 0.5) / STRIPS
        value = x.low * (x.high / x.low) ** share if x.log else x.low + (x.high - x.low) * share
        told = [f"{x.label}: {x.text(value)}"]
        for curve, at in zip(curves, starts, strict=True):
            if at and across(at[0]) - wide <= across(value) <= across(at[-1]) + wide:
                index = max(0, bisect_right(at, value) - 1)
                text = f"{curve.name}: {y.text(curve.points[index][1])}"
                if curve.band:
                    low, high = curve.band[index]
                    text += f" ({y.text(low)} to {y.text(high)})"
                told.append(text)
        title = escape("\n".join(told))
        box = f'x="{LEFT + strip * wide:.1f}" y="{TOP}" width="{wide:.1f}" height="{height - TOP - BOTTOM}"'
        drawn.append(f'<g><rect class="strip" {box}/><title>{title}</title></g>')
    return "".join(drawn)


def _marks(row: Range, x: Axis, across: Callable[[float], float], y: float) -> str:
    if not row.marks:
        return f'<text x="24" y="{y + 4:.0f}">{escape(row.label)}: none</text>'
    told = ", ".join(f"{name} {x.text(value)}" for name, value in row.marks)
    ends = [across(value) for _, value in row.marks]
    drawn = [f'<line class="join c{row.style}" x1="{ends[0]:.1f}" x2="{ends[-1]:.1f}" y1="{y}" y2="{y}"/>']
    for index, at in enumerate(ends):
        size = 2.6 + 1.1 * index
        drawn.append(f'<path class="mark c{row.style}" d="{_shape(row.style, at, y, size)}"/>')
    reach = f'x="{ends[0] - 6:.1f}" y="{y - 8}" width="{ends[-1] - ends[0] + 12:.1f}" height="16"'
    drawn.append(f'<rect class="strip" {reach}/>')
    return f"<g>{''.join(drawn)}<title>{escape(row.label)}: {escape(told)}</title></g>"


def _shape(style: int, x: float, y: float, r: float) -> str:
    """Circle, square, diamond, triangles: who sees no colours tells them apart by these."""
    corners = (
        [],
        [(-r, -r), (r, -r), (r, r), (-r, r)],
        [(0, -1.4 * r), (1.4 * r, 0), (0, 1.4 * r), (-1.4 * r, 0)],
        [(0, -1.3 * r), (1.2 * r, r), (-1.2 * r, r)],
        [(0, 1.3 * r), (1.2 * r, -r), (-1.2 * r, -r)],
        [(1.3 * r, 0), (-r, 1.2 * r), (-r, -1.2 * r)],
    )[style % 6]
    if not corners:
        return f"M{x - r:.1f} {y:.1f}a{r:.1f} {r:.1f} 0 1 0 {2 * r:.1f} 0a{r:.1f} {r:.1f} 0 1 0 {-2 * r:.1f} 0z"
    return "M" + "L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in corners) + "z"


# -- numbers --------------------------------------------------------------------------------------


def _three(value: float) -> str:
    if value == 0.0:
        return "0"
    digits = max(0, 2 - floor(log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _round_step(value: float) -> float:
    """1, 2 or 5 times a power of ten, at least `value`."""
    power = 10.0 ** floor(log10(value))
    return next(power * mark for mark in (1, 2, 5, 10) if power * mark >= value * (1 - 1e-9))


def _round_down(value: float) -> float:
    power = 10.0 ** floor(log10(value))
    return max(power * mark for mark in (1, 2, 5) if power * mark <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    return _round_step(value)
