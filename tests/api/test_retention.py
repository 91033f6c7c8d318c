"""How long KV is kept: a key's policy, then the header, then the body, then the kind of request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError
from openai import BadRequestError as OpenAIBadRequest
from openai import OpenAI

from deepinfra import ApiKey
from deepinfra.api.app import asgi
from deepinfra.api.protocol import Received
from deepinfra.api.retention import HEADER, retention_of
from deepinfra.api.wire import add_usage
from deepinfra.core.conversation import Conversation, Message, ToolDefinition
from deepinfra.core.kv import KVRecord, Retention, Traffic
from deepinfra.core.request import CachedTokens, GenerateRequest, PromptInput, TextInput, Usage
from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores import MemoryStore, SsdStore, TieredStore
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.client import Client
from deepinfra.testing.served import Served
from deepinfra.testing.textmodel import TrainedTextModel
from deepinfra.testing.tiny import TinyRecipe

CHAT = Conversation(messages=(Message(role="user"),))
AGENT = Conversation(messages=(Message(role="user"),), tools=(ToolDefinition(name="f"),))
DAY, HALF, HOUR = Retention(ttl_s=86400), Retention(least_s=43200), Retention(least_s=3600)
RAM = Retention(disk=False)

PRECEDENCE: list[tuple[Traffic | None, str | None, Retention, PromptInput, Retention]] = [
    # key, header, body, input: what holds
    (None, None, Retention(), CHAT, Retention(traffic="chat")),
    (None, None, Retention(), AGENT, Retention(traffic="agent")),
    (None, None, Retention(), TextInput("x"), Retention()),
    (None, None, Retention(), (1, 2), Retention()),
    (None, None, DAY, CHAT, Retention(traffic="chat", ttl_s=86400)),
    (None, None, DAY, AGENT, Retention(traffic="agent", ttl_s=86400)),
    (None, None, HALF, CHAT, Retention(traffic="chat", least_s=43200)),
    (None, None, HOUR, AGENT, Retention(traffic="agent", least_s=3600)),
    (None, None, RAM, CHAT, Retention(traffic="chat", disk=False)),
    (None, "agent", Retention(), CHAT, Retention(traffic="agent")),
    (None, "chat", DAY, AGENT, Retention(traffic="chat")),
    (None, "default", HOUR, AGENT, Retention()),
    (None, "none", DAY, CHAT, Retention(traffic="none")),
    (None, "chat", RAM, AGENT, Retention(traffic="chat", disk=False)),
    ("agent", None, Retention(), CHAT, Retention(traffic="agent")),
    ("agent", "none", DAY, CHAT, Retention(traffic="agent")),
    ("none", "agent", DAY, AGENT, Retention(traffic="none")),
    ("default", "chat", HOUR, TextInput("x"), Retention()),
    ("chat", "agent", RAM, AGENT, Retention(traffic="chat", disk=False)),
]


@pytest.mark.parametrize(("key", "header", "body", "given", "holds"), PRECEDENCE)
def test_a_key_wins_over_a_header_over_a_body_over_the_rule(
    key: Traffic | None, header: str | None, body: Retention, given: PromptInput, holds: Retention
) -> None:
    headers = {} if header is None else {HEADER: header}
    received = Received(headers=headers, now="2026-11-29", max_choices=8, retention=key)
    assert retention_of(GenerateRequest(input=given, retention=body), received) == holds


def test_usage_of_several_prompts_sums_tokens_and_keeps_the_oldest_age() -> None:
    one = CachedTokens(device=4, store={"ram": 8, "ssd": 16}, age_s={"ram": 2.0, "ssd": 50.0})
    other = CachedTokens(device=1, store={"ssd": 2}, age_s={"ssd": 70.0})
    both = add_usage([Usage(prompt_tokens=30, cached=one), Usage(prompt_tokens=9, cached=other)])
    assert both.cached == CachedTokens(device=5, store={"ram": 8, "ssd": 18}, age_s={"ram": 2.0, "ssd": 70.0})


class Recorder(MemoryStore):
    """Remembers how long what it was given is to be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Retention] = []

    async def save(self, records: Sequence[KVRecord]) -> None:
        self.given += [record.retention for record in records]
        await super().save(records)


class Server:
    """A toy model behind its own template, served over TCP with a recording store."""

    def __init__(self, url: str, engine: Engine, store: Recorder) -> None:
        self.url, self._engine, self._store, self._number = url, engine, store, 0

    def kept(self, ask: Callable[..., Any], **fields: Any) -> set[Retention]:
        """How long a new prompt's records are to be kept, after `ask` asked for it."""
        self._number += 1
        before = len(self._store.given)
        ask(f"{self._number} what is this about, and how long is it kept?", **fields)
        idle = 0
        while idle < 2:  # seen from another thread, so a batch may be between queue and staging at one look
            stats = self._engine.pools[0].stats()
            idle = idle + 1 if not stats.saves_waiting and stats.slots_free == stats.slots_total else 0
            threading.Event().wait(0.001)
        return set(self._store.given[before:])

    def openai(self, key: str = "k" * 16) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def anthropic(self, key: str = "k" * 16) -> Anthropic:
        return Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=30)


KEYS = (
    ApiKey.of("k" * 16, name="plain", tenant="t"),
    ApiKey.of("a" * 16, name="agents", tenant="t", retention="agent"),
    ApiKey.of("n" * 16, name="nothing", tenant="t", retention="none"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    template = Path(__file__).parents[1] / "data" / "templates" / "Qwen3.5-4B.jinja"
    files = TrainedTextModel(template.read_text(), ("<|im_start|>", "<|im_end|>"))
    store = Recorder()
    executor = ToyExecutor(num_blocks=2048, vocab_size=files.tokenizer().get_vocab_size(), max_context=8192)
    engine = Engine(ChatTemplate(files), Pool(Fcfs(), executor, store=store), name="toy")
    with Served(engine, keys=KEYS) as served:
        yield Server(served.url, engine, store)


TOOL: Any = {"type": "object", "properties": {"city": {"type": "string"}}}


def by_chat(server: Server, key: str = "k" * 16, **fields: Any) -> Callable[..., Any]:
    def ask(text: str, **more: Any) -> Any:
        with server.openai(key) as client:
            messages: Any = [{"role": "user", "content": text}]
            return client.chat.completions.create(model="toy", messages=messages, max_tokens=2, **fields, **more)

    return ask


def by_responses(server: Server, key: str = "k" * 16) -> Callable[..., Any]:
    def ask(text: str, **more: Any) -> Any:
        with server.openai(key) as client:
            return client.responses.create(model="toy", input=text, max_output_tokens=2, **more)

    return ask


def by_messages(server: Server, key: str = "k" * 16) -> Callable[..., Any]:
    def ask(text: str, **more: Any) -> Any:
        with server.anthropic(key) as client:
            mark = more.pop("mark", None)
            block: Any = {"type": "text", "text": text, **({"cache_control": mark} if mark else {})}
            return client.messages.create(
                model="toy", messages=[{"role": "user", "content": [block]}], max_tokens=2, **more
            )

    return ask


def by_completions(server: Server, key: str = "k" * 16) -> Callable[..., Any]:
    def ask(text: str, **more: Any) -> Any:
        with server.openai(key) as client:
            return client.completions.create(model="toy", prompt=text, max_tokens=2, **more)

    return ask


def header(value: str) -> dict[str, Any]:
    return {"extra_headers": {HEADER: value}}


CHAT_TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": TOOL}}

CASES: list[tuple[Callable[..., Any], dict[str, Any], Retention]] = [
    (by_chat, {}, Retention(traffic="chat")),
    (by_chat, {"tools": [CHAT_TOOL]}, Retention(traffic="agent")),
    (by_chat, {"prompt_cache_retention": "24h"}, Retention(traffic="chat", ttl_s=86400)),
    (by_chat, {"prompt_cache_retention": "in_memory"}, Retention(traffic="chat", disk=False)),
    (by_chat, {"prompt_cache_retention": "24h", **header("agent")}, Retention(traffic="agent")),
    (by_chat, {"prompt_cache_options": {"ttl": "30m"}}, Retention(traffic="chat", least_s=1800)),
    (by_chat, {"prompt_cache_key": "k", "safety_identifier": "s"}, Retention(traffic="chat")),
    (by_responses, {}, Retention(traffic="chat")),
    (by_responses, {"tools": [{"type": "function", "name": "f", "parameters": TOOL}]}, Retention(traffic="agent")),
    (by_responses, {"prompt_cache_retention": "24h"}, Retention(traffic="chat", ttl_s=86400)),
    (by_responses, {"prompt_cache_options": {"ttl": "12h"}}, Retention(traffic="chat", least_s=43200)),
    (by_responses, header("default"), Retention()),
    (by_messages, {}, Retention(traffic="chat")),
    (by_messages, {"tools": [{"name": "f", "input_schema": TOOL}]}, Retention(traffic="agent")),
    (by_messages, {"mark": {"type": "ephemeral"}}, Retention(traffic="chat", least_s=300)),
    (by_messages, {"mark": {"type": "ephemeral", "ttl": "1h"}}, Retention(traffic="chat", least_s=3600)),
    (by_messages, {"mark": {"type": "ephemeral", "ttl": "1h"}, **header("agent")}, Retention(traffic="agent")),
    (by_completions, {}, Retention()),
    (by_completions, header("chat"), Retention(traffic="chat")),
]


@pytest.mark.parametrize(("by", "fields", "kept"), CASES)
def test_official_clients_choose(
    server: Server, by: Callable[..., Any], fields: dict[str, Any], kept: Retention
) -> None:
    assert server.kept(by(server), **fields) == {kept}


@pytest.mark.parametrize("by", [by_chat, by_responses, by_messages, by_completions])
def test_a_keys_policy_holds_in_every_protocol(server: Server, by: Callable[..., Any]) -> None:
    assert server.kept(by(server, "a" * 16), **header("chat")) == {Retention(traffic="agent")}
    assert server.kept(by(server, "n" * 16), **header("chat")) == set()
    assert server.kept(by(server), **header("none")) == set()


@pytest.mark.parametrize("by", [by_chat, by_responses, by_messages, by_completions])
def test_an_unknown_word_in_the_header_is_named_in_the_callers_dialect(server: Server, by: Callable[..., Any]) -> None:
    with pytest.raises((OpenAIBadRequest, BadRequestError)) as caught:
        by(server)("x", **header("for ever"))
    error: Any = caught.value.body
    told = error["error"] if isinstance(caught.value, BadRequestError) else error
    assert f"the header '{HEADER}' must be one of default, agent, chat, none" in told["message"]
    assert told["type"] == "invalid_request_error"
    if isinstance(caught.value, OpenAIBadRequest):
        assert told["param"] == HEADER


STORES: dict[str, Callable[[Path], KVStore]] = {
    "": SsdStore,
    "ram": lambda folder: MemoryStore(),
    "ram before a disk": lambda folder: TieredStore([MemoryStore(), SsdStore(folder)]),
}


@pytest.mark.parametrize("stores", STORES)
async def test_in_memory_is_on_no_disk_and_is_found_in_memory(tmp_path: Path, kit: Any, stores: str) -> None:
    marker, folder = "A sentence that nobody else ever wrote down, 4711 times.", tmp_path / "kv"
    body = kit.chat(marker, prompt_cache_retention="in_memory")
    ids = TinyRecipe().tokenizer.encode(marker)
    folder.mkdir()
    pool = Pool(Fcfs(), ToyExecutor(num_blocks=24), store=STORES[stores](folder))
    async with Engine(TinyRecipe(), pool, name="toy") as engine:
        client = Client(asgi(engine))
        for each in (body, kit.chat("y" * 60, prompt_cache_retention="in_memory"), body):
            status, answer = await client.post("/v1/chat/completions", each)
            assert status == 200
            await pool.settle()
    found, in_ram = answer["deepinfra"], "ram" in stores
    assert set(found["cached_tokens"]) == ({"device", "ram"} if in_ram else {"device"})
    assert (found["cached_tokens"].get("ram", 0) >= 24) == in_ram  # the device keeps the head
    assert (found["cached_age_s"].get("ram", -1.0) >= 0) == in_ram
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    rows = [b"".join(token.to_bytes(4, "little") for token in ids[at : at + 4]) for at in range(len(ids) - 4)]
    assert not any(row in written for row in rows)
    assert len(written) < 4096


async def test_what_is_written_to_disk_otherwise_can_be_seen_there(tmp_path: Path, kit: Any) -> None:
    marker = "A sentence that nobody else ever wrote down, 4711 times."
    async with Engine(
        TinyRecipe(), Pool(Fcfs(), ToyExecutor(num_blocks=64), store=SsdStore(tmp_path)), name="toy"
    ) as engine:
        assert (await Client(asgi(engine)).post("/v1/chat/completions", kit.chat(marker)))[0] == 200
        await engine.pools[0].settle()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    row = b"".join(token.to_bytes(4, "little") for token in TinyRecipe().tokenizer.encode(marker)[6:10])
    assert row in written
