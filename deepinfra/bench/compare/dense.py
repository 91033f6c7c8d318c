"""A model's weights as a folder that any Hugging Face program reads: what peers without our formats are given."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from deepinfra.models import Model

__all__ = ("write_dense",)

_DONE = "complete"


def write_dense(model: Model, folder: Path) -> Path:
    """Write weights, decoded to bfloat16, configuration and tokenizer below `folder`, once for each fingerprint.

    All sides of a comparison have the same values then, also where the model's own file is quantised.

    Args:
        model: Opened.
        folder: Where; it may not exist yet.

    Returns:
        The folder to give to a peer.
    """
    into = folder / f"{model.fingerprint()[:16]}-bfloat16"
    if (into / _DONE).exists():
        return into
    into.mkdir(parents=True, exist_ok=True)
    weights = {name: torch.from_numpy(model.tensors.read(name)).bfloat16() for name in model.tensors.names()}
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    special = model.special_tokens()
    names = {"bos_token": special.bos_token, "eos_token": special.eos_token, "chat_template": model.chat_template()}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **{key: value for key, value in names.items() if value}}
    (into / "config.json").write_text(json.dumps({**model.config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    (into / "tokenizer_config.json").write_text(json.dumps(about))
    model.tokenizer().save(str(into / "tokenizer.json"))
    (into / _DONE).touch()
    return into
