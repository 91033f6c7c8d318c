"""SmolLM2, from its GGUF file: greedy text equals that of transformers on the same weights in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from deepinfra.core.sampling import SamplingParams
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.batch import build_batch
from deepinfra.executors.torch.config import decoder_config
from deepinfra.executors.torch.families.decoder import Decoder
from deepinfra.executors.torch.kv import PagedKV
from deepinfra.executors.torch.rows import Rows
from deepinfra.executors.torch.weights.read import WeightReader
from deepinfra.models import Model, open_model
from deepinfra.testing.host import Host, Line

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 17 times 23?\nA:",
    "To bake bread you need flour,",
    "import numpy as np\n\nx = np.",
    "In 1969, the first humans",
    "The quick brown fox",
    "Les élèves de l'école",
    "SELECT name, age FROM users WHERE",
    "Photosynthesis is the process by which",
    "1, 1, 2, 3, 5, 8, 13,",
    "<html>\n<head>\n",
    "She opened the door and saw",
    "Water boils at",
    "The difference between TCP and UDP is",
    "Shakespeare wrote",
    "A list of prime numbers:",
)


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model("smollm2")


@pytest.fixture(scope="module")
def reference(model: Model) -> Any:
    config = transformers.LlamaConfig(**{**model.config, "attn_implementation": "eager"})
    oracle = transformers.LlamaForCausalLM(config).eval()
    weights = {name: torch.from_numpy(model.tensors.read(name)) for name in model.tensors.names()}
    missing = oracle.load_state_dict(weights, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"])
    assert not missing.unexpected_keys
    oracle.tie_weights()
    return oracle


async def say(model: Model, prompts: tuple[str, ...], new: int, **settings: Any) -> list[Line]:
    """Greedy texts, all in one batch, prompts in chunks."""
    tokenizer = model.tokenizer()
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    async with TorchExecutor(model, num_blocks=1000, threads=1, **settings) as executor:
        host = Host(executor)
        lines = [host.line(tokenizer.encode(text).ids, sampling=sampling) for text in prompts]
        while lacking := [line for line in lines if len(line.output) < new]:
            await host.step(*((line, host.work(line, 7)) for line in lacking))
    return lines


def judged(line: Line, reference: Any) -> tuple[list[int], torch.Tensor]:
    """What the reference calls likeliest behind each part of a text, and by how much the text's logprobs differ.

    One pass over the text itself shows them all.
    """
    with torch.inference_mode():
        logits = reference(torch.tensor([line.tokens[:-1]])).logits[0, line.prompt_len - 1 :]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(line.output).unsqueeze(1)).squeeze(1)
    likeliest: list[int] = logits.argmax(-1).tolist()
    return likeliest, (torch.tensor([probs.logprob for probs in line.probs]) - logprobs).abs()


async def compare(model: Model, reference: Any, kernels: str, prompts: tuple[str, ...], new: int) -> None:
    for line in await say(model, prompts, new, kernels=kernels, dtype="float32", weights="dense"):
        likeliest, off = judged(line, reference)
        assert line.output == likeliest
        assert off.max() <= 1e-3


def test_logits_over_the_whole_vocabulary_equal_those_of_transformers(model: Model, reference: Any) -> None:
    config = decoder_config(model.config)
    tokens = model.tokenizer().encode(" ".join(PROMPTS)).ids
    with torch.inference_mode():
        decoder = Decoder(config, WeightReader(model.tensors, torch.float32, lambda: None), torch.float32)
        kv = PagedKV(config, torch.float32, 40, 16)
        rows = Rows(np.array(tokens, np.int64), 0, 0, list(range(-(-len(tokens) // 16))))
        batch = build_batch([rows], kv, config.windows, torch.float32)
        ours = decoder.logits(decoder.forward(batch))
        theirs = reference(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() <= 1e-3


async def test_three_texts_equal_those_of_transformers(model: Model, reference: Any, computes: str) -> None:
    await compare(model, reference, computes, PROMPTS[:3], 24)


async def test_texts_of_stored_weights_are_what_the_reference_would_say(
    model: Model, reference: Any, path_of_kernels: str
) -> None:
    """Rounded activations may change a token: then both were about as likely."""
    same = total = 0
    for line in await say(model, PROMPTS[:3], 40, kernels=path_of_kernels):
        likeliest, off = judged(line, reference)
        same += sum(ours == theirs for ours, theirs in zip(line.output, likeliest, strict=True))
        total += len(likeliest)
        assert off.mean() < 0.1
        assert off.max() < 1.0
    assert same >= 0.95 * total


@pytest.mark.slow
async def test_twenty_texts_equal_those_of_transformers(model: Model, reference: Any, computes: str) -> None:
    await compare(model, reference, computes, PROMPTS, 64)
