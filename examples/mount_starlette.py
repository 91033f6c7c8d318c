"""Mount deepinfra in a Starlette application, under its own lifespan: run `uvicorn mount_starlette:app`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Mount

from deepinfra import Engine, Pool, asgi
from deepinfra.executors.torch import TorchExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed

model = "smollm2"
llm = asgi(Engine(ChatTemplate(model), Pool(Bucketed(), TorchExecutor(model))))


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """What the application itself needs, and the engine inside it."""
    async with llm.lifespan(app):
        yield


app = Starlette(routes=[Mount("/llm", llm)], lifespan=lifespan)
