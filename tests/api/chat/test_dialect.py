"""Where OpenAI's and DeepSeek's habits differ, and what a demanded call is checked against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfra.api.app import asgi
from deepinfra.engine import Engine, Pool
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.client import Client
from deepinfra.testing.replay import ReplayExecutor
from deepinfra.testing.textmodel import TrainedTextModel

CHAT = "/v1/chat/completions"
TEMPLATE = (Path(__file__).parents[2] / "data" / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
MARKERS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def engine_that_says(text: str) -> Engine:
    files = TrainedTextModel(TEMPLATE, MARKERS)
    tokenizer = files.tokenizer()
    eos = files.special_tokens().eos_id
    assert eos is not None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    executor = ReplayExecutor([ids], eos=eos, vocab_size=tokenizer.get_vocab_size())
    return Engine(ChatTemplate(files), Pool(Fcfs(), executor), name="m")


async def ask(text: str, choice: Any, *, stream: bool = False, dialect: Any = "openai") -> tuple[int, Any]:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("get_weather", "other")
    ]
    messages = [{"role": "user", "content": "Weather?"}]
    body = {"model": "m", "messages": messages, "tools": tools, "tool_choice": choice, "stream": stream}
    engine = engine_that_says(text)
    async with engine:
        async with Client(asgi(engine, dialect=dialect)).request("POST", CHAT, json=body) as response:
            status = await response.started()
            if stream:
                return status, [event async for event in response.events()]
            return status, await response.json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "dialect", "finish"),
    [
        ("auto", "openai", "tool_calls"),
        ("required", "openai", "tool_calls"),
        (NAMED, "openai", "stop"),
        (NAMED, "deepseek", "tool_calls"),
    ],
    ids=["auto", "required", "named", "named-deepseek"],
)
async def test_how_a_call_ends(choice: Any, dialect: str, finish: str, stream: bool) -> None:
    status, answer = await ask(CALL, choice, stream=stream, dialect=dialect)
    assert status == 200
    if stream:
        assert answer[-2]["choices"][0]["finish_reason"] == finish
        return
    (told,) = answer["choices"]
    assert told["finish_reason"] == finish
    assert told["message"]["content"] is None
    (call,) = told["message"]["tool_calls"]
    assert set(call) == {"id", "type", "function"}
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


@pytest.mark.parametrize(
    "said", ["No call.", CALL.replace("get_weather", "other"), CALL.replace('"city"', '"town"')], ids=str
)
async def test_what_is_no_demanded_call_cannot_be_said(said: str) -> None:
    status, answer = await ask(said, NAMED)
    assert status == 500
    assert "of the record is forbidden here" in answer["error"]["message"]


@pytest.mark.parametrize(("dialect", "status"), [("openai", 400), ("deepseek", 422)])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_wrong_parameter_has_the_dialects_status(
    kit: Any, engine: Engine, path: str, dialect: Any, status: int
) -> None:
    body = kit.chat() if path == CHAT else kit.completion()
    async with engine:
        client = Client(asgi(engine, dialect=dialect))
        assert (await client.post(path, {**body, "temperature": 3}))[0] == status
        assert (await client.post(path, {**body, "temprature": 1}))[0] == status
        assert (await client.post(path, {**body, "max_tokens": 10**6}))[0] == 400
        assert (await client.post(path, {**body, "model": "other"}))[0] == 404
        async with client.request("POST", path, body=b"{") as response:
            assert await response.started() == 400
