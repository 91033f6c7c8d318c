"""What a client may do wrong, over TCP on the real model: a 4xx that names it, and nothing is held afterwards."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Server

pytestmark = pytest.mark.timeout(300)

HELLO = [{"role": "user", "content": "Hello!"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "smollm2", "messages": HELLO, "max_tokens": 2, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "smollm2", "prompt": "Hello!", "max_tokens": 2, **fields}).encode()


def user(content: Any, **fields: Any) -> bytes:
    return chat(messages=[{"role": "user", "content": content}], **fields)


FIELDS: dict[str, tuple[bytes, str]] = {
    "unknown field": (chat(temprature=1), "temprature"),
    "a field with an effect that is not honoured": (chat(web_search_options={}), "web_search_options"),
    "unknown field within a message": (chat(messages=[{**HELLO[0], "cache": 1}]), "messages.0.cache"),
    "text for a number": (chat(temperature="hot"), "temperature"),
    "fraction for a count": (chat(max_tokens=2.5), "max_tokens"),
    "text for the messages": (chat(messages="Hello!"), "messages"),
    "number for the content": (user(7), "messages.0.content"),
    "an image elsewhere": (
        user([{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]),
        "messages.0.content.0.image_url.url",
    ),
    "an image": (
        user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]),
        "messages.0.content",
    ),
    "no tokens": (chat(max_tokens=0), "max_tokens"),
    "prompt beyond the context": (user("long " * 9000), "messages"),
    "output beyond the context": (chat(max_tokens=9000), "messages"),
    "no model": (b'{"messages": [{"role": "user", "content": "x"}]}', "model"),
    "too many answers": (chat(n=65), "n"),
    "no answers": (chat(n=0), "n"),
    "bias of a token that does not exist": (chat(logit_bias={"49152": 1}), "logit_bias.49152"),
    "bias of a word": (chat(logit_bias={"the": 1}), "logit_bias.the"),
    "a schema that cannot be enforced": (
        user("json", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}),
        "response_format",
    ),
    "half a surrogate pair": (b'{"model": "smollm2", "messages": "\\ud800"}', "messages"),
    "a key twice": (b'{"model": "smollm2", "model": "smollm2"}', "model"),
}

BODIES: dict[str, tuple[bytes, str]] = {
    "malformed JSON": (chat()[:-5], "the body is not JSON"),
    "not a number": (chat(seed=0).replace(b'"seed": 0', b'"seed": NaN'), "NaN is not JSON"),
    "no object": (b"[]", "must be a JSON object"),
    "nothing": (b"", "the body is not JSON"),
    "not UTF-8": (chat().replace(b"Hello", b"\xff\xfe"), "not UTF-8"),
    "deep nesting": (chat().replace(b'"Hello!"', b"[" * 100 + b"]" * 100), "nested deeper than 64 levels"),
    "deeper than any stack": (b"[" * 50_000, "nested deeper than 64 levels"),
    "a million arrays": (b"[" * 1_000_000, "more than 100000 objects and arrays"),
}

COMPLETIONS: dict[str, tuple[bytes, str]] = {
    "token that does not exist": (completion(prompt=[1, 49152]), "prompt"),
    "negative token": (completion(prompt=[-1]), "prompt"),
    "empty prompt": (completion(prompt=""), "prompt"),
    "too many prompts": (completion(prompt=["x"] * 65), "prompt"),
    "echo": (completion(echo=True), "echo"),
}


@pytest.fixture(scope="module", autouse=True)
def nothing_leaked(server: Server) -> Iterator[None]:
    """Whatever happened in this module, everything is given back and the server serves."""
    expected = server.text("What is the capital of France?")
    yield
    server.free()
    assert server.text("What is the capital of France?") == expected


def post(server: Server, path: str, body: Any) -> httpx2.Response:
    headers = {"content-type": "application/json"}
    return httpx2.post(f"{server.url}/v1/{path}", content=body, headers=headers, timeout=60)


def refusal(server: Server, path: str, body: bytes, status: int = 400) -> dict[str, str]:
    """The error object of an answer that must be one, and for which no token was computed."""
    tokens = server.metric("generated_tokens_total")
    answer = post(server, path, body)
    assert answer.status_code == status, answer.text
    error: dict[str, str] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert server.metric("generated_tokens_total") == tokens
    return error


@pytest.mark.parametrize(("body", "param"), FIELDS.values(), ids=FIELDS)
def test_a_wrong_field_of_a_chat_is_named(server: Server, body: bytes, param: str) -> None:
    assert refusal(server, "chat/completions", body)["param"] == param


@pytest.mark.parametrize(("body", "param"), COMPLETIONS.values(), ids=COMPLETIONS)
def test_a_wrong_field_of_a_completion_is_named(server: Server, body: bytes, param: str) -> None:
    assert refusal(server, "completions", body)["param"] == param


@pytest.mark.parametrize(("body", "said"), BODIES.values(), ids=BODIES)
def test_what_is_wrong_with_a_body_is_said(server: Server, body: bytes, said: str) -> None:
    assert said in refusal(server, "chat/completions", body)["message"]


def test_a_model_that_is_not_served_is_not_found(server: Server) -> None:
    error = refusal(server, "chat/completions", chat(model="gpt-9"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_ten_megabytes_are_too_many(server: Server) -> None:
    error = refusal(server, "chat/completions", user("x" * 10_000_000), 413)
    assert error["message"] == "the request's body is larger than 8388608 bytes"


def test_a_body_of_unknown_length_is_counted_as_it_comes(server: Server) -> None:
    with socket.create_connection(address(server), timeout=60) as client:
        client.sendall(HEAD.format("transfer-encoding: chunked").encode())
        answer = b""
        try:
            for _ in range(10):
                client.sendall(b"f4240\r\n" + b" " * 1_000_000 + b"\r\n")
        except (ConnectionResetError, BrokenPipeError):
            pass  # it need not read what it refused
        client.settimeout(20)
        answer = client.recv(100)
    assert answer.startswith(b"HTTP/1.1 413"), answer


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/chat/completions"])
def test_what_is_not_there_is_said_in_the_same_shape(server: Server, path: str) -> None:
    answer = httpx2.get(server.url + path, timeout=60)
    assert answer.status_code in (404, 405)
    assert answer.json()["error"]["type"] == "invalid_request_error"


# -- clients that vanish ----------------------------------------------------------------------------

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\n{}\r\n\r\n"


def address(server: Server) -> tuple[str, int]:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def vanish(server: Server, seed: int) -> None:
    """Ask for far more than is waited for, maybe not even whole, and leave politely or not."""
    rng = random.Random(seed)
    text = rng.choice(["Write a long poem.", "Tell me everything about whales.", "word " * rng.randrange(200)])
    body = user(text, max_tokens=400, stream=rng.random() < 0.6, n=rng.choice((1, 1, 2)), ignore_eos=True)
    data = HEAD.format(f"content-length: {len(body)}").encode() + body
    if rng.random() < 0.15:
        data = data[: rng.randrange(len(data))]
    with socket.create_connection(address(server), timeout=60) as client:
        client.sendall(data)
        leaves = time.monotonic() + rng.random() * 2.0
        while (patience := leaves - time.monotonic()) > 0:
            client.settimeout(patience)
            try:
                if not client.recv(4096):
                    break
            except TimeoutError:
                break
        if rng.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end


def vanish_all(server: Server, count: int, at_once: int) -> None:
    cancelled = server.metric("answers_total", reason="cancelled")
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(lambda seed: vanish(server, seed), range(count)))
    server.free()
    assert server.metric("answers_total", reason="cancelled") >= cancelled + count // 2


def test_twenty_clients_that_vanish_leave_nothing(server: Server) -> None:
    vanish_all(server, 20, at_once=10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_clients_that_vanish_leave_nothing(server: Server) -> None:
    vanish_all(server, 200, at_once=40)
