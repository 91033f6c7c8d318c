"""The official client against a real server: Responses over TCP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import openai
import pydantic
import pytest
from openai import OpenAI

from deepinfra.api.app import asgi
from deepinfra.core.conversation import Conversation, Message, TextPart
from deepinfra.core.identity import ApiKey
from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.client import Client, running
from deepinfra.testing.replay import ReplayExecutor
from deepinfra.testing.served import Served
from deepinfra.testing.tiny import TinyRecipe

EOS = next(iter(TinyRecipe().tokenizer.eos_ids))


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}]}


FORMAT = {"type": "json_schema", "name": "n", "schema": {"type": "string", "pattern": "(?=a)b"}}


def client_of(served: Served, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=30)


def replay(*answers: str) -> ReplayExecutor:
    return ReplayExecutor([tuple(answer.encode()) for answer in answers], eos=EOS, vocab_size=260)


def engine_of(executor: Any) -> Engine:
    return Engine(TinyRecipe(), Pool(Fcfs(), executor), name="toy")


@pytest.fixture(scope="module")
def toy() -> Iterator[Served]:
    with Served(engine_of(ToyExecutor(num_blocks=2048, max_seqs=16, max_context=8192))) as served:
        yield served


@pytest.fixture
def client(toy: Served) -> Iterator[OpenAI]:
    with client_of(toy) as client:
        yield client


@pytest.fixture
def talking() -> Iterator[Callable[..., tuple[OpenAI, ReplayExecutor]]]:
    """`talking(*answers)`: a client of a server that gives these answers, and its executor."""
    open_: list[Any] = []

    def talking(*answers: str, **options: Any) -> tuple[OpenAI, ReplayExecutor]:
        executor = replay(*answers)
        served = Served(engine_of(executor), **options)
        open_.append(served)
        client = client_of(served.__enter__())
        open_.append(client)
        return client, executor

    yield talking
    for each in reversed(open_):
        each.__exit__(None, None, None)


Talking = Callable[..., tuple[OpenAI, ReplayExecutor]]


def test_an_answer_streams_to_what_it_is_whole(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "toy", "input": "hello", "max_output_tokens": 40, "extra_body": {"seed": 3}}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert whole.usage is not None
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert whole.model_extra is not None
    assert whole.model_extra["deepinfra"]["seed"] == 3


def test_what_max_output_tokens_cuts_is_incomplete(client: OpenAI) -> None:
    answer = client.responses.create(model="toy", input="hello", max_output_tokens=5, extra_body={"ignore_eos": True})
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5


def test_the_clients_own_stream_helper_follows(talking: Talking) -> None:
    client, _ = talking("Hello there")
    with client.responses.stream(model="toy", input="hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "Hello there"
    assert final.status == "completed"
    assert client.responses.retrieve(final.id).output_text == "Hello there"


def test_three_turns_by_id_are_what_they_are_written_out(talking: Talking) -> None:
    client, executor = talking("A one", "A two", "A three")
    first = client.responses.create(model="toy", input="one", instructions="Count.")
    second = client.responses.create(model="toy", input="two", previous_response_id=first.id)
    stream = client.responses.create(
        model="toy", input="three", previous_response_id=second.id, instructions="Louder.", stream=True
    )
    third = list(stream)[-1].response  # type: ignore[union-attr]
    assert third.output_text == "A three"
    assert third.previous_response_id == second.id
    turns = [
        ("system", "Louder."),
        ("user", "one"),
        ("assistant", "A one"),
        ("user", "two"),
        ("assistant", "A two"),
        ("user", "three"),
    ]
    written = Conversation(
        messages=tuple(Message(role=role, content=(TextPart(text),)) for role, text in turns)  # type: ignore[arg-type]
    )
    assert executor.prompts[2] == TinyRecipe().render(written).ids
    assert third.usage is not None
    assert third.usage.input_tokens == len(executor.prompts[2])


def test_a_stateless_client_sends_back_what_it_got(talking: Talking) -> None:
    client, executor = talking("A one", "A two", "A three")
    history: list[Any] = [{"role": "user", "content": "one"}]
    first = client.responses.create(model="toy", input=history, store=False, include=["reasoning.encrypted_content"])
    history += first.output
    history.append({"role": "user", "content": "two"})
    second = client.responses.create(model="toy", input=history, store=False)
    assert second.output_text == "A two"
    dumped = [first.output[0].model_dump(), *history[2:]]
    client.responses.create(model="toy", input=[history[0], *dumped], store=False)
    assert executor.prompts[1] == executor.prompts[2]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_stored_responses_are_retrieved_listed_and_deleted(talking: Talking) -> None:
    client, _ = talking("A one", "A two")
    first = client.responses.create(model="toy", input="one", metadata={"who": "me"})
    second = client.responses.create(
        model="toy", input=[{"role": "user", "content": "two"}], previous_response_id=first.id
    )
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert client.responses.retrieve(first.id, include=["message.output_text.logprobs"]).metadata == {"who": "me"}
    listed = list(client.responses.input_items.list(second.id, limit=1))
    assert [item.content[0].text for item in listed] == ["two", "A one", "one"]  # type: ignore[union-attr]
    assert len({item.id for item in listed}) == 3  # type: ignore[union-attr]
    assert listed[1].id == first.output[0].id  # type: ignore[union-attr]
    ordered = client.responses.input_items.list(second.id, order="asc")
    assert [item.id for item in ordered] == [item.id for item in reversed(listed)]  # type: ignore[union-attr]
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="not found"):
            call(first.id)
    assert len(list(client.responses.input_items.list(second.id))) == 3


def test_a_stored_response_belongs_to_its_tenant() -> None:
    keys = [ApiKey.of(name * 20, name=name) for name in ("ann", "bob")]
    with Served(engine_of(replay("A one", "A two")), keys=keys) as served:
        with client_of(served, "ann" * 20) as ann, client_of(served, "bob" * 20) as bob:
            first = ann.responses.create(model="toy", input="one")
            for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
                with pytest.raises(openai.NotFoundError) as caught:
                    call(first.id)
                assert str(caught.value).count(first.id) == 1
            with pytest.raises(openai.NotFoundError) as caught:
                bob.responses.create(model="toy", input="two", previous_response_id=first.id)
            assert caught.value.code == "previous_response_not_found"
            assert ann.responses.create(model="toy", input="two", previous_response_id=first.id).output_text == "A two"
        with client_of(served, "eve" * 20) as eve, pytest.raises(openai.AuthenticationError):
            eve.responses.retrieve(first.id)


def test_logprobs_belong_to_the_text(client: OpenAI) -> None:
    answer = client.responses.create(
        model="toy",
        input="hello",
        max_output_tokens=20,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )
    (part,) = answer.output[0].content  # type: ignore[union-attr]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode("utf-8", "replace") == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=5)]
    age: Annotated[int, pydantic.Field(ge=0, le=99)]


def test_a_format_is_held_to(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "toy", "input": "a person", "text_format": Person, "max_output_tokens": 300}
    whole = client.responses.parse(**asked, extra_body={"seed": 3})
    with client.responses.stream(**asked, extra_body={"seed": 3}) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    assert whole.status == streamed.status == "completed"
    assert isinstance(whole.output_parsed, Person)
    assert streamed.output_parsed == whole.output_parsed
    cut = client.responses.create(
        model="toy", input="json", text={"format": {"type": "json_object"}}, max_output_tokens=1
    )
    assert cut.status == "incomplete"
    assert cut.output_text == "{"


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"background": True}, openai.BadRequestError, "unsupported_parameter", "background"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "unsupported_parameter", "tools.0.type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_file"}]}]},
            openai.BadRequestError,
            "unsupported_parameter",
            "input.0.content.1.type",
        ),
        ({"max_output_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded", "input"),
        (
            {"input": [{"role": "user", "content": "a"}, IMAGE]},
            openai.BadRequestError,
            "unsupported_parameter",
            "content",
        ),
        ({"text": {"format": FORMAT}}, openai.BadRequestError, "invalid_value", "text.format"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", "model"),
        (
            {"previous_response_id": "resp_x"},
            openai.NotFoundError,
            "previous_response_not_found",
            "previous_response_id",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, openai.NotFoundError, "not_found", "input.0.id"),
    ],
)
def test_errors_become_the_clients_exceptions(
    client: OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str, param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            client.responses.create(**{"model": "toy", "input": "hi", **fields, "stream": stream})
        assert (caught.value.code, caught.value.param) == (code, param)
        assert caught.value.request_id


def test_questions_about_stored_responses_refuse_what_they_do_not_serve(client: OpenAI) -> None:
    stored = client.responses.create(model="toy", input="hi", max_output_tokens=2)
    for call, param in (
        (lambda: client.responses.retrieve(stored.id, stream=True), "stream"),
        (lambda: client.responses.retrieve(stored.id, starting_after=3), "starting_after"),
        (lambda: client.responses.input_items.list(stored.id, limit=0), "limit"),
        (lambda: client.responses.input_items.list(stored.id, after="msg_x"), "after"),
        (lambda: client.responses.input_items.list(stored.id, order="up"), "order"),  # type: ignore[arg-type]
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            call()  # type: ignore[no-untyped-call]
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(stored.id)


def test_a_failure_in_mid_stream_ends_it_with_a_failed_response(kit: Any) -> None:
    with Served(kit.build(kit.Gated(fail_at=12), name="toy")) as served, client_of(served) as client:
        asked: dict[str, Any] = {"model": "toy", "input": "hi", "extra_body": {"ignore_eos": True}}
        events = list(client.responses.create(**asked, max_output_tokens=100, stream=True))
        assert events[-1].type == "response.failed"
        failed = events[-1].response
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.code == "server_error"
        assert "the step failed" in failed.error.message
        assert failed.output_text
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(failed.id)
        with pytest.raises(openai.InternalServerError, match="the step failed"):
            client.responses.create(**asked, max_output_tokens=100)


async def test_what_a_vanished_client_asked_is_not_stored(kit: Any) -> None:
    engine = kit.build(name="toy")
    app = asgi(engine)
    async with running(app) as state:
        client = Client(app, state=state)
        body = {"model": "toy", "input": "hi", "max_output_tokens": 500, "stream": True}
        async with client.request("POST", "/v1/responses", json={**body, "ignore_eos": True}) as response:
            created = (await anext(response.chunks())).split(b"\n")[1].removeprefix(b"data: ")
            response.disconnect()
        await kit.settled(engine)
        response_id = json.loads(created)["response"]["id"]
        assert (await client.get(f"/v1/responses/{response_id}"))[0] == 404
        status, whole = await client.post("/v1/responses", {**body, "stream": False})
        assert (await client.get(f"/v1/responses/{whole['id']}")) == (status, whole)
