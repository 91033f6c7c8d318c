"""DeepSeek's recipe through the kit: a tokenizer trained on the spot always, DeepSeek's own in the slow suite."""

from __future__ import annotations

import pytest

from deepinfra.recipes import DeepSeek
from deepinfra.recipes.deepseek.dialect import DIALECTS
from deepinfra.testing.deepseek import DeepSeekTextModel
from deepinfra.testing.recipe import RecipeConformance
from deepinfra.testing.textmodel import TrainedTextModel

OLD = TrainedTextModel(None, DIALECTS["v4"].control)
NEW = TrainedTextModel(None, DIALECTS["v4.1"].control, special=False)


class TestV4(RecipeConformance):
    markers = OLD.markers

    def make(self) -> DeepSeek:
        return DeepSeek(OLD, version="v4", effort="none")


class TestV41WithReasoning(RecipeConformance):
    markers = NEW.markers
    extends = False  # the reasoning that the prompt opens is not in the next turn's history

    def make(self) -> DeepSeek:
        return DeepSeek(NEW, version="v4.1")


class OnOneBackend(RecipeConformance):
    """Each test loads a vocabulary of 129,000 tokens."""

    __test__ = False

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"


@pytest.mark.slow
class TestV4WithItsOwnTokenizer(OnOneBackend):
    __test__ = True
    markers = DIALECTS["v4"].control
    extends = False
    model = DeepSeekTextModel()

    def make(self) -> DeepSeek:
        return DeepSeek(self.model, version="v4")


@pytest.mark.slow
class TestV41WithV4sTokenizer(OnOneBackend):
    __test__ = True
    markers = DIALECTS["v4.1"].control
    model = DeepSeekTextModel(("<｜System｜>",))

    def make(self) -> DeepSeek:
        return DeepSeek(self.model, version="v4.1", effort="none")
