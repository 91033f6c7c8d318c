"""Mount deepinfra in a FastAPI application: run `uvicorn mount_fastapi:app`; the models are under /llm/v1.

FastAPI does not run the lifespan of what is mounted, so the parent is given it.
"""

from fastapi import FastAPI

from deepinfra import Engine, Pool, asgi
from deepinfra.executors.torch import TorchExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed

model = "smollm2"
llm = asgi(Engine(ChatTemplate(model), Pool(Bucketed(), TorchExecutor(model))))

app = FastAPI(lifespan=llm.lifespan)
app.mount("/llm", llm)


@app.get("/hello")
async def hello() -> dict[str, str]:
    """A route of the application's own."""
    return {"hello": "world"}
