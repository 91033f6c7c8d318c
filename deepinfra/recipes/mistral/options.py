"""Settings of the Mistral recipe."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ("MistralOptions",)


class MistralOptions(BaseModel):
    """Settings of `Mistral`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        description="A model with tekken.json or tokenizer.model.vN (a name or a folder), or such a file itself."
    )
    cache_chars: int = Field(
        8_000_000, ge=0, description="Characters of encoded text kept for the next turns of chats; 0 turns it off."
    )
