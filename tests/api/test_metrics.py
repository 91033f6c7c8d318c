from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from deepinfra.api.app import asgi
from deepinfra.core.kv import KVStats, TierStats
from deepinfra.engine import Engine, Pool
from deepinfra.engine.stats import EngineStats
from deepinfra.executors.toy import ToyExecutor
from deepinfra.kvstores import MemoryStore, SsdStore
from deepinfra.schedulers.fcfs import Fcfs
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
