"""Prefill in one pool, decode in another, in one process, without HTTP: run `python split_pools.py`."""

import anyio

from deepinfra import Conversation, Engine, GenerateRequest, Message, Pool, SamplingParams, TextPart
from deepinfra.executors.torch import TorchExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed, Fcfs

MODEL = "smollm2"


async def main() -> None:
    """Ask one question; the decode pool gets the prompt's KV from the prefill pool."""
    engine = Engine(
        ChatTemplate(MODEL),
        prefill=[Pool(Bucketed(), TorchExecutor(MODEL, num_blocks=256), name="prefill")],
        decode=[Pool(Fcfs(), TorchExecutor(MODEL, num_blocks=256), name="decode")],
    )
    question = Message(role="user", content=(TextPart("Name three colours."),))
    request = GenerateRequest(
        input=Conversation(messages=(question,)), max_tokens=24, sampling=SamplingParams(temperature=0)
    )
    async with engine, engine.generate(request) as stream:
        async for event in stream:
            print(getattr(event, "text", ""), end="", flush=True)
        print()
        for pool in engine.stats().pools:
            print(f"{pool.name}: {pool.steps} steps")


if __name__ == "__main__":
    anyio.run(main)
