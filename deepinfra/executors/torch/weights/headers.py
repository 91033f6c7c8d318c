"""Checks that a model's files hold exactly the tensors its configuration speaks of."""

from __future__ import annotations

import re

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.executors.torch.decoder import DecoderConfig
from deepinfra.models import TensorSource

__all__ = ("check_headers",)

# Buffers that older checkpoints carry and that the configuration decides anyway.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def check_headers(config: DecoderConfig, tensors: TensorSource) -> None:
    """Compare names and shapes; reads no weights.

    Raises:
        ModelError: A tensor is missing or of another shape.
        UnsupportedModelError: There is a tensor that the model would not use.
    """
    expected = config.shapes()
    present = set(tensors.names())
    for name, shape in expected.items():
        if name not in present:
            raise ModelError(f"tensor {name} is missing: the model's files and its configuration disagree")
        if (found := tuple(tensors.info(name).shape)) != shape:
            raise ModelError(f"tensor {name} has shape {list(found)}, its configuration says {list(shape)}")
    for name in sorted(present - expected.keys()):
        if _IGNORED.search(name) or (config.tied and name == "lm_head.weight"):
            continue
        raise UnsupportedModelError(f"tensor {name}", list(tensors.info(name).shape), "has no place in this model")
