from __future__ import annotations

import anyio
from anyio.lowlevel import checkpoint

from deepinfra.core.events import Finished, TextDelta
from deepinfra.core.request import Prompt, Usage
from deepinfra.engine.stream import Mailbox, Signal, Stream


def text(piece: str, choice: int = 0) -> TextDelta:
    return TextDelta(choice=choice, text=piece)


def done(choice: int = 0) -> Finished:
    return Finished(choice=choice, reason="stop", usage=Usage(prompt_tokens=1))


async def test_a_signal_set_before_waiting_is_not_lost() -> None:
    signal = Signal()
    signal.set()
    with anyio.fail_after(1):
        await signal.wait()
    with anyio.move_on_after(0) as scope:
        await signal.wait()
    assert scope.cancelled_caught


async def test_unread_text_is_merged_per_choice() -> None:
    mailbox = Mailbox()
    mailbox.put([text("a"), text("b"), text("x", 1), text("c")], now=1.0)
    assert [await mailbox.get() for _ in range(2)] == [text("abc"), text("x", 1)]


async def test_unread_since_is_when_the_oldest_unread_event_came() -> None:
    mailbox = Mailbox()
    mailbox.put([text("a")], now=1.0)
    mailbox.put([text("b")], now=2.0)
    assert mailbox.unread_since == 1.0
    await mailbox.get()
    assert mailbox.unread_since is None


async def test_a_stream_ends_when_every_choice_has() -> None:
    mailbox = Mailbox()
    stream = Stream(Prompt(ids=(1,)), seed=0, n=2, mailbox=mailbox)
    mailbox.put([text("a"), done(1), done(0)], now=0.0)
    assert [type(event) async for event in stream] == [TextDelta, Finished, Finished]


async def test_a_reader_wakes_when_something_comes() -> None:
    mailbox = Mailbox()
    got = []

    async def read() -> None:
        got.append(await mailbox.get())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await checkpoint()
        mailbox.put([text("late")], now=0.0)
    assert got == [text("late")]
