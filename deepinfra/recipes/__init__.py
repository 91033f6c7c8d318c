"""Recipes: a conversation to exact tokens, tokens back to events."""

from deepinfra.recipes.chat_template.recipe import ChatTemplate

__all__ = ("ChatTemplate",)
