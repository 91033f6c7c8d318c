"""`deepinfra top`: what a running server is doing, now."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from math import isinf
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfra.bench.scrape import Between, Scrape, read
from deepinfra.cli.failures import sentence_for

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ("top",)

_WINDOW_S = 30.0
"""Latencies, hit rates and rates are those of so many last seconds."""


def top(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://127.0.0.1:8000",
    every: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end, as without a terminal.")] = False,
    api_key: Annotated[
        str | None, typer.Option(help="Sent as bearer token, for a proxy that asks; the server itself does not.")
    ] = None,
) -> None:
    """Show what a running server is doing: queues by length, steps and their budget, latencies, cache, refusals.

    Latencies, rates and hit rates are those of the last half minute; in a single picture latencies and hit rates are
    those since the server's start, and rates those of the time between two looks.
    """
    from deepinfra.interfaces.given import SystemClock

    clock = SystemClock()

    def look() -> Scrape:
        return read(url, clock.now(), api_key=api_key)

    first = look()
    wait = threading.Event().wait
    if once or not sys.stdout.isatty():
        wait(every)
        second = look()
        _print(_picture(url, Between(None, second), Between(first, second)))
        return
    _live(url, first, look, lambda: wait(every))


def _live(url: str, first: Scrape, look: Callable[[], Scrape], wait: Callable[[], object]) -> None:
    from rich.live import Live
    from rich.text import Text

    from deepinfra.errors import EngineError

    looks = deque([first])
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            while len(looks) > 2 and looks[-1].at - looks[1].at >= _WINDOW_S:
                looks.popleft()
            between = Between(looks[0] if len(looks) > 1 else None, looks[-1])
            live.update(_picture(url, between, between), refresh=True)
            wait()
            try:
                looks.append(look())
            except (OSError, EngineError) as error:  # it may come back
                live.update(Text(sentence_for(error) or f"{error}"), refresh=True)


def _print(picture: Group) -> None:
    from rich.console import Console

    # A pipe has no width; lines that are cut would be of no use to what reads them.
    console = Console() if sys.stdout.isatty() else Console(width=160, no_color=True)
    console.print(picture)


# -- the picture ----------------------------------------------------------------------------------


def _picture(url: str, over: Between, lately: Between) -> Group:
    """Tables for each model and pool; `over` is what latencies are taken over, `lately` what rates are."""
    from rich.console import Group

    parts: list[Table | str] = []
    last = over.last
    for model in last.labels("engine_state", "model"):
        parts.append(_model(url, model, over, lately))
        for pool in last.labels("sequences", "pool", model=model):
            tables = [make(model, pool, over, lately) for make in (_pool, _buckets, _tenants)]
            parts += [part for table in tables if table.row_count for part in ("", table)]
    return Group(*parts)


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _model(url: str, model: str, over: Between, lately: Between) -> Table:
    """State, rates, latencies and hit rates of one engine."""
    state = next((s for s in over.last.labels("engine_state", "state", model=model)
                  if over.now("engine_state", model=model, state=s)), "unknown")  # fmt: skip
    table = _table(f"{model} at {url}: {state}", "p50", "p95", "p99")
    for name, metric in (
        ("TTFT", "time_to_first_token_seconds"),
        ("ITL", "inter_token_seconds"),
        ("in the queue", "queue_wait_seconds"),
    ):
        table.add_row(name, *map(_s, over.quantiles(metric, (0.5, 0.95, 0.99), model=model)))
    generated = lately.per_s("generated_tokens_total", model=model)
    prompts = lately.per_s("prompt_tokens_total", model=model)
    table.add_row(f"tokens/s: {_n(generated)} generated, {_n(prompts)} of prompts")
    whole = over.grown("prompt_tokens_total", model=model)
    tiers = over.last.labels("cached_tokens_total", "tier", model=model)
    shares = ((t, over.share(over.grown("cached_tokens_total", model=model, tier=t), whole)) for t in tiers)
    table.add_row(f"cached: {', '.join(f'{tier} {_percent(share)}' for tier, share in shares) or 'nothing'}")
    return table


def _pool(model: str, pool: str, over: Between, lately: Between) -> Table:
    """What one pool runs, and how its steps keep to their budget."""
    at = {"model": model, "pool": pool}
    table = _table(
        "pool", "running", "waiting", "backlog", "blocks free", "cached", "steps/s", "outside", "preempted",
        "budget used", "took/foretold", "error p50", "p95", "refused", "tenants'", "shed", "late",
    )  # fmt: skip
    measured, budget, predicted = (
        over.grown("aimed_step_seconds_total", what=what, **at) for what in ("measured", "budget", "predicted")
    )
    total = over.now("blocks", state="total", **at)
    free, cached = (over.share(over.now("blocks", state=s, **at), total) for s in ("free", "cached"))
    ratio, outside = over.share(measured, predicted), over.grown("overhead_seconds_total", **at)
    table.add_row(
        pool,
        _n(over.now("sequences", state="running", **at)),
        _n(over.now("sequences", state="waiting", **at)),
        _s(over.now("backlog_seconds", **at)),
        _percent(free),
        _percent(cached),
        _n(lately.per_s("steps_total", **at)),
        _percent(over.share(outside, (outside or 0.0) + (over.grown("step_seconds_sum", **at) or 0.0))),
        _n(over.grown("preemptions_total", **at)),
        _percent(over.share(measured, budget)),
        "-" if ratio is None else f"{ratio:.2f}",
        _percent(over.now("step_prediction_error", quantile="0.5", **at)),
        _percent(over.now("step_prediction_error", quantile="0.95", **at)),
        _n(over.grown("refused_total", limit="server", **at)),
        _n(over.grown("refused_total", limit="tenant", **at)),
        _n(over.grown("shed_total", reason="overload", **at)),
        _n(over.grown("shed_total", reason="deadline", **at)),
    )
    return table


def _buckets(model: str, pool: str, over: Between, lately: Between) -> Table:
    """Queues by uncached length."""
    bound = over.now("overtakes_bound", model=model, pool=pool)
    most = "passed most" if bound is None else f"passed most (of {bound:.0f})"
    table = _table("prompts from", "waiting", "tokens", "oldest", "opened", "tokens/s", "passed", most)
    for least in over.last.labels("bucket_waiting", "bucket", model=model, pool=pool):
        at = {"model": model, "pool": pool, "bucket": least}
        table.add_row(
            f"{int(least):,}",
            _n(over.now("bucket_waiting", **at)),
            _n(over.now("bucket_waiting_tokens", **at)),
            _s(over.now("bucket_oldest_seconds", **at)),
            _n(over.grown("bucket_opened_total", **at)),
            _n(lately.per_s("bucket_tokens_total", **at)),
            _n(over.grown("bucket_overtaken_total", **at)),
            _n(over.now("bucket_overtaken_most", **at)),
        )
    return table


def _tenants(model: str, pool: str, over: Between, lately: Between) -> Table:
    """Tenants, where the server tells them by name."""
    table = _table("tenant", "waiting", "tokens", "running", "opened", "work s/s", "refused", "shed")
    names = over.last.labels("tenant_waiting", "tenant", model=model, pool=pool)
    for name in names if names != ["*"] else ():
        at = {"model": model, "pool": pool, "tenant": name}
        counted = [over.grown(f"tenant_{what}_total", **at) for what in ("opened", "refused", "shed")]
        table.add_row(
            "all others" if name == "*" else name,
            *(_n(over.now(f"tenant_{what}", **at)) for what in ("waiting", "waiting_tokens", "running")),
            _n(counted[0]),
            _n(lately.per_s("tenant_served_seconds_total", **at)),
            *map(_n, counted[1:]),
        )
    return table


def _n(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _s(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if isinf(seconds):
        return "> 60 s"
    return f"{seconds * 1000:.0f} ms" if 0 < seconds < 1 else f"{seconds:.1f} s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
