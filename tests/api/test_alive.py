"""Signs of life in streams: behind the protocol's beginning, never in its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfra.api.app import asgi
from deepinfra.testing.client import Client

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
COMMENT = b": keep-alive\n\n"
TURNS: list[Any] = [{"role": "user", "content": "hello"}]
PROTOCOLS: list[Any] = [
    ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 8, "seed": 7}, COMMENT, ["role"]),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 8, "seed": 7}, COMMENT, []),
    (
        "/v1/responses",
        {"input": "hello", "max_output_tokens": 8, "seed": 7},
        COMMENT,
        ["response.created", "response.in_progress"],
    ),
    ("/v1/messages", {"messages": TURNS, "max_tokens": 8, "seed": 7}, PING, ["message_start"]),
]
each_protocol = pytest.mark.parametrize(
    ("path", "body", "sign", "beginning"), PROTOCOLS, ids=[each[0].rpartition("/")[2] for each in PROTOCOLS]
)


def blocks(data: bytes) -> list[bytes]:
    *found, rest = data.split(b"\n\n")
    assert rest == b""
    return [block + b"\n\n" for block in found]


def kind(block: bytes) -> str:
    """The event's name; chat begins with a chunk that names the role."""
    if block.startswith(b"data: "):
        return "role" if b'"role"' in block else "chunk"
    return block.split(b"\n")[0].removeprefix(b"event: ").decode()


@each_protocol
async def test_a_long_wait_is_filled_with_signs_of_life_behind_the_beginning(
    kit: Any, path: str, body: dict[str, Any], sign: bytes, beginning: list[str]
) -> None:
    executor = kit.Gated(shut=True)
    async with kit.build(executor) as engine:
        client = Client(asgi(engine, keepalive_s=0.002))
        async with client.request("POST", path, json={"model": "toy", "stream": True, **body}) as response:
            chunks = response.chunks()
            *begun, first = blocks(await anext(chunks))
            assert [kind(block) for block in begun] == beginning
            assert first == sign
            assert await anext(chunks) == sign
            executor.gate.set()
            rest = [block for block in blocks(b"".join([chunk async for chunk in chunks])) if block != sign]
    assert not {kind(block) for block in rest}.intersection(beginning)
    assert len(rest) > 2


async def test_before_anything_is_known_of_the_cache_nothing_is_said_of_it(kit: Any) -> None:
    path, body, _, _ = PROTOCOLS[-1]
    executor = kit.Gated(shut=True)
    async with kit.build(executor) as engine:
        client = Client(asgi(engine, keepalive_s=0.002))
        async with client.request("POST", path, json={"model": "toy", "stream": True, **body}) as response:
            start = blocks(await anext(response.chunks()))[0].partition(b"data: ")[2]
            executor.gate.set()
            last = [block for block in blocks(await response.read()) if kind(block) == "message_delta"]
    usage = json.loads(start)["message"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len("?U") + len("hello") + len("A"), 0)
    assert not any(name.startswith("cache") for name in usage)
    assert "cache_read_input_tokens" in json.loads(last[0].partition(b"data: ")[2])["usage"]


@each_protocol
async def test_signs_of_life_at_any_moment_leave_the_stream_what_it_was(
    kit: Any, path: str, body: dict[str, Any], sign: bytes, beginning: list[str]
) -> None:
    """Signs as often as the loop allows race with the first event in one stream or another."""
    asked = {"model": "toy", "stream": True, **body}
    signs = 0
    async with kit.build() as engine:
        texts = set[str]()
        for number in range(20):
            client = Client(asgi(engine, keepalive_s=0.00001 * number + 0.00001))
            async with client.request("POST", path, json=asked) as response:
                found = blocks(await response.read())
            said = [block for block in found if block != sign]
            signs += len(found) - len(said)
            assert found[: len(beginning)] == said[: len(beginning)]
            assert [kind(block) for block in said[: len(beginning)]] == beginning
            assert not {kind(block) for block in said[len(beginning) :]}.intersection(beginning)
            texts.add("".join(_texts(said)))
    assert len(texts) == 1
    assert signs > 0


def _texts(said: list[bytes]) -> list[str]:
    """The pieces of an answer in any protocol."""
    found: list[str] = []
    for block in said:
        data = block.partition(b"data: ")[2]
        event = {} if data.startswith(b"[DONE]") else json.loads(data)
        delta = event.get("delta")
        if isinstance(delta, str):
            found.append(delta)
        elif isinstance(delta, dict):
            found.append(delta.get("text", ""))
        choices = event.get("choices", ())
        found += (choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    return found


async def test_a_failure_behind_a_sign_of_life_comes_behind_the_beginning_too(kit: Any) -> None:
    path, body, _, _ = PROTOCOLS[2]
    executor = kit.Gated(shut=True, fail_at=1)
    async with kit.build(executor) as engine:
        client = Client(asgi(engine, keepalive_s=0.002))
        async with client.request("POST", path, json={"model": "toy", "stream": True, **body}) as response:
            chunks = response.chunks()
            first = await anext(chunks)
            executor.gate.set()
            rest = b"".join([chunk async for chunk in chunks])
    kinds = [kind(block) for block in blocks(first + rest) if block != COMMENT]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
