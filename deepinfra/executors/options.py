"""Settings of the executors that have no package of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ("ToyOptions",)


class ToyOptions(BaseModel):
    """Settings of `ToyExecutor`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_blocks: int = Field(64, ge=1, description="blocks of KV")
    block_size: int = Field(4, ge=1, description="positions per block")
    num_slots: int = Field(8, ge=1, description="staging slots")
    max_step_tokens: int = Field(64, ge=1, description="most positions per step")
    max_seqs: int = Field(16, ge=1, description="most open sequences")
    max_context: int = Field(4096, ge=1, description="most positions of a sequence")
    vocab_size: int = Field(260, ge=2, description="number of tokens")
    seed: int = Field(0, ge=0, description="another seed is another model")
    grid: int = Field(1, ge=1, description="granularity of chunk ends it asks for")
    windows: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), max_length=16, description="positions that each window layer reads; none: full KV only"
    )
