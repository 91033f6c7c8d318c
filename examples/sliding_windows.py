"""A tiny random model with sliding windows, and what its prefix cache does. Run `python sliding_windows.py`."""

import json
import tempfile
from pathlib import Path

import anyio
import numpy as np
from safetensors.numpy import save_file

from deepinfra import Engine, GenerateRequest, Pool, SamplingParams
from deepinfra.core.events import Finished
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.config import decoder_config
from deepinfra.kvstores import SsdStore
from deepinfra.schedulers import Bucketed
from deepinfra.testing import TinyRecipe

CONFIG = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 260,  # TinyRecipe's: bytes and a few control tokens
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,  # every sixth sees everything; the other five see 32 positions
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "max_position_embeddings": 2048,
}
LETTER = tuple(b"Dear reader, this is a long letter that two people answer. " * 12)


def build(folder: Path) -> None:
    """Write a model: its configuration, and weights drawn at random."""
    draw = np.random.default_rng(0)
    shapes = decoder_config(CONFIG).shapes()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(
        {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )


async def serve(folder: Path, *prompts: tuple[int, ...]) -> None:
    """Start an engine on the model and its disk cache, and ask it."""
    executor = TorchExecutor(str(folder), dtype="float32", num_blocks=256)
    pool = Pool(Bucketed(), executor, store=SsdStore(folder / "kv"))
    async with Engine(TinyRecipe(), pool) as engine:
        for prompt in prompts:
            request = GenerateRequest(input=prompt, max_tokens=8, sampling=SamplingParams(temperature=0))
            async with engine.generate(request) as stream:
                events = [event async for event in stream]
            assert isinstance(events[-1], Finished), events[-1]
            cached, stats = events[-1].usage.cached, pool.stats()
            print(
                f"{len(prompt)} tokens: {cached.device} found on the device, {cached.store.get('ssd', 0)} on disk; "
                f"so far {stats.snapshots_restored} windows restored, {stats.rows_replayed} rows computed again"
            )


async def main() -> None:
    """A prompt, the same after a restart, and another one that leaves it halfway."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        await serve(folder, LETTER)
        await serve(folder, LETTER, (*LETTER[:400], *b"But what if it ends otherwise?"))


if __name__ == "__main__":
    anyio.run(main)
