"""A declared prefix over HTTP: every protocol finds it for every tenant, and usage tells of nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from deepinfra import ApiKey
from deepinfra.config.prefixes import read_prefix
from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.served import Served
from deepinfra.testing.textmodel import TrainedTextModel

TENANTS = [f"tenant-{number}" for number in range(12)]
SYSTEM = "You keep the books of a small shop. " * 8 + "Never invent a number."
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"day": {"type": "string"}, "rate": {"default": 1.50}}}
BLOCK = 16


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    function = {"name": "ledger", "description": "Looks up a day.", "parameters": PARAMETERS}
    path = tmp_path_factory.mktemp("prefix") / "shop.json"
    path.write_text(json.dumps({"system": SYSTEM, "tools": [{"type": "function", "function": function}]}))
    template = Path(__file__).parents[1] / "data" / "templates" / "Qwen3.5-4B.jinja"
    files = TrainedTextModel(template.read_text(), ("<|im_start|>", "<|im_end|>"))
    vocabulary = files.tokenizer().get_vocab_size()
    executor = ToyExecutor(num_blocks=4096, block_size=BLOCK, vocab_size=vocabulary, max_context=8192)
    prefix = read_prefix(path)
    engine = Engine(ChatTemplate(files), Pool(Fcfs(), executor), name="toy", public_prefixes=[prefix])
    keys = [ApiKey.of(tenant.rjust(16, "k"), name=tenant) for tenant in TENANTS]
    with Served(engine, keys=keys) as served:
        yield served.url


def by_chat(url: str, tenant: str, system: str, text: str) -> tuple[int, int]:
    function: Any = {"name": "ledger", "description": "Looks up a day.", "parameters": PARAMETERS}
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    with OpenAI(base_url=f"{url}/v1", api_key=tenant.rjust(16, "k"), max_retries=0, timeout=30) as client:
        answer = client.chat.completions.create(
            model="toy", messages=messages, max_tokens=2, tools=[{"type": "function", "function": function}]
        )
    assert answer.usage is not None
    told: Any = answer.model_extra
    return answer.usage.prompt_tokens, told["deepinfra"]["cached_tokens"]["device"]


def by_responses(url: str, tenant: str, system: str, text: str) -> tuple[int, int]:
    tool: Any = {"type": "function", "name": "ledger", "description": "Looks up a day.", "parameters": PARAMETERS}
    with OpenAI(base_url=f"{url}/v1", api_key=tenant.rjust(16, "k"), max_retries=0, timeout=30) as client:
        answer = client.responses.create(
            model="toy", instructions=system, input=text, max_output_tokens=2, tools=[tool], store=False
        )
    assert answer.usage is not None
    return answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens


def by_messages(url: str, tenant: str, system: str, text: str) -> tuple[int, int]:
    tool: Any = {"name": "ledger", "description": "Looks up a day.", "input_schema": PARAMETERS}
    with Anthropic(base_url=url, api_key=tenant.rjust(16, "k"), max_retries=0, timeout=30) as client:
        answer = client.messages.create(
            model="toy", system=system, messages=[{"role": "user", "content": text}], max_tokens=2, tools=[tool]
        )
    usage = answer.usage
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    return usage.input_tokens + read + written, read


def test_every_protocol_finds_the_prefix_for_every_tenant_and_no_more(url: str) -> None:
    asks: list[Callable[..., tuple[int, int]]] = [by_chat, by_responses, by_messages]
    secret = "And this is what one tenant alone says, again and again. " * 4
    prompt, cached = by_chat(url, TENANTS[0], SYSTEM, secret)
    assert cached == 0
    found = {ask(url, tenant, SYSTEM, secret) for ask, tenant in zip(asks * 2, TENANTS[1:7], strict=True)}
    ((same, shared),) = found
    assert same == prompt
    assert shared % BLOCK == 0
    assert 3 * BLOCK < shared < prompt - 4 * BLOCK
    again = [ask(url, tenant, SYSTEM, secret)[1] for ask, tenant in zip(asks, TENANTS[1:4], strict=True)]
    assert all(cached > prompt - BLOCK for cached in again)


def test_a_prompt_that_only_begins_like_it_shares_what_is_before(url: str) -> None:
    by_chat(url, TENANTS[7], SYSTEM, "x")
    whole = by_chat(url, TENANTS[8], SYSTEM, "y")[1]
    part = by_chat(url, TENANTS[9], SYSTEM[: len(SYSTEM) // 2] + " Be rude.", "y")[1]
    assert 0 < part < whole
    other = by_chat(url, TENANTS[10], "You are a cat.", "y")[1]
    assert by_chat(url, TENANTS[11], "You are a cat.", "y")[1] == other < part
