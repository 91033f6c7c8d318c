"""`deepinfra.receipt` in every protocol, streamed and whole, by body and by header; official clients find it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from deepinfra import ApiKey
from deepinfra.api.app import asgi
from deepinfra.engine import Engine
from deepinfra.engine.receipts import Receipt, decoded, receipt_in, receipt_of, replay
from deepinfra.testing.client import Client, running
from deepinfra.testing.served import Served

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
WANTED: dict[str, Any] = {"deepinfra": {"receipt": True}}
HEADER = ("x-deepinfra-receipt", "1")


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "toy", "seed": 3, **fields}
    match path:
        case "/v1/completions":
            return body | {"prompt": "hello", "max_tokens": 6}
        case "/v1/responses":
            return body | {"input": "hello", "max_output_tokens": 6}
    return body | {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


async def answer(app: Any, path: str, body: dict[str, Any], *headers: tuple[str, str]) -> list[Any]:
    """The events of a stream, or the one object of a whole answer."""
    async with Client(app, headers=headers).request("POST", path, json=body) as response:
        assert await response.started() == 200
        data = (await response.read()).decode()
    if not body.get("stream"):
        return [json.loads(data)]
    return [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]


def receipt_among(events: list[Any]) -> Receipt | None:
    (found,) = [receipt_in(event) for event in events if receipt_in(event) is not None] or [None]
    return None if found is None else receipt_of(found)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_every_protocol_certifies_and_its_receipt_is_replayed(path: str, stream: bool, engine: Engine) -> None:
    app = asgi(engine)
    async with running(app):
        receipt = receipt_among(await answer(app, path, body_of(path, stream=stream, **WANTED)))
        assert receipt is not None
        outcome = await replay(engine, receipt)
    assert (outcome.verdict, [each.tokens for each in outcome.answers]) == ("same", [6])
    assert (receipt.model, receipt.invariant, receipt.requests[0].max_tokens) == ("toy", True, 6)


@pytest.mark.parametrize("path", PATHS)
async def test_a_header_asks_too_and_nobody_gets_what_was_not_asked_for(path: str, engine: Engine) -> None:
    app = asgi(engine)
    async with running(app):
        assert receipt_among(await answer(app, path, body_of(path), HEADER)) is not None
        assert receipt_among(await answer(app, path, body_of(path), ("x-deepinfra-receipt", "0"))) is None
        silences: tuple[dict[str, Any], ...] = (
            {},
            {"deepinfra": None},
            {"deepinfra": {}},
            {"deepinfra": {"receipt": False}},
        )
        for silent in silences:
            (told,) = await answer(app, path, body_of(path, **silent))
            assert "receipt" not in told["deepinfra"]


@pytest.mark.parametrize("path", PATHS)
async def test_an_operator_gives_one_always_or_never(path: str, kit: Any) -> None:
    app = asgi(kit.build(), receipts="always")
    async with running(app):
        assert receipt_among(await answer(app, path, body_of(path))) is not None
    app = asgi(kit.build(), receipts="never")
    async with running(app):
        assert receipt_among(await answer(app, path, body_of(path))) is None
        for body, headers, param in ((WANTED, (), "deepinfra.receipt"), ({}, (HEADER,), HEADER[0])):
            async with Client(app, headers=headers).request("POST", path, json=body_of(path, **body)) as response:
                assert await response.started() == 400
                error = (await response.json())["error"]
            assert f"{param!r} is not given by this server" in error["message"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"deepinfra": True}, "deepinfra"),
        ({"deepinfra": {"receipt": "yes"}}, "deepinfra.receipt"),
        ({"deepinfra": {"reciept": True}}, "deepinfra.reciept"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_a_wrong_wish_is_refused_by_name(path: str, wrong: Any, param: str, engine: Engine) -> None:
    app = asgi(engine)
    async with running(app), Client(app).request("POST", path, json=body_of(path, **wrong)) as response:
        assert await response.started() == 400
        assert param in (await response.json())["error"]["message"]


async def test_every_choice_of_every_prompt_is_in_one_receipt(engine: Engine) -> None:
    app = asgi(engine)
    body = body_of("/v1/completions", n=2, logprobs=1, stop=["\n"], stream=True, **WANTED) | {"prompt": ["a", "b", "c"]}
    async with running(app):
        receipt = receipt_among(await answer(app, "/v1/completions", body))
        assert receipt is not None
        outcome = await replay(engine, receipt)
    assert [len(asked.answers) for asked in receipt.requests] == [2, 2, 2]
    assert [asked.seed for asked in receipt.requests] == ["3"] * 3
    assert outcome.verdict == "same"
    assert all(each.logprobs for each in outcome.answers)


async def test_a_stored_response_keeps_its_receipt(engine: Engine) -> None:
    app = asgi(engine)
    async with running(app):
        (told,) = await answer(app, "/v1/responses", body_of("/v1/responses", **WANTED))
        async with Client(app).request("GET", f"/v1/responses/{told['id']}") as response:
            assert await response.started() == 200
            assert (await response.json())["deepinfra"] == told["deepinfra"]


async def test_no_receipt_tells_whose_it_is(kit: Any) -> None:
    key = "sk-a-secret-of-anns"
    app = asgi(kit.build(), keys=(ApiKey.of(key, name="laptop", tenant="ann-and-co"),))
    body = body_of("/v1/chat/completions", cache_salt="a-grain-of-salt", user="user-4711", **WANTED)
    async with running(app):
        (told,) = await answer(app, "/v1/chat/completions", body, ("authorization", f"Bearer {key}"))
    written = json.dumps(told["deepinfra"])
    assert '"receipt"' in written
    assert not any(word in written for word in (key, "laptop", "ann-and-co", "a-grain-of-salt", "user-4711"))


async def test_a_failed_stream_has_none(kit: Any) -> None:
    app = asgi(kit.build(kit.Gated(fail_at=3, num_blocks=256)))
    async with running(app):
        events = await answer(app, PATHS[0], body_of(PATHS[0], stream=True, **WANTED))
    assert "error" in events[-1]
    assert receipt_among(events) is None


# -- official clients ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    from deepinfra.engine import Pool
    from deepinfra.executors.toy import ToyExecutor
    from deepinfra.schedulers.fcfs import Fcfs
    from deepinfra.testing.tiny import TinyRecipe

    with Served(Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor(num_blocks=256)), name="toy")) as server:
        yield server


def read(told: Any) -> Receipt:
    """As a client would store it: through JSON of its own."""
    return receipt_of(decoded(json.dumps(told).encode()))


def test_openais_client_finds_it_in_chat(served: Served) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
        asked: Any = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        whole: Any = client.chat.completions.create(**asked, extra_body=WANTED | {"seed": 3})
        chunks: list[Any] = list(client.chat.completions.create(**asked, stream=True, extra_body=WANTED | {"seed": 3}))
    streamed = [chunk.deepinfra["receipt"] for chunk in chunks if hasattr(chunk, "deepinfra")]
    for told in (whole.deepinfra["receipt"], *streamed):
        assert len(read(told).requests[0].answers[0].tokens) == whole.usage.completion_tokens == 5
    assert len(streamed) == 1


def test_openais_client_finds_it_in_completions_and_responses(served: Served) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
        completion: Any = client.completions.create(
            model="toy", prompt="hi", max_tokens=5, extra_body=WANTED | {"seed": 3}
        )
        response: Any = client.responses.create(
            model="toy", input="hi", max_output_tokens=5, extra_body=WANTED | {"seed": 3}
        )
        events: list[Any] = list(
            client.responses.create(
                model="toy",
                input="hi",
                max_output_tokens=5,
                stream=True,
                extra_headers={HEADER[0]: HEADER[1]},
                extra_body={"seed": 3},
            )
        )
    for told in (completion, response, events[-1].response):
        assert len(read(told.deepinfra["receipt"]).requests[0].answers[0].tokens) == 5


def test_anthropics_client_finds_it(served: Served) -> None:
    with Anthropic(base_url=served.url, api_key="x") as client:
        asked: Any = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        whole: Any = client.messages.create(**asked, extra_body=WANTED | {"seed": 3})
        events: list[Any] = list(client.messages.create(**asked, stream=True, extra_body=WANTED | {"seed": 3}))
    streamed = [event.deepinfra["receipt"] for event in events if event.type == "message_delta"]
    for told in (whole.deepinfra["receipt"], *streamed):
        assert len(read(told).requests[0].answers[0].tokens) == 5
    assert len(streamed) == 1
