"""A plan in words: one screen of plain lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from deepinfra.bench.simulate.plan.check import Checked
from deepinfra.bench.simulate.plan.compare import Compared
from deepinfra.bench.simulate.plan.fleet import Fleet, Plan
from deepinfra.bench.simulate.plan.outcome import Outcome
from deepinfra.bench.simulate.plan.sensitivity import OUTPUTS, Sensitivity

__all__ = (
    "LABELS",
    "checked_rows",
    "nbytes_text",
    "outcome_lines",
    "plan_rows",
    "sensitivity_rows",
    "table",
    "title_of",
)


MOST = 15
"""Given figures that a screen has room for."""


def nbytes_text(nbytes: float) -> str:
    """`13.6 MB`, `64.3 PB`."""
    for factor, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _usd(value: float) -> str:
    return f"{value:,.2f} USD"


def _ms(value: float) -> str:
    return f"{1e3 * value:.2f} ms"


LABELS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "decode_tokens_s": ("output tokens/s per decode device", _count),
    "user_tokens_s": ("output tokens/s per user", _count),
    "input_tokens_s": ("prompt tokens/s per prefill device", _count),
    "prefill_tokens_s": ("  of which no cache holds", _count),
    "prefill_per_decode": ("prefill devices per decode device", lambda value: f"{value:.2f}"),
    "prefill_devices": ("prefill devices", _count),
    "decode_devices": ("decode devices", _count),
    "devices": ("devices", _count),
    "revenue_usd_hour": ("revenue per device and hour", _usd),
    "usd_million": ("devices' price per 1M output tokens", _usd),
    "kv_3_days_nbytes": ("KV of 3 days", nbytes_text),
    "kv_7_days_nbytes": ("KV of 7 days", nbytes_text),
    "store_bytes_s": ("read from the store per second", nbytes_text),
    "handoff_nbytes": ("handed from prefill to decode", nbytes_text),
    "batch": ("sequences that decode together", _count),
    "batch_room": ("sequences that would fit", _count),
    "decode_step_s": ("decode step", _ms),
    "prefill_step_s": ("prefill step", _ms),
}
"""What a plan's figures are called, and how they are written."""


def title_of(fleet: Fleet) -> tuple[str, str]:
    """What is planned, and for which requests."""
    traffic = fleet.traffic
    day, prompt, answer = traffic.tokens_day / 1e12, round(traffic.prompt), round(traffic.output)
    return (
        f"{fleet.model.name}: {day:g} T tokens a day, {traffic.hit_rate:.1%} of prompts cached",
        f"prompts of {prompt:,}, answers of {answer:,}, contexts of {traffic.context:,.0f} tokens in the mean",
    )


def outcome_lines(outcome: Outcome, *, inputs: bool = False) -> Iterator[str]:
    """The plan, and whatever else was wanted.

    Args:
        outcome: What to print.
        inputs: Whether to print every figure that the plan is given.
    """
    fleet, plan = outcome.fleet, outcome.plan
    yield from title_of(fleet)
    for kind, device, layout, limit in (
        ("prefill", fleet.prefill, fleet.prefill_layout, plan.prefill_limit),
        ("decode", fleet.decode, fleet.decode_layout, plan.decode_limit),
    ):
        yield f"{kind} on groups of {layout.width} {device.name}; a step waits longest for {limit}"
    yield ""
    yield from table(plan_rows(plan, outcome.compared))
    if outcome.checked is not None:
        yield ""
        requests = outcome.checked.requests
        yield f"simulated: {requests} requests through one pool of each kind, as many a second as at the peak"
        yield from table(checked_rows(plan, outcome.checked))
    if inputs:
        yield ""
        yield from (f"{each.name:36} {each.value:<12.6g} {each.source}" for each in fleet.givens())
    if outcome.moves:
        yield ""
        yield "with 20 % less / 20 % more of"
        yield from table(sensitivity_rows(outcome.moves[:MOST]))


def plan_rows(plan: Plan, compared: Sequence[Compared]) -> list[Sequence[str]]:
    """A head, and a row per figure: its name, the prediction, and, if anything was published, that and the error."""
    rows: list[Sequence[str]] = [("", "predicted", "published", "error")]
    for figure, (label, text) in LABELS.items():
        value = getattr(plan, figure)
        if (figure == "usd_million" and not value) or (figure == "revenue_usd_hour" and not compared):
            continue  # nothing is known of what a device costs, or of what tokens of this model are sold for
        told = next((each for each in compared if each.quantity == figure and not each.implied), None)
        rows.append((label, text(value), *_beside(told, text)))
        implied = (each for each in compared if each.quantity == figure and each.implied)
        rows += [(f"  {each.source}", "", *_beside(each, text)) for each in implied]
    return rows if compared else [row[:2] for row in rows]


def checked_rows(plan: Plan, checked: Checked) -> list[Sequence[str]]:
    """A head, and a row for users, for batches and for prompts."""
    speed, slow = _count(checked.user_tokens_s), _count(checked.user_tokens_s_p10)
    first, late = _ms(checked.first_token_s), _ms(checked.first_token_s_p99)
    mean, most = f"{checked.batch:.1f}", str(checked.batch_most)
    return [
        ("", "planned", "simulated", ""),
        ("output tokens/s per user", _count(plan.user_tokens_s), f"half {speed} or more", f"a tenth below {slow}"),
        ("sequences that decode together", _count(plan.batch), f"{mean} in the mean", f"{most} at most"),
        (
            "first token, of a prefill pool",
            f"step {_ms(plan.prefill_step_s)}",
            f"half {first} or less",
            f"1 in 100 above {late}",
        ),
    ]


def sensitivity_rows(rows: Sequence[Sensitivity]) -> list[Sequence[str]]:
    """A head, and a row per given figure; `–` is no plan."""
    cells: list[Sequence[str]] = [("", "value", *_SHORT)]
    for row in rows:
        moves = [
            "/".join("–" if each is None else f"{each[name]:+.0%}" for each in (row.less, row.more)) for name in OUTPUTS
        ]
        cells.append((row.name, f"{row.value:.4g}", *moves))
    return cells


_SHORT = ("per device", "per user", "ratio", "devices")
"""Names of `OUTPUTS` that fit above columns."""


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns: the first to the left, others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "   ".join(cells).rstrip()


def _beside(each: Compared | None, text: Callable[[float], str]) -> tuple[str, str]:
    return (text(each.published), f"{each.error:+.0%}") if each else ("", "")
