"""Mistral through the kit that recipes ship with, once for each kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfra.recipes import Mistral
from deepinfra.testing.recipe import RecipeConformance


class MistralConformance(RecipeConformance):
    version = ""

    @pytest.fixture(autouse=True)
    def _file(self, file_of: Callable[[str], Path]) -> None:
        self.file = file_of(self.version)

    def make(self) -> Mistral:
        return Mistral(self.file)


class TestSentencepiece(MistralConformance):
    version = "v7"
    markers = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]")


class TestTekken(MistralConformance):
    version = "v13"
    markers = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
