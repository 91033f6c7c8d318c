"""The store inside an engine, and through the command that checks plug-ins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from deepinfra_kv_redis.store import RedisStore

from deepinfra import Engine, GenerateRequest, Pool, SamplingParams, TextInput
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces import KVStore
from deepinfra.schedulers import Fcfs
from deepinfra.testing import TinyRecipe

pytestmark = pytest.mark.redis


async def answer(store: KVStore | None) -> tuple[str, dict[str, int]]:
    """What a new engine says, and how many prompt tokens came from where."""
    request = GenerateRequest(
        input=TextInput("a long question " * 8), sampling=SamplingParams(temperature=0), max_tokens=20, ignore_eos=True
    )
    engine = Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor(), store=store))
    async with engine:
        async with engine.generate(request) as stream:
            text = "".join([getattr(event, "text", "") async for event in stream])
        await engine.pools[0].settle()
        return text, dict(engine.stats().cached_tokens)


async def test_what_one_engine_saved_is_a_hit_in_the_next_and_the_text_is_the_same(shared_server: Any) -> None:
    plain, _ = await answer(None)
    store = RedisStore(shared_server.url, prefix="engines")
    cold, _ = await answer(store)
    warm, cached = await answer(store)
    assert plain == cold == warm
    assert cached["redis"] > 100


def test_explain_shows_no_password_and_names_what_is_wrong_inside_a_tier(tmp_path: Path) -> None:
    config = tmp_path / "deepinfra.toml"
    text = """
[pool.store]
use = "tiered"
[[pool.store.tiers]]
use = "memory"
[[pool.store.tiers]]
use = "redis"
url = "redis://:s3cret@somewhere/0"
"""
    explain = [sys.executable, "-m", "deepinfra", "explain", "--config", str(config)]
    config.write_text(text)
    done = subprocess.run(explain, capture_output=True, text=True, check=True)
    assert 'pool.store.tiers.1.url = "**********"' in done.stdout
    config.write_text(text + "timeout_s = -1\n")
    wrong = subprocess.run(explain, capture_output=True, text=True, check=False)
    assert "pool.store.tiers.1.timeout_s: input should be greater than 0" in wrong.stderr
    config.write_text(text.replace("redis://", "http://"))
    refused = subprocess.run(explain, capture_output=True, text=True, check=False)
    assert "pool.store.tiers.1.url: a URL begins with redis://" in refused.stderr
    assert "s3cret" not in done.stdout + wrong.stderr + refused.stderr


def test_check_plugin_finds_nothing_broken_and_leaves_nothing_behind(server: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deepinfra", "check-plugin", "kvstore:redis", "--option", f"url={server.url}"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kept    what was saved survives reopening" in done.stdout
    assert ", 0 broken" in done.stdout
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        assert all(key.endswith(b":totals") for key in client.keys("*"))
