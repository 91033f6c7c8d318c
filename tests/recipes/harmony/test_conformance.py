"""Harmony through the kit that recipes ship with."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfra.recipes import Harmony
from deepinfra.testing.recipe import RecipeConformance
from deepinfra.testing.textmodel import TrainedTextModel

MARKERS = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|constrain|>", "<|call|>")
SMALL = TrainedTextModel(None, ("<|endoftext|>", "<|return|>", *MARKERS))


class TestHarmony(RecipeConformance):
    markers = SMALL.markers
    extends = False  # an answer's channel stands between the prompt and its text

    def make(self) -> Harmony:
        return Harmony(SMALL)


@pytest.mark.slow
class TestHarmonyOfGptOss(RecipeConformance):
    """With the real vocabulary, which is built once."""

    markers = SMALL.markers
    extends = False

    def make(self) -> Harmony:
        return self.shared

    @pytest.fixture(autouse=True)
    def _share(self, recipe_of_gpt_oss: Harmony) -> None:
        self.shared = recipe_of_gpt_oss

    @pytest.fixture
    def recipe(self, _share: Any) -> Harmony:  # type: ignore[override]
        return self.shared

    async def test_version_is_the_same_for_the_same_recipe(self, recipe: Any) -> None:
        """Entering it again would build it again."""
        assert recipe.version == self.shared.version
