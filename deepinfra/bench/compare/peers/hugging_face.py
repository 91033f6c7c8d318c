"""transformers as a side of a comparison: a static batch, one forward and an argmax per token, nothing around it."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from lines import answer_lines, options, own_output
from transformers.modeling_outputs import CausalLMOutputWithPast

_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What a forward's argument is called: version 5.40 drops the older name."""

_UNTIMED = 2
"""First steps of a decode, in which memory is touched for the first time."""


@torch.inference_mode()
def main() -> None:
    """Load a model's folder and answer. The bare loop, which is faster than `generate`, with its growing cache."""
    wire, given = own_output(), options()
    torch.set_num_threads(int(str(given["threads"])))
    kind = getattr(torch, str(given["form"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(given["model"]), dtype=kind).eval()
    computed: dict[tuple[tuple[int, ...], ...], tuple[list[tuple[Any, Any]], Any]] = {}

    def forward(ids: Any, cache: Any) -> Any:
        return model(input_ids=ids, use_cache=True, logits_to_keep=1, **{_CACHE: cache}).logits[:, -1:].argmax(-1)

    def prefill(prompt: list[int]) -> dict[str, object]:
        began = time.perf_counter()
        forward(torch.tensor([prompt]), transformers.DynamicCache()).tolist()
        return {"seconds": time.perf_counter() - began}

    def begin(prompts: list[list[int]]) -> tuple[Any, Any]:
        """A cache that holds the prompts, and each one's first token; prompts are computed once, one at a time."""
        key = tuple(map(tuple, prompts))
        if key not in computed:
            caches = [transformers.DynamicCache() for _ in prompts]
            first = [forward(torch.tensor([prompt]), cache) for prompt, cache in zip(prompts, caches, strict=True)]
            rows = zip(*(cache.layers for cache in caches), strict=True)
            layers = [(torch.cat([x.keys for x in row]), torch.cat([x.values for x in row])) for row in rows]
            computed[key] = layers, torch.cat(first)
        layers, token = computed[key]
        cache = transformers.DynamicCache()
        for index, (keys, values) in enumerate(layers):
            cache.update(keys, values, index)
        return cache, token

    def decode(prompts: list[list[int]], new: int) -> dict[str, object]:
        cache, token = begin(prompts)
        firsts, began = token[:, 0].tolist(), 0.0
        for step in range(new):
            if step == _UNTIMED:
                began = time.perf_counter()
            token = forward(token, cache)
            token.tolist()  # seen by the host, as a server has to see them
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": len(prompts) * (new - _UNTIMED), "firsts": firsts}

    about = {"dtype": str(given["form"]), "torch": torch.__version__}
    answer_lines(wire, f"transformers {transformers.__version__}", about, {"prefill": prefill, "decode": decode})


if __name__ == "__main__":
    main()
