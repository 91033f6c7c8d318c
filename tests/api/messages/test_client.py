"""Over TCP with Anthropic's official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.served import Served
from deepinfra.testing.tiny import TinyRecipe

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SEED = {"seed": 3}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    executor = ToyExecutor(num_blocks=2048, max_seqs=16, max_context=8192)
    with Served(Engine(TinyRecipe(), Pool(Fcfs(), executor))) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[Anthropic]:
    with Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "max_tokens": 40, "messages": HELLO, "extra_body": SEED, **fields}


def said(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_streams_to_what_it_is_whole(client: Anthropic) -> None:
    whole = client.messages.create(**asked())
    with client.messages.stream(**asked()) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == said(final) == said(whole)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens > 1
    assert whole.model_extra is not None
    assert whole.model_extra["deepinfra"]["seed"] == 3
    assert whole.id.startswith("msg_")


def test_raw_events_pass_the_clients_types(client: Anthropic) -> None:
    events = list(client.messages.create(**asked(), stream=True))
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    for event in events:
        type(event).model_validate(event.model_dump(), strict=True)


def test_a_prefill_is_continued(client: Anthropic) -> None:
    plain = client.messages.create(**asked())
    begun = client.messages.create(**asked(messages=[*HELLO, {"role": "assistant", "content": "The answer"}]))
    assert begun.usage.input_tokens + (begun.usage.cache_read_input_tokens or 0) + (
        begun.usage.cache_creation_input_tokens or 0
    ) == len("?U") + len("hello") + len("A") + len("The answer")
    assert said(begun) != said(plain)


def test_a_stop_sequence_ends_the_message_and_is_named(client: Anthropic) -> None:
    whole = said(client.messages.create(**asked()))
    stop = whole[5:7]
    message = client.messages.create(**asked(stop_sequences=["never to be seen", stop]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert said(message) == whole[: whole.index(stop)]


def test_more_tokens_than_fit_are_as_many_as_fit(client: Anthropic) -> None:
    with client.messages.stream(**asked(max_tokens=32000, extra_body={**SEED, "temperature": 0})) as stream:
        message = stream.get_final_message()
    assert message.stop_reason in ("end_turn", "model_context_window_exceeded")
    words: Any = [{"role": "user", "content": "x" * 8100}]
    message = client.messages.create(**asked(max_tokens=20000, messages=words))
    assert message.stop_reason in ("end_turn", "model_context_window_exceeded")
    assert message.usage.output_tokens <= 8192 - 8103


def test_what_was_asked_before_is_read_from_the_cache(client: Anthropic) -> None:
    words: Any = [{"role": "user", "content": "a story, told twice " * 20}]
    first = client.messages.create(**asked(messages=words))
    with client.messages.stream(**asked(messages=words)) as stream:
        (start, *_) = list(stream)
        again = stream.get_final_message()
    prompt = 3 + len(words[0]["content"])
    for usage in (first.usage, again.usage, start.message.usage):  # type: ignore[union-attr]
        assert (
            usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
            == prompt
        )
    assert first.usage.cache_read_input_tokens == 0
    assert again.usage.cache_read_input_tokens == start.message.usage.cache_read_input_tokens  # type: ignore[union-attr]
    assert (again.usage.cache_read_input_tokens or 0) > prompt - 64


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


BAD, TOO_LARGE = anthropic.BadRequestError, anthropic.ContentTooLargeError
ERRORS = [
    ({"extra_body": {"temperature": 3}}, BAD, "invalid_request_error", "temperature"),
    ({"max_tokens": 0}, BAD, "invalid_request_error", "max_tokens"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, BAD, "invalid_request_error", "'bash_20250124'"),
    ({"messages": user("x" * 9000)}, BAD, "invalid_request_error", "maximum context length is 8192"),
    ({"model": "claude-9"}, anthropic.NotFoundError, "not_found_error", "claude-9"),
    ({"messages": user("x" * 9_000_000)}, TOO_LARGE, "request_too_large", "8388608 bytes"),
]


@pytest.mark.parametrize(("fields", "kind", "word", "message"), ERRORS, ids=[each[3] for each in ERRORS])
def test_errors_become_the_clients_exceptions(
    client: Anthropic, fields: dict[str, Any], kind: type[anthropic.APIStatusError], word: str, message: str
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            client.messages.create(**asked(**fields), stream=stream)
        body: Any = caught.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == word
        assert message in body["error"]["message"]
        assert body["request_id"] == caught.value.request_id
        assert caught.value.request_id


def test_a_failure_in_mid_stream_raises_in_the_client(kit: Any) -> None:
    with Served(kit.build(kit.Gated(fail_at=12))) as served:
        with Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
            with client.messages.stream(**asked(max_tokens=100)) as stream:
                with pytest.raises(anthropic.APIStatusError) as caught:
                    stream.get_final_message()
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")
    assert "the step failed" in body["error"]["message"]
    assert body["request_id"] == caught.value.request_id


def test_the_beta_client_asks_the_same_thing(client: Anthropic) -> None:
    plain = client.messages.create(**asked())
    beta = client.beta.messages.create(
        **asked(
            extra_body={**SEED, "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
        ),
        betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
    )
    assert [block.model_dump(exclude_none=True) for block in beta.content] == [
        block.model_dump(exclude_none=True) for block in plain.content
    ]


def test_an_answer_goes_back_as_the_client_writes_it(client: Anthropic) -> None:
    message = client.messages.create(**asked())
    turns: Any = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": "and?"}]
    again = client.messages.create(**asked(messages=turns))
    assert again.type == "message"
    assert (again.usage.cache_read_input_tokens or 0) > 0
