"""Settings of the schedulers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ("FcfsOptions",)


class FcfsOptions(BaseModel):
    """Settings of `Fcfs`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_queue: int = Field(4096, ge=1, description="Waiting sequences beyond which new ones are refused.")
