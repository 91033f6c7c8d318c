"""One conversation through three protocols and both official clients: the same from one server, and counted alike."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from anthropic import Anthropic
from openai import OpenAI

from deepinfra.engine import Engine, Pool
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.toy import ToyExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.served import Served
from deepinfra.testing.textmodel import TrainedTextModel

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAME, ABOUT = "get_weather", "The weather of a city"
BLOCK = 64
"""No block of a server here is larger: so many tokens of a prompt that was computed before may not be found."""


class Turn(NamedTuple):
    """A turn of the conversation, in no protocol's words; `name` and `call` belong to calls and results."""

    kind: Literal["user", "said", "call", "result"]
    text: str
    name: str = ""
    call: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked besides the conversation; `choice` is about the one tool, empty without it."""

    choice: Literal["", "named", "auto", "none"] = ""
    schema: bool = False
    stream: bool = False


class Counts(NamedTuple):
    """Tokens: of the prompt, those of it read from the cache and written to it, of the answer, and its reasoning."""

    prompt: int
    cached: int
    written: int
    output: int
    reasoning: int


class Answer(NamedTuple):
    """What was said: text, calls as name, arguments and id, how it ended in the protocol's words, and what it took."""

    text: str
    calls: tuple[tuple[str, Any, str], ...]
    end: str
    counts: Counts


class Talk(ABC):
    """A conversation in one protocol's words."""

    text_end: str
    call_end: str

    @abstractmethod
    def ask(self, turns: Sequence[Turn], wanted: Wanted) -> Answer:
        """Send all turns, and what is wanted."""


class Chat(Talk):
    text_end, call_end = "stop", "stop"  # OpenAI's word after a call that was asked for by name

    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def ask(self, turns: Sequence[Turn], wanted: Wanted) -> Answer:
        function = {"name": NAME, "description": ABOUT, "parameters": SCHEMA}
        fields: dict[str, Any] = {"model": "m", "messages": [], "max_tokens": 64, "temperature": 0, "seed": 1}
        for turn in turns:
            fields["messages"].append(self._message(turn))
        if wanted.choice:
            named = {"type": "function", "function": {"name": NAME}}
            fields |= {"tools": [{"type": "function", "function": function}], "parallel_tool_calls": False}
            fields["tool_choice"] = named if wanted.choice == "named" else wanted.choice
        if wanted.schema:
            form = {"name": "weather", "schema": SCHEMA, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        if wanted.stream:
            with self._client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
                for _ in stream:
                    pass
                completion: Any = stream.current_completion_snapshot  # the final one raises for a length
        else:
            completion = self._client.chat.completions.create(**fields)
        (choice,), usage = completion.choices, completion.usage
        calls = tuple(
            (call.function.name, json.loads(call.function.arguments), call.id)
            for call in choice.message.tool_calls or ()
        )
        details = usage.prompt_tokens_details
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_cache_hit_tokens == details.cached_tokens
        assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens
        counts = Counts(
            usage.prompt_tokens,
            details.cached_tokens,
            details.cache_write_tokens,
            usage.completion_tokens,
            usage.completion_tokens_details.reasoning_tokens,
        )
        return Answer(choice.message.content or "", calls, choice.finish_reason, counts)

    @staticmethod
    def _message(turn: Turn) -> dict[str, Any]:
        match turn.kind:
            case "user":
                return {"role": "user", "content": turn.text}
            case "said":
                return {"role": "assistant", "content": turn.text}
            case "call":
                function = {"name": turn.name, "arguments": turn.text}
                call = {"id": turn.call, "type": "function", "function": function}
                return {"role": "assistant", "content": None, "tool_calls": [call]}
            case "result":
                return {"role": "tool", "tool_call_id": turn.call, "content": turn.text}


class Respond(Talk):
    text_end = call_end = "completed"

    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def ask(self, turns: Sequence[Turn], wanted: Wanted) -> Answer:
        fields: dict[str, Any] = {
            "model": "m",
            "input": [self._item(turn) for turn in turns],
            "max_output_tokens": 64,
            "temperature": 0,
            "store": False,
            "extra_body": {"seed": 1},
        }
        if wanted.choice:
            function = {"type": "function", "name": NAME, "description": ABOUT, "parameters": SCHEMA, "strict": False}
            fields |= {"tools": [function], "parallel_tool_calls": False}
            named = {"type": "function", "name": NAME}
            fields["tool_choice"] = named if wanted.choice == "named" else wanted.choice
        if wanted.schema:
            fields["text"] = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}}
        if wanted.stream:
            *_, last = self._client.responses.create(**fields, stream=True)
            response: Any = last.response  # type: ignore[union-attr]
        else:
            response = self._client.responses.create(**fields)
        usage = response.usage
        calls = tuple(
            (item.name, json.loads(item.arguments), item.call_id)
            for item in response.output
            if item.type == "function_call"
        )
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        counts = Counts(
            usage.input_tokens,
            usage.input_tokens_details.cached_tokens,
            usage.input_tokens_details.cache_write_tokens,
            usage.output_tokens,
            usage.output_tokens_details.reasoning_tokens,
        )
        return Answer(response.output_text, calls, response.status, counts)

    @staticmethod
    def _item(turn: Turn) -> dict[str, Any]:
        match turn.kind:
            case "user":
                return {"role": "user", "content": turn.text}
            case "said":
                return {"role": "assistant", "content": turn.text}
            case "call":
                return {"type": "function_call", "call_id": turn.call, "name": turn.name, "arguments": turn.text}
            case "result":
                return {"type": "function_call_output", "call_id": turn.call, "output": turn.text}


class Messages(Talk):
    text_end, call_end = "end_turn", "tool_use"

    def __init__(self, client: Anthropic) -> None:
        self._client = client

    def ask(self, turns: Sequence[Turn], wanted: Wanted) -> Answer:
        fields: dict[str, Any] = {"model": "m", "messages": [self._message(turn) for turn in turns]}
        if wanted.choice:
            fields["tools"] = [{"name": NAME, "description": ABOUT, "input_schema": SCHEMA}]
            choice = {"type": "tool", "name": NAME} if wanted.choice == "named" else {"type": wanted.choice}
            one = {} if wanted.choice == "none" else {"disable_parallel_tool_use": True}
            fields["tool_choice"] = {**choice, **one}
        if wanted.schema:
            fields["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
        counted = self._client.messages.count_tokens(**fields).input_tokens
        fields |= {"max_tokens": 64, "extra_body": {"temperature": 0, "seed": 1}}
        if wanted.stream:
            with self._client.messages.stream(**fields) as stream:
                message = stream.get_final_message()
        else:
            message = self._client.messages.create(**fields)
        usage: Any = message.usage
        read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        assert usage.input_tokens + read + written == counted
        assert sum(usage.cache_creation.model_dump().values()) == written
        text = "".join(block.text for block in message.content if block.type == "text")
        calls = tuple((block.name, block.input, block.id) for block in message.content if block.type == "tool_use")
        counts = Counts(
            usage.input_tokens + read + written,
            read,
            written,
            usage.output_tokens,
            usage.output_tokens_details.thinking_tokens,
        )
        return Answer(text, calls, str(message.stop_reason), counts)

    @staticmethod
    def _message(turn: Turn) -> dict[str, Any]:
        match turn.kind:
            case "user":
                return {"role": "user", "content": turn.text}
            case "said":
                return {"role": "assistant", "content": turn.text}
            case "call":
                block = {"type": "tool_use", "id": turn.call, "name": turn.name, "input": json.loads(turn.text)}
                return {"role": "assistant", "content": [block]}
            case "result":
                block = {"type": "tool_result", "tool_use_id": turn.call, "content": turn.text}
                return {"role": "user", "content": [block]}


def played(talk: Talk) -> list[Answer]:
    """Text, the same as a stream, a forced call, what follows its result, and an answer to a schema."""
    turns = [Turn("user", "What is the capital of France, and what is it known for?")]
    answers = [talk.ask(turns, Wanted()), talk.ask(turns, Wanted(stream=True))]
    turns += [Turn("said", answers[-1].text), Turn("user", "What is the weather there in the next three days?")]
    answers += [talk.ask(turns, Wanted(choice="named", stream=stream)) for stream in (False, True)]
    ((name, arguments, call),) = answers[-1].calls
    written = json.dumps(arguments, ensure_ascii=False)
    turns += [Turn("call", written, name, call), Turn("result", "rain, 12.50 degrees", name, call)]
    answers += [talk.ask(turns, Wanted(choice="auto", stream=True))]
    turns += [Turn("said", answers[-1].text), Turn("user", "Tell me city and days as JSON.")]
    answers += [talk.ask(turns, Wanted(choice="none", schema=True, stream=stream)) for stream in (False, True)]
    return answers


def check(url: str) -> None:
    with (
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as openai,
        Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as anthropic,
    ):
        talks: list[Talk] = [Chat(openai), Respond(openai), Messages(anthropic)]
        protocols = [played(talk) for talk in talks]
    for talk, answers in zip(talks, protocols, strict=True):
        _check_one(talk, answers)
    for step in zip(*protocols, strict=True):
        first = step[0]
        for answer in step[1:]:
            assert answer.text == first.text
            assert [call[:2] for call in answer.calls] == [call[:2] for call in first.calls]
            counts = answer.counts
            assert (counts.prompt, counts.output, counts.reasoning) == (first.counts.prompt, first.counts.output, 0)
            # The same prompt was computed for the protocol before: all of it is there but what fills no block.
            assert counts.prompt - BLOCK <= counts.cached < counts.prompt
            assert counts.cached >= first.counts.cached


def _check_one(talk: Talk, answers: Sequence[Answer]) -> None:
    """What holds within one protocol."""
    whole, streamed, called, called_again, read, formed, formed_again = answers
    for one, other in ((whole, streamed), (called, called_again), (formed, formed_again)):
        assert (one.text, one.end, one.counts.prompt, one.counts.output) == (
            other.text,
            other.end,
            other.counts.prompt,
            other.counts.output,
        )
        assert [call[:2] for call in one.calls] == [call[:2] for call in other.calls]
        assert other.counts.cached >= max(one.counts.cached, one.counts.prompt - BLOCK)
    for answer in answers:
        counts = answer.counts
        assert 0 <= counts.cached <= counts.cached + counts.written <= counts.prompt
        assert 0 < counts.output <= 64
    assert read.counts.prompt > called_again.counts.prompt
    assert read.counts.cached >= called_again.counts.prompt - BLOCK
    assert whole.text
    assert read.text
    assert not read.calls
    ((name, arguments, _),) = called.calls
    assert (name, called.end) == (NAME, talk.call_end)
    assert formed.end == talk.text_end
    for value in (arguments, json.loads(formed.text)):
        assert set(value) == {"city", "days"}
        assert len(value["city"]) <= 12
        assert 1 <= value["days"] <= 9


@pytest.fixture
def toy() -> Iterator[str]:
    """A toy with a real tokenizer, whose template ignores tools; it says anything, but what it must."""
    files = TrainedTextModel()
    vocab_size = files.tokenizer().get_vocab_size()
    executor = ToyExecutor(num_blocks=1024, max_context=4096, vocab_size=vocab_size)
    with Served(Engine(ChatTemplate(files), Pool(Fcfs(), executor), name="m")) as served:
        yield served.url


def test_a_conversation_is_the_same_in_all_protocols(toy: str) -> None:
    check(toy)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2s_conversation_is_the_same_in_all_protocols(smollm2_path: Path) -> None:
    model = str(smollm2_path)
    engine = Engine(ChatTemplate(model), Pool(Bucketed(), TorchExecutor(model)), name="m")
    with Served(engine) as served:
        check(served.url)
