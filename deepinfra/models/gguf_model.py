"""A model in a GGUF file."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from deepinfra.errors import ModelError
from deepinfra.models.fingerprint import fingerprint_of
from deepinfra.models.gguf_config import check_architecture, config_from_gguf
from deepinfra.models.gguf_file import open_gguf
from deepinfra.models.gguf_tensors import GgufTensors
from deepinfra.models.gguf_vocab import GgufVocab
from deepinfra.models.records import JsonValue, Model, Progress, SpecialTokens

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tokenizers import Tokenizer

__all__ = ("GgufModel",)


class GgufModel(Model):
    """A model whose weights, config and tokenizer are in one GGUF file.

    Args:
        name: The name it was asked for by.
        path: The file.
        cache_dir: Where the fingerprint is remembered.
        progress: Told about the fingerprint's progress.

    Raises:
        ModelError: The file is damaged or contradicts itself.
        UnsupportedModelError: The model needs something that is not implemented.
    """

    def __init__(self, name: str, path: Path, cache_dir: Path, progress: Progress) -> None:
        self.name, self.path = name, path
        self._cache_dir, self._progress = cache_dir, progress
        self._file = open_gguf(path)
        check_architecture(self._file)
        self.config = config_from_gguf(self._file)
        self.tensors = GgufTensors(self._file, self.config)

    @cached_property
    def _vocab(self) -> GgufVocab:
        return GgufVocab(self._file.metadata, self.path)

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer from the file's vocabulary."""
        from deepinfra.models.gguf_tokenizer import build_tokenizer

        return build_tokenizer(self._vocab)

    def chat_template(self) -> str | None:
        """Returns the template under `tokenizer.chat_template`."""
        template = self._file.metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ModelError(f"{self.path} is damaged: tokenizer.chat_template is no text")
        return template

    def special_tokens(self) -> SpecialTokens:
        """Returns the special tokens that the vocabulary names, and the end tokens it is known to use."""
        return self._vocab.special_tokens()

    def generation_defaults(self) -> Mapping[str, JsonValue]:
        """Returns nothing: a GGUF file has no generation config."""
        return {}

    def fingerprint(self) -> str:
        """Returns the hash of the file and of the config made from it."""
        return fingerprint_of([self.path], self.config, self._cache_dir, self._progress)
