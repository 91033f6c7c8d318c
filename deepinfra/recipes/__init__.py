"""Recipes: a conversation to exact tokens, tokens back to events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfra.lazy import lazily

if TYPE_CHECKING:
    from deepinfra.recipes.chat_template.recipe import ChatTemplate
    from deepinfra.recipes.deepseek.recipe import DeepSeek
    from deepinfra.recipes.harmony.recipe import Harmony
    from deepinfra.recipes.mistral.recipe import Mistral

__all__ = ("ChatTemplate", "DeepSeek", "Harmony", "Mistral")

__getattr__ = lazily(
    __name__,
    {
        "ChatTemplate": "deepinfra.recipes.chat_template.recipe",
        "DeepSeek": "deepinfra.recipes.deepseek.recipe",
        "Harmony": "deepinfra.recipes.harmony.recipe",
        "Mistral": "deepinfra.recipes.mistral.recipe",
    },
)
