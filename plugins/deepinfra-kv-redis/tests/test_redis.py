"""What the kit does not ask: a server that dies, hangs, restarts, is shared, is full or asks for a password."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
from deepinfra_kv_redis import RedisOptions
from deepinfra_kv_redis.store import RedisStore

from deepinfra.core.kv import NamespaceFilter, RecordRef, Retention
from deepinfra.errors import ConfigError
from deepinfra.testing import ManualClock
from deepinfra.testing.kvrecords import chain, content, keys_of, load

pytestmark = pytest.mark.redis
Make = Callable[..., RedisStore]


async def test_records_survive_a_restart_of_the_server(make: Make, server: Any) -> None:
    records = chain(*range(20))
    async with make() as store:
        await store.save(records)
        server.kill()
        server.start()
        match = await store.match(keys_of(records))
        assert await load(store, match.refs) == [content(record.ref) for record in records]


async def test_a_server_killed_in_mid_load_costs_misses_only(make: Make, server: Any) -> None:
    records = chain(*range(60), nbytes=1 << 20)
    refs = [record.ref for record in records]
    delivered: list[list[bytes]] = []
    first = anyio.Event()

    async def reader(store: RedisStore) -> None:
        for _ in range(20):
            data = await load(store, refs)
            delivered.append(data)
            first.set()

    async with make() as store:
        await store.save(records)
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(reader, store)
            await first.wait()
            server.kill()
        assert (await store.match(keys_of(records))).missed == "tier-down"
    assert len(delivered) == 60
    assert sum(len(data) < len(records) for data in delivered) > 0
    for data in delivered:
        assert data == [content(ref) for ref in refs[: len(data)]]


async def test_a_server_that_hangs_is_waited_for_once_and_found_again(make: Make, server: Any) -> None:
    records = chain(*range(8))
    async with make() as store:
        clock = ManualClock()
        store.clock = clock
        await store.save(records)
        server.hang()
        try:
            for _ in range(50):
                match = await store.match(keys_of(records))
                assert (match.refs, match.missed) == ((), "tier-down")
            await store.save(chain(*range(100, 108)))
            assert store.stats().dropped == 4
        finally:
            server.go_on()
        clock.advance(60.0)
        assert len((await store.match(keys_of(records))).refs) == 4


async def test_a_server_that_is_not_there_is_a_miss_from_the_start(make: Make, server: Any) -> None:
    server.kill()
    async with make() as store:
        assert (await store.match(keys_of(chain(1, 2)))).missed == "tier-down"


async def test_what_was_to_be_forgotten_is_forgotten_when_the_server_is_back(make: Make, server: Any) -> None:
    mine, others = chain(*range(8), tenant="a"), chain(*range(8), tenant="b")
    async with make() as store:
        clock = ManualClock()
        store.clock = clock
        await store.save([*mine, *others])
        server.kill()
        await store.forget(NamespaceFilter(tenant="a"))
        server.start()
        clock.advance(60.0)
        assert [len((await store.match(keys_of(each))).refs) for each in (mine, others)] == [0, 4]


async def test_what_could_not_be_forgotten_is_logged_on_leaving(
    make: Make, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with make() as store:
        server.kill()
        await store.forget(NamespaceFilter(tenant="a"))
    assert "not forgotten there: [NamespaceFilter(tenant='a'" in caplog.text


async def test_two_engines_share_what_either_saved_and_forgets(make: Make) -> None:
    records = chain(*range(8))
    async with make() as one, make() as other, make(prefix="else") as stranger:
        await one.save(records)
        assert len((await other.match(keys_of(records))).refs) == 4
        assert (await stranger.match(keys_of(records))).refs == ()
        await stranger.forget(NamespaceFilter())
        assert (await other.forget(NamespaceFilter(model="m"))).records == 4
        assert (await one.match(keys_of(records))).refs == ()
        assert one.stats().records == 4  # as of its last save
        await one.save(chain(9, 9))
        assert one.stats().records == 1


async def test_the_server_itself_lets_records_expire(make: Make, server: Any) -> None:
    client = redis.Redis(unix_socket_path=str(server.socket))
    async with make(default_ttl_s=10.0, chat_ttl_s=5_000.0) as store:
        await store.save(chain(1, 2) + chain(3, 4, retention=Retention(traffic="chat")))
        lives = sorted(client.pttl(key) for key in client.keys("deepinfra:r:*"))
        assert 8_000 < lives[0] <= 10_000
        assert 4_990_000 < lives[1] <= 5_000_000
    client.close()


async def test_use_lets_a_record_live_on_there(make: Make, server: Any) -> None:
    client = redis.Redis(unix_socket_path=str(server.socket))
    records, clock = chain(1, 2, retention=Retention(ttl_s=100.0)), ManualClock()
    async with make() as store:
        store.clock = clock
        await store.save(records)
        await store.touch(keys_of(records), Retention(ttl_s=300.0))
        (key,) = client.keys("deepinfra:r:*")
        assert 290_000 < client.pttl(key) <= 300_000
        clock.advance(290.0)
        assert len(await load(store, [records[0].ref])) == 1
        clock.advance(50.0)
        assert len((await store.match(keys_of(records))).refs) == 1
    client.close()


async def test_of_a_chain_s_snapshots_the_last_one_lives_on(make: Make) -> None:
    retention, clock = Retention(ttl_s=100.0), ManualClock()
    tokens = range(2 * 1_100)
    blocks = chain(*tokens, nbytes=10, retention=retention)
    snapshots = chain(*tokens, nbytes=20, kind="snapshot", retention=retention)
    async with make() as store:
        store.clock = clock
        await store.save([*blocks, *snapshots[3:9:5], snapshots[500]])
        await store.touch(keys_of(blocks), Retention(ttl_s=300.0))
        clock.advance(200.0)
        match = await store.match(keys_of(blocks))
    assert (len(match.refs), match.snapshots) == (1_100, (500,))


async def test_nothing_is_left_of_a_tenant_that_is_forgotten(make: Make, server: Any) -> None:
    client = redis.Redis(unix_socket_path=str(server.socket))
    async with make() as store:
        await store.save(chain(*range(2_400), tenant="a", nbytes=10) + chain(1, 2, tenant="a", kind="snapshot"))
        assert (await store.forget(NamespaceFilter(tenant="a"))).records == 1_201
        assert client.keys("*") == [b"deepinfra:totals"]
        assert (store.stats().records, store.stats().nbytes) == (0, 0)
    client.close()


async def test_a_damaged_value_is_a_miss(make: Make, server: Any) -> None:
    client = redis.Redis(unix_socket_path=str(server.socket))
    records = chain(1, 2, 3, 4)
    async with make() as store:
        await store.save(records)
        for cut in (b"", b"dkv1", b"x" * 3_100):
            client.set(b"deepinfra:r:" + records[0].ref.key, cut)
            assert await load(store, [records[0].ref]) == []
            assert (await store.match(keys_of(records))).refs == ()
        client.set(b"deepinfra:r:" + records[1].ref.key, client.get(b"deepinfra:r:" + records[1].ref.key)[:-1])
        assert await load(store, [records[1].ref]) == []
        assert store.stats().damaged == 4
    client.close()


async def test_a_server_that_is_full_drops_and_still_serves(
    make: Make, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = redis.Redis(unix_socket_path=str(server.socket))
    records = chain(*range(8))
    async with make() as store:
        await store.save(records)
        client.config_set("maxmemory", "1")
        await store.save(chain(*range(100, 108)))
        assert store.stats().dropped == 4
        assert "refused" in caplog.text
        assert len((await store.match(keys_of(records))).refs) == 4
    client.close()


async def test_what_the_server_evicts_is_a_miss_and_can_be_saved_again(make: Make, server: Any) -> None:
    client = redis.Redis(unix_socket_path=str(server.socket))
    records = chain(*range(8))
    async with make() as store:
        await store.save(records)
        client.delete(b"deepinfra:r:" + records[2].ref.key)
        assert len((await store.match(keys_of(records))).refs) == 2
        await store.save(records)
        assert (len((await store.match(keys_of(records))).refs), store.stats().records) == (4, 4)
    client.close()


async def test_records_that_are_too_large_are_dropped(make: Make) -> None:
    async with make(max_record_nbytes=2_999) as store:
        await store.save(chain(1, 2))
        assert (store.stats().dropped, store.stats().records) == (1, 0)


async def test_a_size_that_lies_is_a_miss(make: Make) -> None:
    (record,) = chain(1, 2)
    async with make() as store:
        await store.save([record])
        assert await load(store, [RecordRef(record.ref.key, "block", record.ref.nbytes - 1)]) == []


async def test_a_password_comes_from_a_file_and_is_shown_nowhere(
    server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    server.start("--requirepass", "s3cret")
    (tmp_path / "password").write_text("s3cret\n")
    records = chain(1, 2)
    async with RedisStore(server.url, password_file=str(tmp_path / "password")) as store:
        await store.save(records)
        assert len((await store.match(keys_of(records))).refs) == 1
    async with RedisStore(server.url) as store:
        assert (await store.match(keys_of(records))).missed == "tier-down"
    assert "s3cret" not in caplog.text
    assert "s3cret" not in repr(RedisOptions(url="redis://:s3cret@host/0"))


async def test_a_password_file_that_is_missing_is_named(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-file"):
        async with make(password_file=str(tmp_path / "no-such-file")):
            pass


def test_a_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="redis://, rediss://"):
        RedisOptions(url="localhost:6379")
