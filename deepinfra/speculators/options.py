"""Settings of the speculators."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ("NgramOptions",)


class NgramOptions(BaseModel):
    """Settings of `Ngram`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_drafts: int = Field(4, ge=1, le=32, description="Most drafts per sequence and step.")
    min_match: int = Field(2, ge=1, le=8, description="Last tokens that must have occurred before, at least.")
    max_match: int = Field(6, ge=1, le=32, description="Longer matches are not told apart.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError("min_match must not exceed max_match")
        return self
