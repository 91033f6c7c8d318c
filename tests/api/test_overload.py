"""Who is refused, by whose limit, in each protocol's words; deadlines; and that nothing is left of any of them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import anyio
import openai
import pytest

from deepinfra import ApiKey
from deepinfra.api.app import asgi
from deepinfra.core.conversation import Conversation, Message, TextPart
from deepinfra.core.events import Failed, Finished
from deepinfra.core.request import GenerateRequest, TextInput
from deepinfra.engine import Engine, Pool
from deepinfra.engine.live import Live
from deepinfra.errors import DeadlineExceededError, Overloaded
from deepinfra.schedulers import Bucketed, Fcfs
from deepinfra.schedulers.admission import Amount
from deepinfra.schedulers.tenants import Tenant
from deepinfra.testing.client import Client
from deepinfra.testing.served import Served
from deepinfra.testing.tiny import TinyRecipe

KEYS = tuple(ApiKey.of(f"sk-{name}-0123456789", name=name) for name in ("team", "other", "third"))
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A small request in a path's protocol."""
    said = [{"role": "user", "content": "hello"}]
    prompt: dict[str, Any] = {
        "/v1/chat/completions": {"messages": said, "max_tokens": 8},
        "/v1/completions": {"prompt": "hello", "max_tokens": 8},
        "/v1/responses": {"input": "hello", "max_output_tokens": 8},
        "/v1/messages": {"messages": said, "max_tokens": 8},
    }[path]
    return {"model": "toy", **prompt, **fields}


def key(name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer sk-{name}-0123456789")]


def full(executor: Any) -> Engine:
    """Two may wait, of each tenant one."""
    scheduler = Bucketed(max_queue=2, tenants={"*": Tenant(max_queue=1)})
    return Engine(TinyRecipe(), Pool(scheduler, executor), name="toy")


async def refused(app: Any, path: str, name: str) -> tuple[int, dict[str, Any], int]:
    async with Client(app).request("POST", path, json=body(path, stream=True), headers=key(name)) as response:
        status = await response.started()
        return status, (await response.json())["error"], int(response.headers["retry-after"])


@pytest.mark.parametrize("path", PATHS)
async def test_429_is_the_tenants_own_limit_and_503_that_the_server_is_full(kit: Any, path: str) -> None:
    engine = full(executor := kit.Gated(shut=True))
    app = asgi(engine, keys=KEYS)
    async with engine, anyio.create_task_group() as group:
        for name in ("team", "other"):  # they wait, for the scheduler, until the first step is done
            group.start_soon(Client(app, headers=key(name)).post, PATHS[0], body(PATHS[0]))
        await kit.until(lambda: executor.steps and engine.stats().waiting + engine.stats().running == 2)
        status, error, retry_s = await refused(app, path, "team")
        assert (status, error["type"], retry_s >= 1) == (429, "rate_limit_error", True)
        assert "tenant 'team'" in error["message"]
        status, error, retry_s = await refused(app, path, "third")
        anthropics = path == "/v1/messages"
        assert (status, retry_s >= 1) == (529 if anthropics else 503, True)
        assert error["type"] == ("overloaded_error" if anthropics else "server_error")
        executor.gate.set()
    async with engine:
        await kit.settled(engine)


async def chat_as(url: str, name: str) -> Any:
    """A small answer, by an official client."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=f"sk-{name}-0123456789", max_retries=0) as client:
        said: Any = [{"role": "user", "content": "hello"}]
        return await client.chat.completions.create(model="toy", messages=said, max_tokens=4)


@contextmanager
def waiting_of(kit: Any, *names: str) -> Iterator[str]:
    """A real server in which a request of each of these waits."""
    engine = full(executor := kit.Gated(shut=True))
    with Served(engine, keys=KEYS) as served, anyio.from_thread.start_blocking_portal() as portal:
        futures = [portal.start_task_soon(chat_as, served.url, name) for name in names]
        portal.call(kit.until, lambda: executor.steps and engine.stats().waiting + engine.stats().running == len(names))
        yield served.url
        executor.open_from_thread()
        for future in futures:
            assert future.result(timeout=20)


def test_official_clients_know_what_it_was(kit: Any) -> None:
    said: Any = [{"role": "user", "content": "hello"}]
    with waiting_of(kit, "team", "other") as url:
        for name, wanted in (("team", openai.RateLimitError), ("third", openai.InternalServerError)):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=f"sk-{name}-0123456789", max_retries=0) as client:
                with pytest.raises(wanted) as caught:
                    client.chat.completions.create(model="toy", messages=said, max_tokens=4)
                assert int(caught.value.response.headers["retry-after"]) >= 1
        for name, status, words in (("team", 429, "rate_limit_error"), ("third", 529, "overloaded_error")):
            with anthropic.Anthropic(base_url=url, api_key=f"sk-{name}-0123456789", max_retries=0) as messages:
                with pytest.raises(anthropic.APIStatusError) as told:
                    messages.messages.create(model="toy", messages=said, max_tokens=4)
                assert (told.value.status_code, told.value.body["error"]["type"]) == (status, words)  # type: ignore[index]
                assert isinstance(told.value, anthropic.RateLimitError) == (status == 429)


# -- shed and late --------------------------------------------------------------------------------


async def test_one_that_makes_room_is_told_when_to_come_back_and_leaves_nothing(kit: Any) -> None:
    executor = kit.Gated(shut=True, max_seqs=1)
    engine = Engine(TinyRecipe(), Pool(Bucketed(max_queue=3), executor), name="toy")
    app = asgi(engine, keys=KEYS)
    answers: list[tuple[int, dict[str, Any]]] = []

    async def ask(name: str) -> None:
        async with Client(app).request("POST", PATHS[0], json=body(PATHS[0]), headers=key(name)) as response:
            status = await response.started()
            answers.append((status, dict(response.headers)))
            assert (await response.json()).keys() & {"choices", "error"}

    async with engine, anyio.create_task_group() as group:
        for count, name in enumerate(("team", "team", "team", "other"), 1):
            group.start_soon(ask, name)
            if count == 1:
                await kit.until(lambda: executor.steps)
            executor.gate.set() if count == 4 else None
            await kit.until(lambda count=count: engine.stats().waiting + engine.stats().running + len(answers) >= count)
    shed = [headers for status, headers in answers if status == 503]
    assert sorted(status for status, _ in answers) == [200, 200, 200, 503]
    assert all(int(headers["retry-after"]) >= 1 for headers in shed)
    async with engine:
        await kit.settled(engine)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_passes_is_504_and_leaves_nothing(kit: Any, path: str, stream: bool) -> None:
    engine = kit.build(executor := kit.Gated(shut=True))
    late = [("x-deepinfra-deadline-s", "0.05")]
    async with engine:
        async with Client(asgi(engine)).request("POST", path, json=body(path, stream=stream), headers=late) as response:
            assert await response.started() == 504
            error = (await response.json())["error"]
        assert "deadline of 0.05 s" in error["message"]
        assert error["type"] == ("timeout_error" if path == "/v1/messages" else "server_error")
        executor.gate.set()
        await kit.settled(engine)


async def test_a_deadline_that_does_not_pass_changes_nothing(kit: Any, engine: Engine) -> None:
    async with engine:
        client = Client(asgi(engine), headers=[("x-deepinfra-deadline-s", "60")])
        with_deadline = await client.post(PATHS[0], kit.chat())
        without = await Client(asgi(engine)).post(PATHS[0], kit.chat())
    assert with_deadline[0] == 200
    assert with_deadline[1]["choices"] == without[1]["choices"]


@pytest.mark.parametrize("value", ["0", "0.0", "-1", "soon", "1e3", "nan", "inf", "", " ", "1.", "9999999"])
async def test_a_deadline_that_is_no_number_of_seconds_is_refused_by_name(engine: Engine, value: str) -> None:
    client = Client(asgi(engine), headers=[("x-deepinfra-deadline-s", value)])
    async with engine:
        status, answer = await client.post(PATHS[0], body(PATHS[0]))
    assert (status, answer["error"]["param"]) == (400, "x-deepinfra-deadline-s")


async def test_one_that_is_late_before_it_began_is_told_so_and_not_that_the_server_is_full(kit: Any) -> None:
    engine = kit.build(kit.Gated(max_seqs=1, num_blocks=256))
    said = Conversation(messages=(Message(role="user", content=(TextPart("hello"),)),))

    async def long() -> None:
        async with engine.generate(GenerateRequest(input=said, max_tokens=900, seed=1, ignore_eos=True)) as stream:
            async for _ in stream:
                pass

    async with engine, anyio.create_task_group() as group:
        group.start_soon(long)
        await kit.until(lambda: engine.stats().running)
        for _ in range(3):
            try:
                async with engine.generate(GenerateRequest(input=said, max_tokens=4, deadline_s=0.003)) as stream:
                    (failed,) = [event async for event in stream]
                    assert isinstance(failed, Failed)
                    assert failed.code == "deadline-exceeded"
            except DeadlineExceededError:  # where 3 ms are over before it is admitted
                continue
        group.cancel_scope.cancel()


@pytest.mark.parametrize("scheduler", [Bucketed, Fcfs])
async def test_nothing_is_left_of_those_refused_shed_late_or_gone(kit: Any, scheduler: Any) -> None:
    limits = {"*": Tenant(max_queue=2, max_running=2), "team": Tenant(weight=3.0, max_queue_tokens=30)}
    pool = Pool(scheduler(max_queue=8, tenants=limits), kit.Gated(max_seqs=3, num_blocks=64))
    engine, endings = Engine(TinyRecipe(), pool, name="toy"), Counter[str]()

    async def ask(number: int) -> None:
        request = GenerateRequest(
            input=TextInput("x" * (number % 40 + 1)),
            max_tokens=5,
            tenant=("team", "other", f"t{number % 7}")[number % 3],
            priority=number % 3,
            deadline_s=0.001 if number % 10 == 0 else None,
        )
        try:
            async with engine.generate(request) as stream:
                if number % 11 == 0:
                    return
                async for event in stream:
                    if isinstance(event, Failed | Finished):
                        endings[event.code if isinstance(event, Failed) else "done"] += 1
        except (Overloaded, DeadlineExceededError) as error:
            endings[error.code] += 1

    async with engine:
        async with anyio.create_task_group() as group:
            for number in range(300):
                group.start_soon(ask, number)
        await kit.settled(engine)
        await kit.until(lambda: not pool.scheduler._queue.entries)
        queue = pool.scheduler._queue
        assert not any(queue.lines)
        assert not queue.tenants._tags
        assert not [account for account in queue.tenants.all() if account.waiting or account.running]
        assert queue.door.backlog == Amount()
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each) is Live and each.spec.tenant == "team"]
    assert endings.keys() >= {"done", "tenant-full", "overloaded"}
