"""Over TCP: uvicorn in a thread, the official client, and sockets that are torn down."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import openai
import pytest
from openai import OpenAI

from deepinfra.engine import Engine
from deepinfra.testing.served import Served

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    from deepinfra.engine import Pool
    from deepinfra.executors.toy import ToyExecutor
    from deepinfra.schedulers.fcfs import Fcfs
    from deepinfra.testing.tiny import TinyRecipe

    executor = ToyExecutor(num_blocks=2048, max_seqs=16, max_context=8192)
    with Served(Engine(TinyRecipe(), Pool(Fcfs(), executor))) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


# -- the official client --------------------------------------------------------------------------


def test_a_chat_answer_streams_to_what_it_is_whole(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "toy", "messages": HELLO, "max_tokens": 40, "seed": 3}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details is not None
    assert whole.model_extra is not None
    assert whole.model_extra["deepinfra"]["seed"] == 3


def test_the_clients_own_stream_helper_puts_several_answers_together(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "toy", "messages": HELLO, "max_tokens": 30, "seed": 3, "n": 3}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.current_completion_snapshot
    assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices]
    assert len({c.message.content for c in whole.choices}) == 3


def test_logprobs_belong_to_the_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=HELLO, max_tokens=20, seed=3, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    data = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert data.decode("utf-8", "replace") == choice.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_completions_take_several_prompts(client: OpenAI) -> None:
    answer = client.completions.create(
        model="toy", prompt=["a", "b"], n=2, max_tokens=5, seed=1, logprobs=1, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is not None for choice in answer.choices)
    chunks = list(
        client.completions.create(
            model="toy", prompt="a", max_tokens=5, seed=1, stream=True, extra_body={"ignore_eos": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_extra_sampling_fields_go_through_extra_body(client: OpenAI) -> None:
    answer = client.completions.create(
        model="toy", prompt="a", max_tokens=300, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 300
    assert answer.choices[0].finish_reason == "length"


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "deepinfra"


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"audio": {"voice": "a", "format": "wav"}}, openai.BadRequestError, "unsupported_parameter", "audio"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded", "messages"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", "model"),
        ({"messages": [{"role": "user", "content": "x" * 10_000_000}]}, openai.APIStatusError, "body-too-large", None),
    ],
)
def test_errors_become_the_clients_exceptions(
    client: OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str, param: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{"model": "toy", "messages": HELLO, **fields, "stream": stream})
        assert (caught.value.code, caught.value.param) == (code, param)
        assert caught.value.request_id


def test_an_answer_tells_the_clients_own_request_id(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=HELLO, max_tokens=2, extra_headers={"x-request-id": "trace-7"}
    )
    assert answer._request_id == "trace-7"


def test_a_failure_in_mid_stream_raises_in_the_client(kit: Any) -> None:
    with Served(kit.build(kit.Gated(fail_at=12))) as served:
        with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="toy", messages=HELLO, max_tokens=100, seed=3, stream=True)
            with pytest.raises(openai.APIError, match="the step failed"):
                list(stream)


def test_a_shutdown_finishes_what_runs(kit: Any) -> None:
    executor = kit.Gated(shut=True)
    with Served(kit.build(executor)) as served:
        with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            done: list[str | None] = []

            def ask() -> None:
                answer = client.chat.completions.create(model="toy", messages=HELLO, max_tokens=5)
                done.append(answer.choices[0].finish_reason)

            asking = threading.Thread(target=ask)
            asking.start()
            while not executor.steps:
                threading.Event().wait(0.001)
            served.server.should_exit = True
            executor.open_from_thread()
            asking.join(20)
    assert done in (["length"], ["stop"])


# -- clients that vanish ---------------------------------------------------------------------------


def raw(body: dict[str, Any], path: str = CHAT) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def idle(engine: Engine) -> None:
    with anyio.fail_after(30):
        while True:
            stats = engine.stats()
            if stats.running == stats.waiting == 0 and stats.blocks_free == stats.blocks_total:
                return
            await anyio.sleep(0.005)  # another thread's engine can only be polled


async def test_two_hundred_sockets_that_close_at_random_leave_nothing(served: Served, client: OpenAI) -> None:
    rng = random.Random(11)
    before = served.engines["toy"].stats()

    async def one() -> None:
        body = {"model": "toy", "messages": HELLO, "max_tokens": 3000, "ignore_eos": True, "stream": rng.random() < 0.5}
        data, reads = raw({**body, "n": rng.randrange(1, 3)}), rng.randrange(4)
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))]
            reads = 0
        patience = rng.random() * 0.2
        async with await anyio.connect_tcp("127.0.0.1", served.port) as stream:
            await stream.send(data)
            with anyio.move_on_after(patience):
                for _ in range(reads):
                    await stream.receive()

    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(one)
    await idle(served.engines["toy"])
    after = served.engines["toy"].stats()
    assert after.requests.get("cancelled", 0) > before.requests.get("cancelled", 0)
    answer = await anyio.to_thread.run_sync(
        lambda: client.chat.completions.create(model="toy", messages=HELLO, max_tokens=3)
    )
    assert answer.choices[0].finish_reason


async def test_a_client_that_does_not_read_stops_nobody_else(served: Served, client: OpenAI) -> None:
    body = {"model": "toy", "messages": HELLO, "max_tokens": 6000, "ignore_eos": True, "stream": True, "n": 8}
    async with await anyio.connect_tcp("127.0.0.1", served.port) as stream:
        await stream.send(raw(body))
        await stream.receive(1)
        answer = await anyio.to_thread.run_sync(
            lambda: client.chat.completions.create(model="toy", messages=HELLO, max_tokens=3)
        )
        assert answer.choices[0].finish_reason
    await idle(served.engines["toy"])
