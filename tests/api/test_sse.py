from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import anyio
import anyio.lowlevel
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.api.protocol import Frame
from deepinfra.api.sse import EventStream, encoded


@given(text=st.text())
def test_a_frame_is_one_line_for_every_way_of_splitting_lines(text: str) -> None:
    data = encoded(Frame({"text": text}))
    assert data.endswith(b"\n\n")
    line = data.removeprefix(b"data: ").removesuffix(b"\n\n")
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"text": text}


def test_a_named_event_has_its_name_in_a_line_before() -> None:
    assert encoded(Frame({"a": 1}, "ping")) == b'event: ping\ndata: {"a":1}\n\n'


class Sent:
    def __init__(self) -> None:
        self.messages: list[MutableMapping[str, Any]] = []
        self.arrived = anyio.Event()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)
        self.arrived.set()


async def test_nothing_is_sent_before_the_first_write() -> None:
    sent = Sent()
    out = EventStream(sent.send, 60)
    assert not out.begun
    await out.write(b"data: 1\n\n")
    assert out.begun
    await out.write(b"data: 2\n\n", last=True)
    assert [message["type"] for message in sent.messages] == ["http.response.start", *["http.response.body"] * 2]
    assert [message.get("more_body") for message in sent.messages[1:]] == [True, False]


async def test_a_stream_that_is_silent_says_that_it_lives() -> None:
    sent = Sent()
    out = EventStream(sent.send, 0.001)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(out.keep_alive, lambda: b": here\n\n")
            await sent.arrived.wait()
            out.hush()
    assert sent.messages[0]["status"] == 200
    assert {message["body"] for message in sent.messages[1:]} <= {b": here\n\n"}


async def test_a_sign_of_life_under_way_is_finished_before_what_was_written_behind_it() -> None:
    sent, taken = list[bytes](), anyio.Event()

    async def slow(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await taken.wait()
            sent.append(message["body"])

    made = anyio.Event()

    def sign() -> bytes:
        made.set()
        return b"sign"

    out = EventStream(slow, 0.001)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(out.keep_alive, sign)
            await made.wait()
            group.start_soon(out.write, b"first")
            await anyio.lowlevel.checkpoint()
            group.start_soon(out.write, b"second")
            out.hush()
            taken.set()
    assert sent == [b"sign", b"first", b"second"]


async def test_a_write_that_was_cancelled_before_the_status_leaves_the_status_open() -> None:
    async def never(message: MutableMapping[str, Any]) -> None:
        await anyio.sleep_forever()

    out = EventStream(never, 60)
    with anyio.move_on_after(0):
        await out.write(b"data: 1\n\n")
    assert not out.begun
