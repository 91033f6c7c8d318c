"""The smallest server: run `uvicorn minimal_server:app` here, then talk to it with any OpenAI client."""

from deepinfra import Engine, Pool, asgi
from deepinfra.executors.torch import TorchExecutor
from deepinfra.kvstores import SsdStore
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed

model = "smollm2"
pool = Pool(Bucketed(), TorchExecutor(model), store=SsdStore("~/.cache/deepinfra/kv"))
app = asgi(Engine(ChatTemplate(model), pool))
