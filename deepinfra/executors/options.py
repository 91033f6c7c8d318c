"""Settings of the executors that have no package of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from deepinfra.core.cost import StepCost
from deepinfra.executors.simulated import SIMULATED_COST

__all__ = ("SimulatedOptions", "ToyOptions")


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


class SimulatedOptions(BaseModel):
    """Settings of `SimulatedExecutor`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cost: StepCost = Field(
        SIMULATED_COST,
        description="seconds per `step`, `chunk_token`, `chunk_read`, `decode_row`, `decode_read` and `draft`; those "
        "not named are 0. `deepinfra profile` measures them",
    )
    num_blocks: int = Field(8192, ge=1, description="blocks of KV")
    block_size: int = Field(64, ge=1, description="positions per block")
    block_nbytes: int = Field(64 * 327_680, ge=1, description="bytes that a block of the simulated model has")
    copy_nbytes_per_s: float = Field(
        0.0, ge=0.0, description="how fast blocks are copied between device and staging; 0 takes no time"
    )
    num_slots: int = Field(64, ge=1, description="staging slots")
    max_step_tokens: int = Field(8192, ge=1, description="most positions per step")
    max_seqs: int = Field(256, ge=1, description="most open sequences")
    max_context: int = Field(131_072, ge=1, description="most positions of a sequence")
    vocab_size: int = Field(
        65_536, ge=2, description="number of tokens; behind a real tokenizer at most as many as that has"
    )
    noise: float = Field(0.0, ge=0.0, le=2.0, description="standard deviation of the logarithm of a step's time")
    acceptance: float = Field(
        0.0, ge=0.0, le=1.0, description="chance that a token continues the text's repetition, for speculators; 0: none"
    )

    @field_validator("cost")
    @classmethod
    def _non_negative(cls, cost: StepCost) -> StepCost:
        if any(figure < 0.0 for figure in cost):
            raise ValueError("figures must be at least 0")
        return cost
