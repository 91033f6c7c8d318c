from __future__ import annotations

import dataclasses
import json
import secrets

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketStream

from deepinfra.bench.http import Endpoint
from deepinfra.bench.load import LoadRun, Spread, run_load, spread
from deepinfra.cli.failures import sentence_for
from deepinfra.errors import ConfigError, EngineError

RUN = LoadRun(requests=6, concurrency=3, prompt=12, new=10)


async def test_every_request_is_streamed_to_its_end(server: str) -> None:
    done: list[int] = []
    report = await run_load(Endpoint(server), RUN, progress=done.append)
    assert (report.succeeded, report.failed, report.errors, report.model) == (6, 0, (), "toy")
    assert report.completion_tokens == 60
    assert report.prompt_tokens > 6 * 12
    assert sorted(done) == [1, 2, 3, 4, 5, 6]
    assert report.output_tokens_per_s == pytest.approx(60 / report.wall_s)
    assert report.ttft_s is not None
    assert report.request_s is not None
    assert 0 < report.ttft_s.p50 <= report.request_s.worst <= report.wall_s
    json.dumps(dataclasses.asdict(report))


async def test_prompts_begin_differently_and_are_the_same_next_time(server: str) -> None:
    run = dataclasses.replace(RUN, seed=secrets.randbits(32))
    first = await run_load(Endpoint(server), run)
    again = await run_load(Endpoint(server), run)
    assert first.cached_tokens < first.prompt_tokens / 4
    assert again.prompt_tokens == first.prompt_tokens
    assert again.cached_tokens > first.prompt_tokens / 2


async def test_a_refusal_is_counted_and_its_sentence_kept(server: str) -> None:
    report = await run_load(Endpoint(server), dataclasses.replace(RUN, model="another"))
    assert (report.succeeded, report.failed) == (0, 6)
    assert len(report.errors) == 1
    assert "status 404" in report.errors[0]
    assert "'another'" in report.errors[0]
    assert report.ttft_s is report.itl_s is report.request_s is None


async def test_a_server_that_is_not_there_is_an_error(server: str) -> None:
    with pytest.raises(OSError, match="connect") as caught:
        await run_load(Endpoint("http://127.0.0.1:1/v1"), RUN)
    assert sentence_for(caught.value) == "127.0.0.1:1: cannot connect: is a server running there?"


@pytest.mark.parametrize("url", ["https://127.0.0.1/v1", "127.0.0.1:8000", "http:///v1"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="plain http only"):
        Endpoint(url)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", "closed the connection in the middle"),
        (b"", "closed the connection in the middle"),
        (b"SSH-2.0-nothing\r\n\r\n", "is not HTTP"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 4\r\n\r\nouch", "status 500: ouch"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"data":[]}', "lists no models"),
    ],
)
async def test_what_is_no_answer_is_named(answer: bytes, why: str) -> None:
    async def handle(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            if answer:
                await stream.send(answer)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(EngineError, match=why):
            await run_load(Endpoint(f"http://127.0.0.1:{port}"), RUN)
        tasks.cancel_scope.cancel()


async def test_events_are_whole_however_the_bytes_arrive() -> None:
    body = b"data: one\n\n: a comment\n\ndata: two\n\ndata: [DONE]\n\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(body[i : i + 7]), body[i : i + 7]) for i in range(0, len(body), 7))
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"

    async def handle(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            for index in range(0, len(answer), 5):
                await stream.send(answer[index : index + 5])
                await anyio.lowlevel.checkpoint()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with Endpoint(f"http://127.0.0.1:{port}").request("/x") as response:
            assert [await response.event() for _ in range(4)] == [b"one", b"two", b"[DONE]", None]
        tasks.cancel_scope.cancel()


def test_percentiles_are_values_that_occurred() -> None:
    assert spread([]) is None
    assert spread([3.0]) == Spread(p50=3.0, p95=3.0, worst=3.0)
    assert spread([float(i) for i in range(100, 0, -1)]) == Spread(p50=50.0, p95=95.0, worst=100.0)
