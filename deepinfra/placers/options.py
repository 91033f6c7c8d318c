"""Settings of the placers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ("EplbOptions", "StaticPlacerOptions")


class StaticPlacerOptions(BaseModel):
    """`StaticPlacer` has no settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EplbOptions(BaseModel):
    """Settings of `Eplb`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: int = Field(100, ge=1, description="Most recent recorded steps that count.")
