"""What tenants share: the whole blocks of prefixes declared public, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.conversation import Conversation, Message, TextPart, ToolChoice, ToolDefinition
from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, NamespaceFilter, Retention
from deepinfra.core.request import CachedTokens, GenerateRequest, Prompt
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine
from deepinfra.engine.public import common
from deepinfra.errors import ConfigError
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores import MemoryStore, SsdStore
from deepinfra.testing.asking import end_of, events_of, tokens_of
from deepinfra.testing.asking import toy_pool as pool
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.tiny import TinyRecipe

SYSTEM = "You write programs, and you are brief about it."
BLOCK = 4
HEAD = 2 + len(SYSTEM) + 1
"""`BOS USER system USER`: what every prompt with this system message begins with in the tiny recipe's words."""
SHARED = HEAD // BLOCK * BLOCK


def say(role: str, text: str) -> Message:
    return Message(role=role, content=(TextPart(text),))  # type: ignore[arg-type]


DECLARED = Conversation(messages=(say("system", SYSTEM),))


def asked(tenant: str, text: str = "hello there", system: str = SYSTEM, **fields: object) -> GenerateRequest:
    given = Conversation(messages=(say("system", system), say("user", text)))
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    return GenerateRequest(input=given, max_tokens=4, ignore_eos=True, tenant=tenant, sampling=sampling, **fields)  # type: ignore[arg-type]


def engine_of(store: KVStore | None = None, prefixes: Sequence[Conversation] = (DECLARED,)) -> Engine:
    return Engine(TinyRecipe(), pool(store, block_size=BLOCK, num_blocks=128), public_prefixes=prefixes)


async def cached(engine: Engine, request: GenerateRequest) -> CachedTokens:
    return end_of(await events_of(engine, request)).usage.cached


class Recorder(MemoryStore):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[BlockKey, KVRecord] = {}

    async def save(self, records: Sequence[KVRecord]) -> None:
        self.records |= {record.ref.key: record for record in records}
        await super().save(records)

    async def successors(self, parent: BlockKey, most: int = 64) -> Sequence[tuple[int, ...]]:
        return [record.tokens for record in self.records.values() if record.parent == parent][:most]

    def of(self, tenant: str) -> list[KVRecord]:
        return [record for record in self.records.values() if record.tenant == tenant]


async def test_tenants_share_the_declared_blocks_on_the_device_and_nothing_else() -> None:
    async with engine_of() as engine:
        assert (await cached(engine, asked("a"))).total == 0
        assert (await cached(engine, asked("b"))).device == SHARED
        assert (await cached(engine, asked("a"))).device > SHARED


async def test_tenants_share_the_declared_blocks_on_disk_and_nothing_else(tmp_path: Path) -> None:
    async with engine_of(SsdStore(tmp_path)) as engine:
        await events_of(engine, asked("a"))
        assert await engine.drain(5)
    async with engine_of(SsdStore(tmp_path)) as engine:
        other = await cached(engine, asked("b"))
        assert (other.device, other.store) == (0, {"ssd": SHARED})
    async with engine_of(SsdStore(tmp_path)) as engine:
        assert (await cached(engine, asked("a"))).store["ssd"] > SHARED


async def test_without_a_declaration_tenants_share_nothing(tmp_path: Path) -> None:
    async with engine_of(SsdStore(tmp_path), prefixes=()) as engine:
        await events_of(engine, asked("a"))
        assert (await cached(engine, asked("b"))).total == 0


@pytest.mark.parametrize("kept", [0, 1, 9, 21, len(SYSTEM) - 1])
async def test_a_prompt_that_leaves_the_prefix_shares_the_whole_blocks_before(kept: int) -> None:
    async with engine_of() as engine:
        await events_of(engine, asked("a"))
        found = await cached(engine, asked("b", system=SYSTEM[:kept] + "~" + SYSTEM[kept + 1 :]))
        assert found.total == (2 + kept) // BLOCK * BLOCK


async def test_text_does_not_depend_on_what_is_shared() -> None:
    async with engine_of() as shared, engine_of(prefixes=()) as alone:
        for tenant in ("a", "b", "a"):
            assert tokens_of(await events_of(shared, asked(tenant))) == tokens_of(await events_of(alone, asked("x")))


async def test_records_of_shared_blocks_belong_to_public_and_outlive_a_tenant() -> None:
    store = Recorder()
    async with engine_of(store) as engine:
        await events_of(engine, asked("a"))
        await events_of(engine, asked("b", "something else"))
        await engine.pools[0].settle()
        public, own = store.of("public"), [*store.of("a"), *store.of("b")]
        ids = TinyRecipe().render(Conversation(messages=(say("system", SYSTEM), say("user", "")))).ids
        assert [token for record in public for token in record.tokens] == list(ids[:SHARED])
        assert {record.namespace for record in public}.isdisjoint(record.namespace for record in own)
        assert len(own) >= 4
        gone = await store.forget(NamespaceFilter(tenant="a"))
        assert gone.records == len(store.of("a"))
        match = await store.match([record.ref.key for record in public])
        assert len(match.refs) == len(public)


async def test_forgetting_a_tenant_leaves_the_shared_blocks_and_other_tenants_on_disk(tmp_path: Path) -> None:
    async with engine_of(SsdStore(tmp_path)) as engine:
        for tenant in ("a", "b"):
            await events_of(engine, asked(tenant))
        assert await engine.drain(5)
    async with SsdStore(tmp_path) as store:
        assert (await store.forget(NamespaceFilter(tenant="a"))).records > 0
    found = []
    for tenant in ("a", "b"):
        async with engine_of(SsdStore(tmp_path)) as engine:
            found.append((await cached(engine, asked(tenant))).store["ssd"])
    assert found[0] == SHARED < found[1]


async def test_windows_come_back_behind_shared_blocks_with_the_same_text(tmp_path: Path) -> None:
    def windowed(store: KVStore | None, prefixes: Sequence[Conversation]) -> Engine:
        made = pool(store, block_size=BLOCK, num_blocks=128, windows=(3, 6))
        return Engine(TinyRecipe(), made, public_prefixes=prefixes)

    async with windowed(None, ()) as alone:
        text = tokens_of(await events_of(alone, asked("x")))
    for tenant in ("a", "b", "c"):  # from nothing, and twice from disk
        async with windowed(SsdStore(tmp_path), (DECLARED,)) as engine:
            for again in (False, True):  # and from the device
                events = await events_of(engine, asked(tenant))
                assert tokens_of(events) == text
                found = end_of(events).usage.cached.total
                assert (0 < found <= SHARED) == (tenant != "a" and not again)
                assert (found > SHARED) == again
            assert await engine.drain(5)


async def test_a_tenants_first_own_block_is_the_first_of_a_namespace() -> None:
    """So that whoever asks a store what follows a key never gets another tenant's tokens."""
    store = Recorder()
    async with engine_of(store) as engine:
        for tenant in ("a", "b"):
            await events_of(engine, asked(tenant))
        await engine.pools[0].settle()
        assert {record.tokens for record in store.of("a")} == {record.tokens for record in store.of("b")}
        firsts = [next(r for r in store.of(tenant) if r.parent == r.namespace) for tenant in ("a", "b")]
        assert firsts[0].tokens == firsts[1].tokens
        for first in firsts:
            assert await store.successors(first.parent) == [first.tokens]
        assert store.stats().dropped == 0


async def test_an_explanation_shows_a_tenant_nothing_of_others() -> None:
    store, words = Recorder(), []
    async with engine_of(store) as engine:
        await events_of(engine, asked("public", system=SYSTEM[:20] + "a secret of those without a key"))
        await events_of(engine, asked("b", "a secret of b's", SYSTEM[:8]))
        await engine.pools[0].settle()
        for tenant, system in (
            ("a", SYSTEM),
            ("a", SYSTEM[:8]),
            ("public", SYSTEM[:20] + "a riddle"),
            ("b", SYSTEM[:8]),
        ):
            async with engine.generate(asked(tenant, "a riddle", system, explain=True)) as stream:
                assert [event async for event in stream]
            assert stream.explanation is not None
            words.append(stream.explanation.words)
    assert ["secr" in told for told in words] == [False, False, True, True], "\n".join(words)


async def test_public_is_shared_with_public_under_the_keys_it_always_had(tmp_path: Path) -> None:
    async with engine_of(SsdStore(tmp_path), prefixes=()) as engine:
        await events_of(engine, asked("public"))
        assert await engine.drain(5)
    async with engine_of(SsdStore(tmp_path)) as engine:
        assert (await cached(engine, asked("b"))).store == {"ssd": SHARED}
        assert (await cached(engine, asked("public"))).total > SHARED


async def test_a_salt_shares_with_nobody() -> None:
    async with engine_of() as engine:
        for request in (asked("a"), asked("a", salt="s"), asked("a", salt="t"), asked("b", salt="s")):
            assert (await cached(engine, request)).total == 0
        assert (await cached(engine, asked("a", salt="s"))).device > SHARED
        assert (await cached(engine, asked("b"))).device == SHARED


@pytest.mark.parametrize("retention", [Retention(traffic="none"), Retention(disk=False)])
async def test_what_a_request_keeps_to_itself_is_not_what_is_everybodys(retention: Retention) -> None:
    store = Recorder()
    async with engine_of(store) as engine:
        await events_of(engine, asked("a", retention=retention))
        await engine.pools[0].settle()
        assert len(store.of("public")) == SHARED // BLOCK
        assert {record.retention for record in store.of("public")} == {Retention()}
        assert all(record.retention == retention for record in store.of("a"))
        assert bool(store.of("a")) == (retention.traffic != "none")


@given(
    head=st.lists(st.integers(0, 3), max_size=700),
    one=st.lists(st.integers(0, 3), max_size=300),
    other=st.lists(st.integers(0, 3), max_size=300),
)
def test_what_two_prompts_have_in_common_is_their_longest_common_beginning(
    head: list[int], one: list[int], other: list[int]
) -> None:
    length = common(left := [*head, *one], right := [*head, *other])
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


class Dated(TinyRecipe):
    """Prints the date before everything else, as some models' templates do, and takes tools' names."""

    def render(self, conversation: Conversation) -> Prompt:
        tools = "".join(tool.name for tool in conversation.tools)
        head = say("system", f"{conversation.now} {tools}")
        return super().render(Conversation(messages=(head, *conversation.messages)))


async def test_the_longest_declared_prefix_counts_and_the_date_may_change() -> None:
    tools = (ToolDefinition(name="look_up_something"),)
    longer = Conversation(messages=(say("system", "Use it."),), tools=tools, tool_choice=ToolChoice())
    made = pool(block_size=BLOCK, num_blocks=128)
    async with Engine(Dated(), made, public_prefixes=(DECLARED, longer)) as engine:
        for day in ("2026-11-29", "1999-12-31"):
            given = Conversation(messages=(*longer.messages, say("user", "x")), tools=tools, now=day)
            whole = 1 + 1 + len(f"{day} look_up_something") + 1 + len("Use it.") + 1
            first, second = (
                GenerateRequest(input=given, max_tokens=1, ignore_eos=True, tenant=tenant) for tenant in ("a", "b")
            )
            assert (await cached(engine, first)).total == 0
            assert (await cached(engine, second)).total == whole // BLOCK * BLOCK


async def test_a_prefix_that_the_recipe_refuses_is_an_error_at_the_start() -> None:
    declared = Conversation(messages=(), tools=(ToolDefinition(name="f"),))
    with pytest.raises(ConfigError, match=r"public_prefixes\.1 cannot be rendered by this model's recipe: 'tools'"):
        async with engine_of(prefixes=(DECLARED, declared)):
            pass


async def test_hits_tell_how_old_the_oldest_record_is() -> None:
    store = MemoryStore()
    clock = ManualClock()
    engine = Engine(TinyRecipe(), pool(store, block_size=BLOCK, num_blocks=16), clock=clock)
    async with engine:
        await events_of(engine, asked("a", system="short"))
        await engine.pools[0].settle()
        clock.advance(100.0)
        await events_of(engine, asked("a", "x" * 40, system="another " * 2))  # takes the device's blocks
        await engine.pools[0].settle()
        found = await cached(engine, asked("a", system="short"))
    assert set(found.store) == {"ram"} == set(found.age_s)
    assert found.age_s["ram"] == pytest.approx(100.0, abs=5.0)
