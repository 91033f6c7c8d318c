"""transformers as a peer: the same weights, a static batch, greedy, nothing else around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepinfra.errors import ConfigError, ModelError
from deepinfra.interfaces.given import Clock, SystemClock
from deepinfra.models import Model

__all__ = ("TransformersPeer",)

try:
    import transformers
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError:
    raise ConfigError("the peer transformers is not installed: pip install transformers") from None

Prompt = tuple[int, ...]
Layers = list[tuple[torch.Tensor, torch.Tensor]]

_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What a forward's argument is called: version 5.40 drops the older name."""


class TransformersPeer:
    """A `Peer`. The bare loop (forward, argmax), which is faster than `generate`, with its default growing cache.

    Args:
        model: Opened by deepinfra, so that the weights are the same values also where a file is quantised.
        dtype: `float32` or `bfloat16`.
        threads: Of torch; default: as they are.
        clock: Time.
    """

    name = f"transformers {transformers.__version__}"

    def __init__(self, model: Model, *, dtype: str, threads: int | None = None, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = _build(model, {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
        self._ready: dict[tuple[Prompt, ...], tuple[Layers, torch.Tensor]] = {}

    @torch.inference_mode()
    def prefill(self, prompt: Prompt) -> float:
        """See `Peer.prefill`."""
        began = self._clock.now()
        self._forward(torch.tensor([prompt]), transformers.DynamicCache()).tolist()
        return self._clock.now() - began

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Prompt], new: int) -> float:
        """See `Peer.decode`. Computed prompts are kept from call to call."""
        cache, token = self.start(prompts)
        token = self.step(cache, token)  # not counted: memory is touched for the first time
        began = self._clock.now()
        for _ in range(new - 2):
            token = self.step(cache, token)
        return len(prompts) * (new - 2) / (self._clock.now() - began)

    @torch.inference_mode()
    def start(self, prompts: Sequence[Prompt]) -> tuple[Any, torch.Tensor]:
        """Cache of prompts of one length, and each one's first token, `[seqs, 1]`."""
        key = tuple(prompts)
        if key not in self._ready:
            self._ready[key] = self._prefilled(prompts)
        layers, token = self._ready[key]
        cache = transformers.DynamicCache()
        for index, (keys, values) in enumerate(layers):
            cache.update(keys, values, index)
        return cache, token

    @torch.inference_mode()
    def step(self, cache: Any, token: torch.Tensor) -> torch.Tensor:
        """The next tokens, `[seqs, 1]`, seen by the host as a server has to see them."""
        chosen = self._forward(token, cache)
        chosen.tolist()
        return chosen

    def _prefilled(self, prompts: Sequence[Prompt]) -> tuple[Layers, torch.Tensor]:
        """One prompt at a time: the workspace for all at once may not be there."""
        caches = [transformers.DynamicCache() for _ in prompts]
        tokens = [self._forward(torch.tensor([prompt]), cache) for prompt, cache in zip(prompts, caches, strict=True)]
        rows = zip(*(cache.layers for cache in caches), strict=True)
        layers = [(torch.cat([x.keys for x in row]), torch.cat([x.values for x in row])) for row in rows]
        return layers, torch.cat(tokens)

    def _forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{_CACHE: cache})
        chosen: torch.Tensor = output.logits[:, -1:].argmax(-1)
        return chosen


def _build(model: Model, dtype: torch.dtype) -> Any:
    fields: Mapping[str, Any] = model.config
    config = transformers.AutoConfig.for_model(**fields)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    weights = {name: torch.from_numpy(model.tensors.read(name)).to(dtype) for name in model.tensors.names()}
    wrong = network.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := set(wrong.missing_keys) - tied:
        raise ModelError(f"transformers has no weights for {', '.join(sorted(missing))}")
    if wrong.unexpected_keys:
        raise ModelError(f"transformers does not know the weights {', '.join(sorted(wrong.unexpected_keys))}")
    network.tie_weights()
    return network
