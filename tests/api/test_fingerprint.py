"""What decides the text of an answer besides its request is in `system_fingerprint`."""

from __future__ import annotations

from typing import Any, get_args

from deepinfra.api.app import asgi
from deepinfra.engine import Engine, Pool
from deepinfra.engine.windows import ReplayMode
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.client import Client
from deepinfra.testing.tiny import TinyRecipe

CHAT = "/v1/chat/completions"


async def test_a_fingerprint_says_how_windows_are_rebuilt(kit: Any) -> None:
    prints = []
    for windows in ((), (4,)):
        for replay in get_args(ReplayMode):
            executor = ToyExecutor(num_blocks=256, windows=windows)
            pool = Pool(Fcfs(), executor, replay=replay)
            async with Engine(TinyRecipe(), pool) as engine:
                prints.append((await Client(asgi(engine)).post(CHAT, kit.chat()))[1]["system_fingerprint"])
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
