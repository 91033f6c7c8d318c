"""Settings of the DeepSeek recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ("DeepSeekOptions",)


class DeepSeekOptions(BaseModel):
    """Settings of `DeepSeek`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="Model whose tokenizer is used: a name or a path.")
    version: Literal["v4", "v4.1"] = Field("v4", description="Format of the prompts that the model was trained on.")
    effort: Literal["none", "low", "high", "max"] = Field(
        "high", description="Reasoning effort of requests that ask for none."
    )
    cache_chars: int = Field(
        8_000_000, ge=0, description="Characters of encoded text kept for the next turns of chats; 0 turns it off."
    )
