"""Whole requests in process: a real engine over the toy executor, a client that sees each chunk and can vanish."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from deepinfra.api.app import asgi
from deepinfra.core.conversation import Conversation, MediaPart
from deepinfra.core.request import Prompt
from deepinfra.engine import Engine
from deepinfra.errors import InjectionError, TemplateError
from deepinfra.recipes import ChatTemplate
from deepinfra.testing.client import Client
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.textmodel import TrainedTextModel
from deepinfra.testing.tiny import BOS, TinyRecipe

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def streamed(client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    async with client.request("POST", path, json={**body, "stream": True}) as response:
        assert await response.started() == 200
        return [event async for event in response.events()]


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["a", "e"]}], ids=str)
async def test_a_stream_and_a_whole_answer_say_the_same(
    kit: Any, engine: Engine, path: str, fields: dict[str, Any]
) -> None:
    if path == COMPLETIONS and "logprobs" in fields:
        fields = {"logprobs": 2}
    body = {**(kit.chat() if path == CHAT else kit.completion()), "max_tokens": 40, **fields}
    async with engine:
        client = Client(asgi(engine))
        status, whole = await client.post(path, body)
        events = await streamed(client, path, {**body, "stream_options": {"include_usage": True}})
    assert status == 200
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in events if chunk["choices"][0]["index"] == choice["index"]]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        if path == CHAT:
            assert "".join(each["delta"].get("content", "") for each in mine) == choice["message"]["content"]
            entries = [entry for each in mine if each["logprobs"] for entry in each["logprobs"]["content"]]
            assert entries == ((choice["logprobs"] or {}).get("content") or [])
        else:
            assert "".join(each["text"] for each in mine) == choice["text"]


async def test_the_order_of_a_stream_is_fixed(kit: Any, engine: Engine) -> None:
    async with engine:
        events = await streamed(Client(asgi(engine)), CHAT, kit.chat(n=2, stream_options={"include_usage": True}))
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[2:])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in [*chunks, usage]}) == 1
    reasons = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert len(reasons) == 2
    assert all(chunk["choices"][0]["delta"] == {} for chunk in reasons)
    assert [chunk for chunk in chunks if "deepinfra" in chunk] == [chunks[-1]] == reasons[-1:]
    assert chunks[-1]["deepinfra"]["seed"] == 7


async def test_without_include_usage_no_chunk_speaks_of_usage(kit: Any, engine: Engine) -> None:
    async with engine:
        events = await streamed(Client(asgi(engine)), CHAT, kit.chat())
    assert all("usage" not in chunk and chunk["choices"] for chunk in events[:-1])


async def test_a_streams_headers_keep_proxies_from_holding_it(kit: Any, engine: Engine) -> None:
    async with engine:
        async with Client(asgi(engine)).request("POST", CHAT, json=kit.chat(stream=True)) as response:
            await response.started()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"


async def test_a_seed_repeats_an_answer_and_no_seed_draws_one(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine))
        first = (await client.post(CHAT, kit.chat(seed=None, max_tokens=30)))[1]
        seed = first["deepinfra"]["seed"]
        again = (await client.post(CHAT, kit.chat(seed=seed, max_tokens=30)))[1]
        other = (await client.post(CHAT, kit.chat(seed=None, max_tokens=30)))[1]
    assert again["choices"] == first["choices"]
    assert other["deepinfra"]["seed"] != seed


async def test_a_second_turn_reports_the_first_as_cached(kit: Any, engine: Engine) -> None:
    body = kit.chat("x" * 40)
    async with engine:
        client = Client(asgi(engine))
        first = (await client.post(CHAT, body))[1]
        second = (await client.post(CHAT, body))[1]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 36
    assert second["deepinfra"]["cached_tokens"]["device"] == cached
    assert second["usage"]["prompt_cache_miss_tokens"] + cached == second["usage"]["prompt_tokens"]


async def test_a_stop_string_ends_the_answer_and_is_not_returned(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine))
        whole = (await client.post(COMPLETIONS, kit.completion(max_tokens=60, temperature=0)))[1]["choices"][0]["text"]
        stop = next(char for char in whole[5:] if char.isascii())
        cut = (await client.post(COMPLETIONS, kit.completion(max_tokens=60, temperature=0, stop=stop)))[1]["choices"][0]
    assert cut["text"] == whole.partition(stop)[0]
    assert cut["finish_reason"] == "stop"


async def test_prompts_times_n_answers_come_in_order_and_alone_they_are_the_same(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine))
        both = (await client.post(COMPLETIONS, kit.completion(["abc", "de"], n=2)))[1]
        alone = [(await client.post(COMPLETIONS, kit.completion(prompt, n=2)))[1] for prompt in ("abc", "de")]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for each in alone for choice in each["choices"]]
    assert [choice["text"] for choice in both["choices"]] == texts
    assert both["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)


async def test_token_ids_are_a_prompt(kit: Any, engine: Engine) -> None:
    async with engine:
        status, answer = await Client(asgi(engine)).post(COMPLETIONS, kit.completion([1, 2, 3]))
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 3


async def test_created_comes_from_the_given_clock(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine, clock=ManualClock(wall=1_234.9)))
        assert (await client.post(CHAT, kit.chat()))[1]["created"] == 1234


async def test_a_large_body_is_parsed_off_the_loop(kit: Any, engine: Engine) -> None:
    calls: list[int] = []

    class Counting:
        async def __call__(self, function: Any, /, *args: Any) -> Any:
            calls.append(len(args[0]))
            return await anyio.to_thread.run_sync(function, *args)

    async with engine:
        client = Client(asgi(engine, offload=Counting()))
        assert (await client.post(CHAT, kit.chat(metadata={"note": "x" * 40_000})))[0] == 200
        assert (await client.post(CHAT, kit.chat()))[0] == 200
    assert len(calls) == 1


CHOICES = ["a|b", "c.d", "(e)", "f\\d+", "g-h~i&j#k l", "日本🙂", "$^*+?[{", "\n", "a"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_choice_is_one_of_its_texts_to_the_character(kit: Any, engine: Engine, path: str) -> None:
    fields = {"structured_outputs": {"choice": CHOICES}, "n": 64, "max_tokens": 40}
    async with engine:
        body = kit.chat(**fields) if path == CHAT else kit.completion(**fields)
        status, answer = await Client(asgi(engine)).post(path, body)
    assert status == 200
    said = {choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in answer["choices"]}
    assert said <= set(CHOICES)
    assert len(said) >= 5
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


async def test_a_regex_and_a_schema_hold_in_both_protocols(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine))
        asked = kit.completion(structured_outputs={"regex": "[0-9]{3}-[a-c]+"}, max_tokens=200, seed=1)
        text = (await client.post(COMPLETIONS, asked))[1]["choices"][0]["text"]
        assert re.fullmatch("[0-9]{3}-[a-c]+", text)
        schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
        format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
        answer = (await client.post(CHAT, kit.chat(response_format=format_, max_tokens=400)))[1]["choices"][0]
        assert answer["finish_reason"] in ("stop", "length")
        if answer["finish_reason"] == "stop":
            assert json.loads(answer["message"]["content"])["n"] <= 9


async def test_what_the_library_cannot_enforce_names_the_field(kit: Any, engine: Engine) -> None:
    for given, param in (
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}}, None),
    ):
        status, error = await refused(engine, kit, kit.chat(**given))
        assert status == 400
        assert (error["param"] or "").startswith(param or "response_format")


async def test_a_stop_token_ends_an_answer_and_is_not_said(kit: Any, engine: Engine) -> None:
    body = kit.chat(max_tokens=60, temperature=0, ignore_eos=True, logprobs=True)
    async with engine:
        client = Client(asgi(engine))
        whole = (await client.post(CHAT, body))[1]["choices"][0]["logprobs"]["content"]
        token = whole[7]["bytes"]
        before = [entry["bytes"] for entry in whole].index(token)
        cut = (await client.post(CHAT, {**body, "stop_token_ids": token}))[1]["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["logprobs"]["content"] == whole[:before]


async def test_a_fingerprint_stays_with_the_weights(kit: Any) -> None:
    prints = []
    for seed in (1, 1, 2):
        async with kit.build(kit.Gated(seed=seed)) as engine:
            client = Client(asgi(engine))
            whole = (await client.post(CHAT, kit.chat()))[1]
            events = await streamed(client, COMPLETIONS, kit.completion())
            prints.append(whole["system_fingerprint"])
            assert {event["system_fingerprint"] for event in events[:-1]} == {prints[-1]}
    assert prints[0] == prints[1] != prints[2]
    assert prints[0].startswith("fp_")


# -- refusals -------------------------------------------------------------------------------------


async def refused(engine: Engine, kit: Any, body: Any, path: str = CHAT, **settings: Any) -> tuple[int, dict[str, Any]]:
    async with engine:
        client = Client(asgi(engine, **settings))
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with client.request("POST", path, body=data) as response:
            status, answer = await response.started(), await response.json()
            assert response.headers["content-type"] == "application/json"
            assert response.headers["x-request-id"]
        assert (await client.post(CHAT, kit.chat()))[0] == 200
        await kit.settled(engine)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return status, answer["error"]


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"temprature": 1}, 400, "unsupported_parameter", "temprature"),
        ({"audio": {"voice": "a"}}, 400, "unsupported_parameter", "audio"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            400,
            "invalid_value",
            "messages.0.content.0.type",
        ),
        ({"model": "gpt-9"}, 404, "model_not_found", "model"),
        ({"max_tokens": 100_000}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "context_length_exceeded", "messages"),
        ({"top_k": 5}, 400, "unsupported_parameter", "top_k"),
        ({"logit_bias": {"999999": 1}}, 400, "invalid_value", "logit_bias.999999"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "unsupported_parameter", "tools"),
    ],
    ids=str,
)
async def test_a_wrong_request_is_a_4xx_that_names_the_field(
    kit: Any, engine: Engine, change: dict[str, Any], status: int, code: str, param: str
) -> None:
    for stream in (False, True):
        got, error = await refused(engine, kit, kit.chat(**{**change, "stream": stream}))
        assert (got, error["code"], error["param"]) == (status, code, param)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1]", b'{"model": NaN}', b'{"model": "a", "model": "b"}'])
async def test_a_body_that_is_no_json_object_is_refused(kit: Any, engine: Engine, body: bytes) -> None:
    status, error = await refused(engine, kit, body)
    assert (status, error["code"], error["type"]) == (400, "invalid_json", "invalid_request_error")


async def test_ten_megabytes_are_refused(kit: Any, engine: Engine) -> None:
    status, error = await refused(engine, kit, kit.chat("x" * 10_000_000))
    assert (status, error["code"]) == (413, "body-too-large")


async def test_a_body_in_pieces_is_counted(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine, max_body_nbytes=1000))
        async with client.request("POST", CHAT, body=[b"x" * 400] * 3) as response:
            assert await response.started() == 413


async def test_the_content_type_does_not_matter(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine))
        body = json.dumps(kit.chat()).encode()
        async with client.request("POST", CHAT, body=body, headers=[("content-type", "text/plain")]) as response:
            assert await response.started() == 200


async def test_what_the_template_refuses_is_the_clients_to_mend(kit: Any) -> None:
    class Strict(TinyRecipe):
        def render(self, conversation: Conversation) -> Prompt:
            if conversation.messages[0].text == "bad":
                raise TemplateError("roles must alternate")
            return super().render(conversation)

    status, error = await refused(kit.build(recipe=Strict()), kit, kit.chat("bad"))
    assert (status, error["message"], error["param"]) == (400, "roles must alternate", "messages")


PICTURE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]


async def test_an_image_for_a_recipe_that_takes_none_is_refused_where_it_stands(kit: Any) -> None:
    recipe = ChatTemplate(TrainedTextModel())
    body = kit.chat(messages=[{"role": "user", "content": "hi"}, {"role": "user", "content": PICTURE}], model="m")
    async with kit.build(recipe=recipe, executor=kit.Gated(vocab_size=1000), name="m") as engine:
        status, answer = await Client(asgi(engine)).post(CHAT, body)
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
    assert answer["error"]["param"] == "messages.1.content"


async def test_an_image_for_an_executor_that_takes_none_is_refused(kit: Any) -> None:
    class Seeing(TinyRecipe):
        def render(self, conversation: Conversation) -> Prompt:
            (part,) = conversation.messages[0].content
            digest = part.digest if isinstance(part, MediaPart) else b""
            return Prompt(ids=(BOS, 1, 2), control=(0,), media=((1, digest),) if digest else ())

    status, error = await refused(
        kit.build(recipe=Seeing()), kit, kit.chat(messages=[{"role": "user", "content": PICTURE}])
    )
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "messages")
    assert "executor does not take" in error["message"]


async def test_an_injection_is_an_incident_of_the_server(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Unsafe(TinyRecipe):
        def render(self, conversation: Conversation) -> Prompt:
            if conversation.messages[0].text == "bad":
                raise InjectionError("a control token would come from user text")
            return super().render(conversation)

    status, error = await refused(kit.build(recipe=Unsafe()), kit, kit.chat("bad"))
    assert (status, error["code"]) == (500, "injection")
    assert "injection" in caplog.text


async def test_a_mistake_of_ours_is_logged_and_not_described(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TinyRecipe):
        def render(self, conversation: Conversation) -> Prompt:
            if conversation.messages[0].text == "bad":
                raise KeyError("internals")
            return super().render(conversation)

    status, error = await refused(kit.build(recipe=Broken()), kit, kit.chat("bad"))
    assert (status, error["code"]) == (500, "internal-error")
    assert "internals" not in error["message"]
    assert "KeyError: 'internals'" in caplog.text


async def test_an_engine_that_nobody_entered_says_what_to_write(kit: Any, engine: Engine) -> None:
    status, answer = await Client(asgi(engine)).post(CHAT, kit.chat())
    assert (status, answer["error"]["code"]) == (503, "engine-not-running")
    assert "lifespan=llm.lifespan" in answer["error"]["message"]


async def test_a_full_queue_is_503_with_a_time_to_come_back(kit: Any) -> None:
    executor = kit.Gated(shut=True, max_seqs=1)
    engine = kit.build(executor, max_queue=1)
    async with engine:
        client = Client(asgi(engine))
        async with anyio.create_task_group() as group:
            group.start_soon(client.post, CHAT, kit.chat())
            await kit.until(lambda: executor.steps)  # it waits, for the scheduler, until its first step is done
            async with client.request("POST", CHAT, json=kit.chat(stream=True)) as response:
                assert await response.started() == 503
                assert int(response.headers["retry-after"]) >= 1
                assert (await response.json())["error"]["code"] == "overloaded"
            executor.gate.set()
        await kit.settled(engine)


async def test_a_draining_engine_finishes_what_runs_and_takes_nothing_new(kit: Any) -> None:
    executor = kit.Gated(shut=True)
    engine = kit.build(executor)
    async with engine:
        client = Client(asgi(engine))
        async with client.request("POST", CHAT, json=kit.chat(stream=True)) as running:
            async with anyio.create_task_group() as group:
                await kit.until(lambda: executor.steps)
                group.start_soon(engine.drain, 30)
                await kit.until(lambda: engine.state == "draining")
                status, answer = await client.post(CHAT, kit.chat())
                assert (status, answer["error"]["code"]) == (503, "engine-draining")
                executor.gate.set()
                assert [event async for event in running.events()][-1] == "[DONE]"


# -- failures -------------------------------------------------------------------------------------


async def test_a_failure_before_the_first_event_has_a_status(kit: Any) -> None:
    engine = kit.build(kit.Gated(fail_at=1))
    async with engine:
        client = Client(asgi(engine))
        for stream in (False, True):
            status, answer = await client.post(CHAT, kit.chat(stream=stream))
            assert (status, answer["error"]["code"], answer["error"]["type"]) == (500, "step-failed", "server_error")
        await kit.settled(engine)


async def test_a_failure_in_mid_stream_is_the_last_event(kit: Any) -> None:
    engine = kit.build(kit.Gated(fail_at=12))
    async with engine:
        events = await streamed(Client(asgi(engine)), CHAT, kit.chat(max_tokens=100))
        await kit.settled(engine)
    assert len(events) > 1
    assert events[-1]["error"]["code"] == "step-failed"
    assert all("error" not in event for event in events[:-1])


async def test_one_prompt_that_fails_ends_the_whole_stream_once(kit: Any) -> None:
    engine = kit.build(kit.Gated(fail_at=12))
    async with engine:
        body = kit.completion(["a", "b", "c"], n=2, max_tokens=100, ignore_eos=True)
        events = await streamed(Client(asgi(engine)), COMPLETIONS, body)
        await kit.settled(engine)
    assert [event for event in events if "error" in event] == events[-1:]


async def test_a_failure_in_mid_answer_is_a_status_if_nothing_was_sent(kit: Any) -> None:
    engine = kit.build(kit.Gated(fail_at=12))
    async with engine:
        status, answer = await Client(asgi(engine)).post(CHAT, kit.chat(max_tokens=100))
    assert (status, answer["error"]["code"]) == (500, "step-failed")


async def test_an_engine_that_stops_under_an_answer_ends_it_with_an_error(kit: Any) -> None:
    executor = kit.Gated(num_blocks=2048)
    engine = kit.build(executor)
    answers: list[tuple[int, Any]] = []

    async def ask() -> None:
        answers.append(await Client(asgi(engine)).post(CHAT, kit.chat(max_tokens=4000, ignore_eos=True)))

    async with anyio.create_task_group() as group:
        async with engine:
            group.start_soon(ask)
            await kit.until(lambda: executor.steps > 3)
    ((status, answer),) = answers
    assert (status, answer["error"]["code"]) == (503, "engine-stopped")
    assert answer["error"]["message"] == "the server stopped before the answer was complete"


async def test_a_failure_after_a_sign_of_life_is_an_event(kit: Any) -> None:
    executor = kit.Gated(shut=True, fail_at=1)
    engine = kit.build(executor)
    async with engine:
        async with Client(asgi(engine, keepalive_s=0.002)).request(
            "POST", CHAT, json=kit.chat(stream=True)
        ) as response:
            chunks = response.chunks()
            await anext(chunks)
            executor.gate.set()
            rest = b"".join([chunk async for chunk in chunks]).replace(b": keep-alive\n\n", b"")
    assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "step-failed"


async def test_a_slow_client_gets_fewer_and_larger_chunks_and_blocks_nobody(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine))
        body = kit.completion(max_tokens=200, ignore_eos=True)
        whole = (await client.post(COMPLETIONS, body))[1]["choices"][0]["text"]
        async with client.request("POST", COMPLETIONS, json={**body, "stream": True}) as response:
            await response.started()
            await kit.settled(engine)  # the engine is done although nothing was read
            events = [event async for event in response.events()]
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole
    assert len(events) < 20
