"""Settings of the torch executor."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ("TorchOptions",)


class TorchOptions(BaseModel):
    """Settings of `TorchExecutor`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="a model's name, hub id, folder or GGUF file")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="element type of KV, and of weights that are not multiplied as stored; auto takes bfloat16 where "
        "the CPU multiplies it",
    )
    num_blocks: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="blocks of KV; auto sizes them from free memory"
    )
    block_size: int = Field(16, ge=1, le=1024, description="positions per block")
    max_step_tokens: int = Field(512, ge=1, description="most positions per step")
    max_seqs: int = Field(64, ge=1, description="most sequences at once")
    max_context: int | None = Field(None, ge=1, description="most positions of a sequence; default: the model's own")
    threads: int | None = Field(None, ge=1, le=256, description="threads that compute; default: one per physical core")
    num_slots: int = Field(32, ge=1, description="staging slots between KV and stores")
    kernels: Literal["auto", "avx512", "avx2", "torch"] = Field(
        "auto", description="whose operations compute; auto takes the best that CPU, model and compiler allow"
    )
    weights: Literal["auto", "stored", "dense"] = Field(
        "auto",
        description="stored multiplies the file's blocks of integers as they are, dense decodes them to dtype; auto "
        "takes stored where kernels can",
    )
    batch_invariant: bool = Field(
        False,
        description="tokens and logprobs do not depend, to the bit, on what else is computed, on chunks, caches, "
        "drafts or threads; refused where kernels cannot compute the model",
    )
