"""What a recipe says about itself: for people who decide whether to serve a model with it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("RecipeReport",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeReport:
    """Printed by `deepinfra recipe doctor`.

    Attributes:
        recipe: Name of the recipe's class.
        control: Spelling and id of every token that no text may become, by id.
        fences: Plain text that separates parts of a prompt; a user can type it, and no tokenizer can prevent that.
        quirks: What the model's template or tokenizer does differently from most, in sentences.
        fallbacks: What the recipe does in the template's stead, in sentences.
        reasoning: How the model marks its reasoning: opening and closing marker.
        tools: Name of the syntax in which it calls tools; `None` if tools are refused.
        injectable: Fields in which a typed marker changed the control tokens; a recipe that has any is not served.
    """

    recipe: str
    control: tuple[tuple[str, int], ...] = ()
    fences: tuple[str, ...] = ()
    quirks: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    reasoning: tuple[str, str] | None = None
    tools: str | None = None
    injectable: tuple[str, ...] = ()
