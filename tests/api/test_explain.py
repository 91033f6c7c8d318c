"""The header `x-deepinfra-explain`: why no more of a prompt was found, in every dialect, about nobody else's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from deepinfra import ApiKey
from deepinfra.api.app import asgi
from deepinfra.core.ids import BlockKey
from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores import MemoryStore, SsdStore, TieredStore
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.client import Client, running
from deepinfra.testing.tiny import TinyRecipe

ANN = ApiKey.of("sk-ann-0123456789", name="ann")
BOB = ApiKey.of("sk-bob-0123456789", name="bob")
WANTED = ("x-deepinfra-explain", "1")
BLOCK = 8
SECRET = "the launch code is 4711, keep it to yourself"
OTHER = "the launch date is in May, tell everybody!!!"


class Broken(MemoryStore):
    """Raises where it must not, and never answers."""

    def __init__(self, *, raises: bool) -> None:
        super().__init__()
        self._raises = raises

    async def successors(self, parent: BlockKey, most: int = 64) -> Sequence[tuple[int, ...]]:
        if self._raises:
            raise RuntimeError("out of order")
        await anyio.sleep_forever()
        return ()


def engine_with(store: KVStore | None) -> Engine:
    executor = ToyExecutor(num_blocks=64, block_size=BLOCK, vocab_size=260)
    return Engine(TinyRecipe(), Pool(Fcfs(), executor, store=store), name="m")


def body_of(path: str, text: str, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "stream": stream}
    match path:
        case "/v1/completions":
            return body | {"prompt": text, "max_tokens": 2}
        case "/v1/responses":
            return body | {"input": text, "max_output_tokens": 2, "store": False}
    return body | {"messages": [{"role": "user", "content": text}], "max_tokens": 2}


async def told(
    app: Any,
    text: str,
    *,
    key: str | None = None,
    path: str = "/v1/chat/completions",
    stream: bool = False,
    headers: Sequence[tuple[str, str]] = (WANTED,),
) -> dict[str, Any]:
    """The object `deepinfra` of an answer."""
    sent = [*headers, *([("authorization", f"Bearer {key}")] if key else [])]
    async with Client(app, headers=sent).request("POST", path, json=body_of(path, text, stream)) as response:
        assert await response.started() == 200
        if not stream:
            answer: dict[str, Any] = (await response.json())["deepinfra"]
            return answer
        lines = (await response.read()).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    found = [event.get("deepinfra") or event.get("response", {}).get("deepinfra") for event in events]
    return next(each for each in found if each)


async def saved(engine: Engine) -> None:
    """Wait until what was asked is in the store."""
    for pool in engine.pools:
        await pool.settle()


PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_every_dialect_tells_where_two_prompts_part(path: str, stream: bool) -> None:
    engine = engine_with(MemoryStore())
    app = asgi(engine, keys=(ANN, BOB))
    async with running(app):
        await told(app, SECRET, key="sk-ann-0123456789", path=path, headers=())
        await saved(engine)
        explain = (await told(app, OTHER, key="sk-ann-0123456789", path=path, stream=stream))["explain"]
    assert explain["why"] == "differs"
    assert explain["differs"]["before"].endswith("the launch ")
    assert explain["differs"]["asked"].startswith("date is in")
    assert explain["differs"]["held"].startswith("code is 47")
    assert explain["held_tokens"] // BLOCK == sum(tier["blocks"] for tier in explain["tiers"]) == 1
    assert explain["differs"]["position"] in range(BLOCK, 2 * BLOCK)


@pytest.mark.parametrize("kind", ["ssd", "tiered"])
async def test_any_store_can_be_asked_through_its_interface(kind: str, tmp_path: Path) -> None:
    ssd = SsdStore(tmp_path, min_free_nbytes=0, fsync="none")
    engine = engine_with(ssd if kind == "ssd" else TieredStore([MemoryStore(), ssd]))
    app = asgi(engine, keys=(ANN,))
    async with running(app):
        await told(app, SECRET, key="sk-ann-0123456789", headers=())
        await saved(engine)
        explain = (await told(app, OTHER, key="sk-ann-0123456789"))["explain"]
    assert explain["why"] == "differs"
    assert explain["differs"]["held"].startswith("code is")


async def test_nothing_of_another_tenant_is_told() -> None:
    engine = engine_with(MemoryStore())
    app = asgi(engine, keys=(ANN, BOB))
    async with running(app):
        await told(app, SECRET, key="sk-ann-0123456789", headers=())
        await saved(engine)
        by_bob = (await told(app, OTHER, key="sk-bob-0123456789"))["explain"]
        await saved(engine)
        never_asked = (await told(app, "something else", key="sk-bob-0123456789"))["explain"]
    assert by_bob["why"] == "never-seen"
    assert by_bob["differs"] is None
    assert by_bob["held_tokens"] == 0
    assert "code" not in json.dumps([by_bob, never_asked])


async def test_without_keys_nobody_reads_what_others_asked() -> None:
    engine = engine_with(MemoryStore())
    app = asgi(engine)
    async with running(app):
        await told(app, SECRET, headers=())
        await saved(engine)
        explain = (await told(app, OTHER))["explain"]
    assert explain["why"] == "differs"
    assert explain["differs"] is None
    assert "code" not in explain["words"]
    assert "Block 2" in explain["words"]


async def test_it_is_told_only_when_asked() -> None:
    app = asgi(engine_with(MemoryStore()))
    async with running(app):
        for headers in ((), (("x-deepinfra-explain", "0"),)):
            assert "explain" not in await told(app, SECRET, headers=headers)


async def test_another_value_is_refused_by_name() -> None:
    app = asgi(engine_with(None))
    async with (
        running(app),
        Client(app, headers=[("x-deepinfra-explain", "yes")]).request(
            "POST", "/v1/chat/completions", json=body_of("/v1/chat/completions", "hi", False)
        ) as response,
    ):
        assert await response.started() == 400
        assert (await response.json())["error"]["param"] == "x-deepinfra-explain"


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "hangs"])
async def test_a_store_that_cannot_explain_fails_no_answer(raises: bool) -> None:
    engine = engine_with(Broken(raises=raises))
    app = asgi(engine, keys=(ANN,))
    async with running(app):
        await told(app, SECRET, key="sk-ann-0123456789", headers=())
        explain = (await told(app, OTHER, key="sk-ann-0123456789"))["explain"]
    assert explain["why"] == "tier-down"


@pytest.mark.parametrize(("text", "why"), [("hi", "too-short"), (SECRET, "all-held")])
async def test_the_reason_is_named(text: str, why: str) -> None:
    engine = engine_with(MemoryStore())
    app = asgi(engine, keys=(ANN,))
    async with running(app):
        await told(app, SECRET, key="sk-ann-0123456789", headers=())
        explain = (await told(app, text, key="sk-ann-0123456789"))["explain"]
    assert explain["why"] == why
    assert explain["words"]


async def test_without_a_store_the_device_is_all_there_is() -> None:
    app = asgi(engine_with(None))
    async with running(app):
        await told(app, SECRET, headers=())
        explain = (await told(app, OTHER))["explain"]
    assert explain["why"] == "no-store"
    assert [tier["tier"] for tier in explain["tiers"]] == ["device"]
