"""What survives a server's end, and how it ends."""

from __future__ import annotations

import os
import selectors
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2
import openai
import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Server, Start
    from tests.conftest import Outside

pytestmark = pytest.mark.timeout(400)

LONG = "Summarise: " + " ".join(f"On day {day} the ship sailed {7 * day} miles to the west." for day in range(1, 11))


class Turn(NamedTuple):
    """A turn's answer: tokens of prompt and answer, prompt tokens not computed by tier, seconds to the first token."""

    text: str
    tokens: int
    cached: dict[str, int]
    first_s: float


def talk(server: Server, turns: list[dict[str, str]], text: str, max_tokens: int) -> Turn:
    """Take the next turn, which `turns` then contains."""
    turns.append({"role": "user", "content": text})
    asked, text, first_s = time.monotonic(), "", 0.0
    cached: dict[str, int] = {}
    for chunk in server.chat(turns, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            first_s = first_s or (time.monotonic() - asked if choice.delta.content else 0.0)
            text += choice.delta.content or ""
        cached = (chunk.model_extra or {}).get("deepinfra", {}).get("cached_tokens", cached)
    turns.append({"role": "assistant", "content": text})
    assert chunk.usage.prompt_tokens_details.cached_tokens == sum(cached.values())
    return Turn(text, chunk.usage.total_tokens, cached, first_s)


def test_a_chat_goes_on_from_disk_two_seconds_after_its_server_was_killed(start: Start, outside: Outside) -> None:
    turns: list[dict[str, str]] = []
    with start(outside) as server:
        first = talk(server, turns, LONG, 20)
        second = talk(server, list(turns), "How far on day three?", 12)
        time.sleep(2.0)  # what is promised
        server.stop(signal.SIGKILL)
    with start(outside) as server:
        again = talk(server, turns, "How far on day three?", 12)
        server.free()
    assert first.cached == {"device": 0}
    assert second.cached["device"] >= (first.tokens - 1) // 16 * 16
    assert again.cached == {"device": 0, "ssd": again.cached["ssd"]}
    assert again.cached["ssd"] >= second.cached["device"]
    assert again.text == second.text
    for tier, turn in {"none": first, "device": second, "ssd": again}.items():
        print(f"{turn.first_s:.3f} s to the first token with cached tokens from: {tier}")


def test_sigterm_finishes_streams_refuses_new_ones_and_keeps_their_kv(
    start: Start, outside: Outside, server: Server
) -> None:
    asked: dict[str, Any] = {"messages": "Tell me about the moon.", "max_tokens": 40}
    expected = server.text(**asked)
    with start(outside) as ending:
        stream = iter(ending.chat(**asked, stream=True))
        text = ""
        while not text:
            text = next(stream).choices[0].delta.content or ""
        ending.process.send_signal(signal.SIGTERM)
        refused: list[openai.APIStatusError] = []
        while not refused:  # until the signal has arrived
            try:
                ending.chat("Hello!", max_tokens=1)
            except openai.APIStatusError as error:
                refused.append(error)
        assert (refused[0].status_code, refused[0].code) == (503, "engine-draining")
        assert httpx2.get(f"{ending.url}/ready", timeout=60).status_code == 503
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == expected
        assert ending.process.wait(60) == 0
    with start(outside) as server:
        turns = [{"role": "user", "content": asked["messages"]}, {"role": "assistant", "content": text}]
        cached = server.chat([*turns, {"role": "user", "content": "Go on."}], max_tokens=1).usage
        assert cached.prompt_tokens_details.cached_tokens >= (cached.prompt_tokens - 16) // 16 * 16 >= 48


def test_a_second_signal_does_not_wait_and_leaves_no_executor(start: Start, outside: Outside) -> None:
    with start(outside) as server:
        stream = iter(server.chat("Tell me a very long story.", max_tokens=2000, stream=True))
        next(stream)
        (child,) = server.children()
        with os.fdopen(os.pidfd_open(child)) as gone, selectors.DefaultSelector() as selector:
            selector.register(gone, selectors.EVENT_READ)
            server.process.send_signal(signal.SIGTERM)
            while b"SIGTERM: finishing" not in server.log.read_bytes():
                time.sleep(0.01)
            asked = time.monotonic()
            assert server.stop() == -signal.SIGTERM
            assert time.monotonic() - asked < 3.0
            assert selector.select(timeout=20)
        with pytest.raises(openai.APIError):
            list(stream)
