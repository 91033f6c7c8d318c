"""A report of simulations: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from deepinfra import __version__
from deepinfra.bench.simulate.compare import SAME, Comparison, Figure, Unit, compare, summaries
from deepinfra.bench.simulate.figures import Plot, figures
from deepinfra.bench.simulate.plots import number_text, seconds_text
from deepinfra.bench.simulate.report import BucketSummary, Spread, Summary
from deepinfra.bench.simulate.results import SimulationResult

__all__ = ("STYLE", "document", "drawn", "figure_text", "page", "section", "table", "verdict_text")

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #59636e; --rule: #d8dee4; --wash: #f3f5f7;
  --c0: #0072b2; --c1: #c84e00; --c2: #008060; --c3: #b0518c; --c4: #8a6d00; --c5: #4b4b4b;
  --t0: #0072b2; --t1: #56b4e9; --t2: #e69f00; --t3: #cc79a7; --t4: #009e73; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ec; --soft: #9aa5b0; --rule: #333a42;
  --wash: #1d2227; --c0: #56b4e9; --c1: #f0883e; --c2: #2fc69c; --c3: #e59ac7; --c4: #e6c229; --c5: #c0c6cc; } }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .25rem; }
p, dd, caption { color: var(--soft); } p { margin: .25rem 0 .75rem; max-width: 46rem; }
.key { position: sticky; top: 0; z-index: 1; background: var(--paper); border-bottom: 1px solid var(--rule);
  padding: .5rem 0; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
.key svg { display: inline-block; width: 2.2rem; height: .9rem; vertical-align: middle; margin-right: .4rem; }
.plots { display: grid; gap: 1rem 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; max-width: 36rem; } figcaption { font-size: .9rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--soft); } svg text.row { fill: var(--ink); }
.grid { stroke: var(--rule); stroke-width: .7; } .strip { fill: transparent; }
.line { fill: none; stroke-width: 1.7; stroke-linejoin: round; } .join { stroke-width: 1.3; opacity: .55; }
.t0 { fill: var(--t0); } .t1 { fill: var(--t1); } .t2 { fill: var(--t2); } .t3 { fill: var(--t3); }
.t4 { fill: var(--t4); } .band { stroke: none; opacity: .16; }
.limit { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 3 3; }
.line.c1 { stroke-dasharray: 6 2; } .line.c2 { stroke-dasharray: 2 2; } .line.c3 { stroke-dasharray: 8 2 2 2; }
.line.c4 { stroke-dasharray: 10 4; } .line.c5 { stroke-dasharray: 1 3; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 8rem; position: sticky; left: 0;
  background: var(--paper); }
th { font-weight: 600; }
caption { text-align: left; padding: .25rem 0; } .better { color: var(--c0); } .worse { color: var(--c1); }
dl { font-size: .9rem; } dt { margin-top: .6rem; font-weight: 600; } dd { margin: 0; max-width: 60rem; }
small { color: var(--soft); font-weight: 400; } footer { margin-top: 2rem; border-top: 1px solid var(--rule); }
""" + "\n".join(
    f".line.c{n}, .join.c{n} {{ stroke: var(--c{n}); }} .mark.c{n}, .band.c{n} {{ fill: var(--c{n}); }}"
    for n in range(6)
)

SIGNS = {"better": "▲ better", "worse": "▼ worse", "same": "same"}


def page(results: Sequence[SimulationResult], *, price: float | None = None) -> str:
    """The whole file; the first simulation is what the others are compared with.

    Args:
        results: What was measured, at most `compare.MOST_COMPARED`.
        price: Of a device for an hour, in any money.

    Raises:
        ValueError: See `compare.summaries`.
    """
    found = summaries(results, price=price)
    names = [summary.name for summary in found]
    title = f"Simulation: {' and '.join(names) if len(names) < 3 else ', '.join(names)}"
    plots = figures(results, found)
    sections = [
        _head(title, found),
        section("In short", _SHORT if len(found) > 1 else "", _comparison(compare(found), names)),
        *(section(name, words, drawn(inside)) for name, words, inside in plots),
        section("By uncached prompt length", _BUCKETS, "".join(map(_buckets, found))),
        section("By tenant", "", "".join(_tenants(summary) for summary in found if summary.tenants)),
        section("Pools", "Means over the time simulated.", "".join(map(_pools, found))),
        section("How requests ended", "", _outcomes(found)),
        section("What was simulated", "", _settings(found)),
        f"<footer><p>{_METHOD}</p><p>deepinfra {escape(__version__)}</p></footer>",
    ]
    return document(title, sections)


def document(title: str, sections: Sequence[str]) -> str:
    """A whole file of such sections, which are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def figure_text(value: float | None, unit: Unit) -> str:
    """A figure with its unit; `–` for none."""
    if value is None:
        return "–"
    match unit:
        case "s":
            return seconds_text(value)
        case "share":
            return f"{100.0 * value:.1f} %"
        case "tok/s":
            return f"{number_text(value)} tok/s"
        case _:
            return number_text(value)


_SHORT = (
    "Ratios are to the first column. ▲ better, ▼ worse; figures within "
    f"{100 * SAME:.0f} % of each other are called the same."
)
_BUCKETS = (
    "A request's bucket is told by the prompt tokens that no cache held as it arrived, so where caches differ buckets "
    "hold different requests: look at their numbers. n is the number of values behind the percentiles."
)
_METHOD = (
    "Times are virtual. Percentiles are by nearest rank: each is a value that occurred; with fewer than 100 values p99 "
    "is the worst of them. Percentiles of times between tokens are upper ends of bins of a histogram. Costs "
    "charge every device for the whole time, idle or not. Refused requests have no first token: no percentile has them."
)


# -- sections -------------------------------------------------------------------------------------


def section(name: str, words: str, inside: str) -> str:
    """A heading, words below it, and what is HTML already; nothing without that."""
    if not inside:
        return ""
    return f"<section><h2>{escape(name)}</h2>{f'<p>{escape(words)}</p>' if words else ''}{inside}</section>"


def _head(title: str, found: Sequence[Summary]) -> str:
    keys = "".join(
        f'<span><svg viewBox="0 0 36 12" aria-hidden="true"><polyline class="line c{index}" points="1,6 35,6"/></svg>'
        f"{escape(summary.name)}</span>"
        for index, summary in enumerate(found)
    )
    first = found[0]
    words = f"{first.requests:,} requests, {number_text(first.prompt_tokens)} prompt tokens"
    return f'<h1>{escape(title)}</h1><p>{words}, {seconds_text(first.span_s)}</p><div class="key">{keys}</div>'


def drawn(plots: Sequence[Plot]) -> str:
    """Plots side by side, each with its caption."""
    each = "".join(f"<figure><figcaption>{escape(name)}</figcaption>{svg}</figure>" for name, svg in plots)
    return f'<div class="plots">{each}</div>' if plots else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Cells are HTML; heads and caption are text."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{told}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _comparison(rows: Sequence[Comparison], names: Sequence[str]) -> str:
    heads = ["by uncached prompt tokens", names[0], *(head for name in names[1:] for head in (name, ""))]
    cells = [
        [escape(row.name), _figure(row.figures[0], row.unit)]
        + [cell for figure in row.figures[1:] for cell in (_figure(figure, row.unit), _verdict(figure))]
        for row in rows
    ]
    return table(heads, cells)


def _figure(figure: Figure, unit: Unit) -> str:
    text = escape(figure_text(figure.value, unit))
    return text if figure.n is None or figure.n >= 100 else f"<small>n={figure.n}</small> {text}"


def _verdict(figure: Figure) -> str:
    return f'<span class="{figure.verdict or ""}">{verdict_text(figure)}</span>'


def verdict_text(figure: Figure) -> str:
    """`×0.20 ▲ better`; empty for the first simulation."""
    ratio = "" if figure.ratio is None else f"×{ratio_text(figure.ratio)}"
    return " ".join(filter(None, (ratio, SIGNS[figure.verdict] if figure.verdict else "")))


def ratio_text(ratio: float) -> str:
    """`0.027`, `0.20`, `12.3`."""
    return f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.2f}" if ratio < 10 else number_text(ratio)


def _buckets(summary: Summary) -> str:
    return _requests("uncached tokens", (*summary.buckets, summary.all), summary.name)


def _tenants(summary: Summary) -> str:
    return _requests("tenant", summary.tenants, summary.name)


def _requests(kind: str, buckets: Sequence[BucketSummary], caption: str) -> str:
    heads = [kind, "requests", "served", "output tokens", "n"]
    heads += [f"first token {each}" for each in ("p50", "p90", "p99", "worst")]
    heads += [f"between tokens {each}" for each in ("p50", "p90", "p99", "worst")]
    heads += ["whole answer p50", "most overtaken"]
    rows = []
    for bucket in buckets:
        n = 0 if bucket.first_token_s is None else bucket.first_token_s.n
        row = [escape(bucket.name), f"{bucket.requests:,}", f"{bucket.served:,}", f"{bucket.output_tokens:,}", f"{n:,}"]
        row += [*_spread(bucket.first_token_s), *_spread(bucket.gap_s)]
        row.append("–" if bucket.whole_s is None else seconds_text(bucket.whole_s.p50))
        row.append("–" if bucket.overtaken is None else f"{bucket.overtaken.worst:,.0f}")
        rows.append(row)
    return table(heads, rows, caption)


def _spread(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["–"] * 4
    return [seconds_text(each) for each in (spread.p50, spread.p90, spread.p99, spread.worst)]


def _pools(summary: Summary) -> str:
    heads = ["pool", "busy", "waiting", "most", "running", "blocks used", "most", "prompt tokens", "output tokens"]
    rows = [
        [
            escape(pool.name),
            f"{100 * pool.busy:.1f} %",
            number_text(pool.waiting),
            f"{pool.waiting_worst:,}",
            number_text(pool.running),
            f"{100 * pool.blocks_used:.1f} %",
            f"{100 * pool.blocks_used_worst:.1f} %",
            f"{pool.prompt_tokens:,}",
            f"{pool.output_tokens:,}",
        ]
        for pool in summary.pools
    ]
    return table(heads, rows, summary.name)


def _outcomes(found: Sequence[Summary]) -> str:
    codes = dict.fromkeys(code for summary in found for code in summary.outcomes)
    rows = [[escape(_outcome(code)), *(f"{summary.outcomes.get(code, 0):,}" for summary in found)] for code in codes]
    return table(["", *(summary.name for summary in found)], rows)


def _outcome(code: str) -> str:
    return "all tokens given" if code == "length" else code


def _settings(found: Sequence[Summary]) -> str:
    own: list[tuple[str, Callable[[Summary], str]]] = [
        ("devices", lambda each: f"{each.devices:,}"),
        ("price of a device for an hour", lambda each: "not given" if each.price is None else f"{each.price:g}"),
        ("steps", lambda each: f"{each.steps:,}"),
        ("virtual time", lambda each: seconds_text(each.span_s)),
        ("real time", lambda each: seconds_text(each.took_s)),
        (
            "published bound of overtakes",
            lambda each: "none" if each.max_overtakes is None else str(each.max_overtakes),
        ),
        ("predicted step time, median error", lambda each: figure_text(each.error_median, "share")),
        ("predicted step time, p95 of errors", lambda each: figure_text(each.error_p95, "share")),
    ]
    names = dict.fromkeys(name for summary in found for name in summary.settings)
    rows = [[escape(name), *(escape(summary.settings.get(name, "–")) for summary in found)] for name in names]
    rows += [[escape(name), *(escape(look(summary)) for summary in found)] for name, look in own]
    return table(["", *(summary.name for summary in found)], rows)
