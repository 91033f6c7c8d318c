"""The server's list of whose records there are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import redis
from deepinfra_kv_redis.store import RedisStore

from deepinfra.core.kv import NamespaceFilter
from deepinfra.testing.kvrecords import chain, keys_of

Make = Callable[..., RedisStore]


async def test_records_of_a_version_that_wrote_no_namespace_are_forgotten_with_any(make: Make, server: Any) -> None:
    old = chain(*range(8), tenant="a")
    async with make() as store:
        await store.save(old)
        with redis.Redis.from_url(server.url) as client:
            (name,) = client.keys("*:scopes")
            for scope, about in client.hgetall(name).items():
                client.hset(name, scope, json.dumps(json.loads(about)[:2]))
        assert (await store.forget(NamespaceFilter(tenant="b", namespace=bytes(32)))).records == 0
        assert (await store.forget(NamespaceFilter(tenant="a", namespace=bytes(32)))).records == len(old)
        assert (await store.match(keys_of(old))).refs == ()
