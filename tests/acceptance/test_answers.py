"""One server on the real model: what it answers to the official client, alone and in company."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Server

pytestmark = pytest.mark.timeout(300)


def contents(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def test_a_chat_answer_streams_token_by_token_to_what_it_is_whole(server: Server) -> None:
    asked: dict[str, Any] = {"messages": "What is the capital of France?", "max_tokens": 24}
    whole = server.chat(**asked)
    chunks = list(server.chat(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "Paris" in whole.choices[0].message.content
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 3
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_four_answers_to_one_seed_differ_and_each_comes_again(server: Server) -> None:
    asked: dict[str, Any] = {"messages": "Tell me a story.", "temperature": 1.0, "seed": 11, "max_tokens": 12}
    four = contents(server.chat(**asked, n=4))
    assert len(set(four)) == 4
    assert contents(server.chat(**asked, n=4)) == four
    assert contents(server.chat(**asked, n=2)) == four[:2]
    assert contents(server.chat(**asked)) == four[:1]
    assert contents(server.chat(**asked | {"seed": 12}, n=4)) != four


def test_four_streams_in_one_response_are_the_four_answers(server: Server) -> None:
    asked: dict[str, Any] = {
        "messages": "Tell me a story.",
        "temperature": 1.0,
        "seed": 11,
        "max_tokens": 12,
        "n": 4,
    }
    texts = ["", "", "", ""]
    for chunk in server.chat(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == contents(server.chat(**asked))


def test_logprobs_are_those_of_the_text_and_of_a_distribution(server: Server) -> None:
    answer = server.chat("Count to ten.", max_tokens=8, logprobs=True, top_logprobs=20)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.choices[0].message.content
    for entry in entries:
        top = [each.logprob for each in entry.top_logprobs]
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, top[0])
        assert top == sorted(top, reverse=True)
        assert 0 < sum(2.718281828459045**each for each in top) <= 1 + 1e-4


def test_a_stop_string_cuts_text_and_usage(server: Server) -> None:
    whole = server.chat("Name the seven days of the week.", max_tokens=32)
    text = whole.choices[0].message.content
    stop = text[len(text) // 2 :][:4]
    cut = server.chat("Name the seven days of the week.", max_tokens=32, stop=["never in it", stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


def test_usage_adds_up(server: Server) -> None:
    usage = server.chat("Hello!", max_tokens=5, n=2, temperature=1, extra_body={"ignore_eos": True}).usage
    assert usage.completion_tokens == 10
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens == server.chat("Hello!", max_tokens=1).usage.prompt_tokens


def test_a_second_turn_finds_the_first_one_on_the_device(server: Server) -> None:
    first = server.chat("Name three rivers of Europe.", max_tokens=24)
    answer = first.choices[0].message.content
    turns = [
        {"role": "user", "content": "Name three rivers of Europe."},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And three lakes?"},
    ]
    second = server.chat(turns, max_tokens=8)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= (first.usage.total_tokens - 1) // 16 * 16 > first.usage.prompt_tokens
    assert second.model_extra["deepinfra"]["cached_tokens"] == {"device": cached}


# -- company ----------------------------------------------------------------------------------------

EIGHT: list[dict[str, Any]] = [
    {"messages": "Why is the sky blue?"},
    {"messages": "Why is the sky blue?", "temperature": 0.9, "seed": 1},
    {"messages": "Write a haiku.", "temperature": 1.0, "seed": 2, "top_p": 0.9, "n": 2},
    {"messages": "List prime numbers: 2 3 5 7 11 13 17 19 23 " * 6},
    {"messages": "Hi", "temperature": 1.0, "seed": 3, "presence_penalty": 1.0},
    {"messages": "Translate 'water' into French.", "logit_bias": {"28": -100}},
    {"messages": "What is 2+2?", "temperature": 0.7, "seed": 4, "extra_body": {"top_k": 8, "min_p": 0.05}},
    {"messages": [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Where to?"}]},
]


def mixed(server: Server, max_tokens: int, rng: random.Random) -> list[list[str]]:
    """The texts of all eight, asked at once in random order."""
    order = rng.sample(range(len(EIGHT)), len(EIGHT))
    with ThreadPoolExecutor(len(EIGHT)) as threads:
        futures = {i: threads.submit(server.chat, **EIGHT[i], max_tokens=max_tokens + i) for i in order}
        return [contents(futures[i].result()) for i in range(len(EIGHT))]


def alone(server: Server, max_tokens: int) -> list[list[str]]:
    return [contents(server.chat(**body, max_tokens=max_tokens + i)) for i, body in enumerate(EIGHT)]


def test_any_mix_of_eight_requests_gives_each_the_text_it_gets_alone(server: Server) -> None:
    rng = random.Random(5)
    cold = mixed(server, 10, rng)
    expected = alone(server, 10)
    assert cold == expected
    assert mixed(server, 10, rng) == expected


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_mixes_of_eight_requests_give_each_the_text_it_gets_alone(server: Server) -> None:
    rng = random.Random(6)
    expected = alone(server, 40)
    for _ in range(20):
        assert mixed(server, 40, rng) == expected


# -- an executor that dies --------------------------------------------------------------------------


def test_an_executor_killed_in_mid_stream_costs_no_answer(server: Server) -> None:
    bodies = [
        {"messages": "Describe a forest."},
        {"messages": "Describe a city.", "temperature": 0.9, "seed": 3},
    ]
    expected = [server.text(**body, max_tokens=24) for body in bodies]
    losses = server.metric("executor_losses_total")
    streams = [iter(server.chat(**body, max_tokens=24, stream=True)) for body in bodies]
    texts = ["", ""]
    for i, stream in enumerate(streams):
        while not texts[i]:
            texts[i] += next(stream).choices[0].delta.content or ""
    for child in server.children():
        os.kill(child, signal.SIGKILL)
    for i, stream in enumerate(streams):
        texts[i] += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert texts == expected
    assert server.metric("executor_losses_total") == losses + 1
    assert server.text(**bodies[0], max_tokens=24) == expected[0]
    server.free()
