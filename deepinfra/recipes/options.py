"""Settings of the recipes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ("ChatTemplateOptions",)


class ChatTemplateOptions(BaseModel):
    """Settings of `ChatTemplate`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field("smollm2", description="Model whose tokenizer and chat template are used: a name or a path.")
    template: str | None = Field(None, description="Jinja source to use instead of the model's own chat template.")
    date: str | None = Field(
        None,
        pattern=r"^\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d)?)?$",
        description="The date that `strftime_now` says, which keeps prompts and their cached KV the same from day to "
        "day; default: today.",
    )
    tool_fallback: bool = Field(
        True,
        description="Show tools in the system text where the model's chat template ignores them; else they are "
        "refused.",
    )
    cache_chars: int = Field(
        8_000_000, ge=0, description="Characters of encoded text kept for the next turns of chats; 0 turns it off."
    )
