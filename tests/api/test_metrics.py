from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from deepinfra import ApiKey
from deepinfra.api.app import asgi
from deepinfra.core.kv import KVStats, TierStats
from deepinfra.core.step import StepPlan, StepResult
from deepinfra.engine import Engine, Pool
from deepinfra.engine.stats import EngineStats
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.executor import StepHandle
from deepinfra.kvstores import MemoryStore, SsdStore
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.schedulers.tenants import Tenant
from deepinfra.testing.client import Client
from deepinfra.testing.tiny import TinyRecipe

CHAT = "/v1/chat/completions"


class Samples:
    """A scrape: `samples("name_total", tier="ram")` is the one value with these labels."""

    def __init__(self, text: str) -> None:
        self.all = [sample for family in parse_text(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        (value,) = (s.value for s in self.all if s.name == f"deepinfra_{name}" and labels.items() <= s.labels.items())
        return float(value)


async def scrape(client: Client) -> Samples:
    async with client.request("GET", "/metrics") as response:
        assert await response.started() == 200
        assert response.headers["content-type"].startswith("text/plain")
        return Samples((await response.read()).decode())


async def test_a_scrape_says_what_the_engine_says(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine))
        for _ in range(3):
            assert (await client.post(CHAT, kit.chat("x" * 50, n=2)))[0] == 200
        await kit.settled(engine)
        samples, stats = await scrape(client), engine.stats()
    assert samples("prompt_tokens_total", model="toy") == stats.prompt_tokens > 0
    assert samples("generated_tokens_total", model="toy") == stats.generated_tokens > 0
    assert samples("cached_tokens_total", model="toy", tier="device") == stats.cached_tokens["device"] > 0
    assert sum(s.value for s in samples.all if s.name == "deepinfra_answers_total") == sum(stats.requests.values()) == 6
    (pool,) = stats.pools
    assert samples("steps_total", model="toy", pool="pool") == pool.steps > 0
    assert samples("blocks", state="total") == pool.blocks_total
    assert samples("blocks", state="free") == pool.blocks_free
    assert samples("sequences", state="running") == 0
    assert samples("engine_state", state="ready") == 1
    assert samples("engine_state", state="failed") == 0


async def test_histograms_are_cumulative_and_sum_up(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine))
        assert (await client.post(CHAT, kit.chat(n=3)))[0] == 200
        samples, stats = await scrape(client), engine.stats()
    for name, snapshot in (("time_to_first_token_seconds", stats.ttft), ("step_seconds", stats.pools[0].step_seconds)):
        buckets = [s.value for s in samples.all if s.name == f"deepinfra_{name}_bucket"]
        assert buckets == sorted(buckets)
        assert len(buckets) == len(snapshot.bounds) + 1
        assert buckets[-1] == samples(f"{name}_count") == snapshot.count > 0
        assert samples(f"{name}_sum") == snapshot.total


async def test_what_operators_need_is_there_before_the_first_request(engine: Engine) -> None:
    async with engine:
        names = {sample.name.removeprefix("deepinfra_") for sample in (await scrape(Client(asgi(engine)))).all}
    assert {
        "time_to_first_token_seconds_count",
        "inter_token_seconds_count",
        "queue_wait_seconds_count",
        "loop_lag_seconds_count",
        "step_seconds_count",
        "sequences",
        "blocks",
        "steps_total",
        "overhead_seconds_total",
        "step_gap_seconds_count",
        "prompt_tokens_total",
    } <= names


@pytest.mark.parametrize("tier", ["ssd", "ram"])
async def test_a_store_is_told_of_as_a_whole_and_as_the_tier_it_is(kit: Any, tmp_path: Path, tier: str) -> None:
    store = SsdStore(tmp_path) if tier == "ssd" else MemoryStore()
    async with Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor(num_blocks=64), store=store), name="toy") as engine:
        client = Client(asgi(engine))
        assert (await client.post(CHAT, kit.chat("x" * 50)))[0] == 200
        await engine.pools[0].settle()
        samples, stats = await scrape(client), store.stats()
    assert stats.records > 10
    for kind, labels in (("store", {}), ("tier", {"tier": tier})):
        assert samples(f"{kind}_records", **labels) == stats.records
        assert samples(f"{kind}_bytes", what="used", **labels) == stats.nbytes
        assert samples(f"{kind}_events_total", event="saved", **labels) == stats.saved
        assert samples(f"{kind}_events_total", event="renewed", **labels) == stats.renewed
        assert samples(f"{kind}_written_bytes_total", what="saved", **labels) == stats.saved_nbytes
        assert samples(f"{kind}_written_bytes_total", what="all", **labels) == stats.written_nbytes
        assert samples(f"{kind}_write_amplification", **labels) == stats.write_amplification >= 1
    assert samples("tier_up", tier=tier) == 1


async def test_engines_are_told_apart_by_model(kit: Any) -> None:
    one, two = kit.build(), kit.build()
    async with one, two:
        client = Client(asgi({"one": one, "two": two}))
        assert (await client.post(CHAT, kit.chat(model="two")))[0] == 200
        samples = await scrape(client)
    assert samples("prompt_tokens_total", model="one") == 0
    assert samples("prompt_tokens_total", model="two") > 0


async def test_openmetrics_is_spoken_when_asked_for(engine: Engine) -> None:
    async with engine:
        headers = [("accept", "application/openmetrics-text; version=1.0.0")]
        async with Client(asgi(engine)).request("GET", "/metrics", headers=headers) as response:
            text = (await response.read()).decode()
            assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert list(parse_openmetrics(text))


def test_every_number_of_the_engine_is_exported() -> None:
    """A new field of `EngineStats` or `PoolStats` must get a metric, or be named here."""
    import inspect

    from deepinfra.api import metrics
    from deepinfra.engine.stats import PoolStats

    source = inspect.getsource(metrics)
    fields: Mapping[type, set[str]] = {
        EngineStats: {"waiting", "running"},  # told per pool
        PoolStats: {"state"},  # told per engine
        KVStats: set(),
        TierStats: set(),
    }
    for record, elsewhere in fields.items():
        for name in record.__slots__:
            assert name in elsewhere or f".{name}" in source or f'"{name}"' in source, (record, name)


# -- the scheduler --------------------------------------------------------------------------------


def bucketed(executor: Any = None, **settings: Any) -> Engine:
    return Engine(TinyRecipe(), Pool(Bucketed(**settings), executor or ToyExecutor(num_blocks=256)), name="toy")


async def test_each_bucket_tells_what_waits_and_how_it_is_treated(kit: Any) -> None:
    executor = kit.Gated(shut=True, max_seqs=1)
    engine = bucketed(executor, edges=(64,))
    async with engine, anyio.create_task_group() as group:
        client = Client(asgi(engine))
        group.start_soon(client.post, CHAT, kit.chat())
        await kit.until(lambda: executor.steps)
        for text in ("hello", "x" * 100):
            group.start_soon(client.post, CHAT, kit.chat(text))
        await kit.until(lambda: engine.stats().waiting + engine.stats().running == 3)
        samples, (pool,) = await scrape(client), engine.stats().pools
        executor.gate.set()
        await kit.settled(engine)
        after, (then,) = await scrape(client), engine.stats().pools
    short, long = pool.scheduler.buckets
    assert (short.least, long.least) == (0, 64)
    assert samples("bucket_waiting", bucket="64") == long.waiting == 1
    assert samples("bucket_waiting_tokens", bucket="64") == long.waiting_tokens > 64
    assert samples("backlog_tokens") == short.waiting_tokens + long.waiting_tokens
    assert after("bucket_waiting", bucket="64") == after("bucket_oldest_seconds", bucket="64") == 0
    assert after("bucket_opened_total", bucket="64") == 1
    assert after("bucket_opened_total", bucket="0") == 2
    assert after("bucket_tokens_total", bucket="64") == then.scheduler.buckets[1].tokens > 64


class _Timed(StepHandle):
    def __init__(self, inner: StepHandle, seconds: float) -> None:
        self.masks, self._inner, self._seconds = inner.masks, inner, seconds

    async def result(self) -> StepResult:
        return (await self._inner.result())._replace(seconds=self._seconds)


class TimedExecutor(ToyExecutor):
    """Says that steps took as long as a model's do."""

    def submit(self, plan: StepPlan) -> StepHandle:
        return _Timed(super().submit(plan), 0.01 + 0.001 * sum(item.length for item in plan.items))


async def test_steps_tell_what_they_may_take_what_was_foretold_and_what_they_took(kit: Any) -> None:
    engine = bucketed(TimedExecutor(num_blocks=256))
    async with engine:
        client = Client(asgi(engine))
        for number in range(12):
            assert (await client.post(CHAT, kit.chat(chr(97 + number) * (1 + 40 * number))))[0] == 200
        await kit.settled(engine)
        samples, (pool,) = await scrape(client), engine.stats().pools
    told = [samples("aimed_step_seconds_total", what=what) for what in ("budget", "predicted", "measured")]
    stats = pool.scheduler
    assert told == [stats.budget_s, stats.predicted_s, stats.measured_s]
    assert all(told)
    assert told[1] == pytest.approx(told[2], rel=0.1)
    assert samples("overtakes_bound") == stats.max_overtakes
    assert samples("wait_steps_bound") == stats.max_wait_steps


@pytest.mark.parametrize("by_name", [True, False])
async def test_tenants_are_told_by_name_only_where_that_is_wanted(kit: Any, by_name: bool) -> None:
    engine = bucketed(tenants={"ann": Tenant(max_queue_tokens=10)})
    keys = [ApiKey.of(f"sk-{name}-0123456789", name=name) for name in ("ann", "bob")]
    app = asgi(engine, keys=keys, tenant_metrics=by_name)
    async with engine:
        for name, wanted in (("ann", 200), ("bob", 200), ("bob", 200)):
            client = Client(app, headers=[("authorization", f"Bearer sk-{name}-0123456789")])
            assert (await client.post(CHAT, kit.chat()))[0] == wanted
        await kit.settled(engine)
        samples = await scrape(Client(app))
    names = {s.labels["tenant"] for s in samples.all if "tenant" in s.labels}
    if by_name:
        assert names == {"ann", "bob"}
        assert (samples("tenant_opened_total", tenant="ann"), samples("tenant_opened_total", tenant="bob")) == (1, 2)
    else:
        assert names == {"*"}
        assert samples("tenant_opened_total", tenant="*") == 3


async def test_refusals_are_counted_by_whose_limit_was_met(kit: Any) -> None:
    executor = kit.Gated(shut=True, max_seqs=1)
    engine = bucketed(executor, max_queue=2, tenants={"*": Tenant(max_queue=2)})
    async with engine, anyio.create_task_group() as group:
        client = Client(asgi(engine))
        group.start_soon(client.post, CHAT, kit.chat())
        group.start_soon(client.post, CHAT, kit.chat("and another"))
        await kit.until(lambda: executor.steps and engine.stats().waiting + engine.stats().running == 2)
        assert (await client.post(CHAT, kit.chat()))[0] == 429
        samples = await scrape(client)
        executor.gate.set()
    assert (samples("refused_total", limit="tenant"), samples("refused_total", limit="server")) == (1, 0)
    assert samples("tenant_refused_total", tenant="*") == 1
