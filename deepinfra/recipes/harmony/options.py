"""Settings of the harmony recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ("HarmonyOptions",)


class HarmonyOptions(BaseModel):
    """Settings of `Harmony`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="gpt-oss, or a model with its tokenizer: a name or a path.")
    identity: str = Field(
        "You are ChatGPT, a large language model trained by OpenAI.",
        description="First line of the system message; a request's `model_identity` comes before it.",
    )
    knowledge_cutoff: str = Field(
        "2024-06", description="Month up to which the model knows the world; empty leaves the line out."
    )
    date: str | None = Field(
        None,
        pattern=r"^\d{4}-\d\d-\d\d$",
        description="The date in the system message, which keeps prompts and their cached KV the same from day to day; "
        "default: today.",
    )
    effort: Literal["low", "medium", "high"] = Field(
        "medium", description="Reasoning effort of requests that name none."
    )
    cache_chars: int = Field(
        8_000_000, ge=0, description="Characters of encoded text kept for the next turns of chats; 0 turns it off."
    )
