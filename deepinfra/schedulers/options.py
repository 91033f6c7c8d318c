"""Settings of the schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ("BucketedOptions", "FcfsOptions", "TenantOptions")


class TenantOptions(BaseModel):
    """Settings of one tenant, `tenants.NAME`; those of `tenants."*"` are each other tenant's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(1.0, ge=0.001, le=1000.0, description="Its share of the work beside other tenants' weights.")
    max_queue: int | None = Field(
        None, ge=1, description="Its waiting sequences beyond which new ones are refused; null: no limit of its own."
    )
    max_queue_tokens: int | None = Field(
        None, ge=1, description="Its prompt tokens without cache that may wait; null: no limit of its own."
    )
    max_running: int | None = Field(
        None, ge=1, description="Its sequences that may run, further ones are left waiting; null: no limit of its own."
    )
    max_priority: int | None = Field(
        None,
        ge=-8,
        le=8,
        description="Higher priorities of its requests count as this; a request's `priority` times -1. Null: no limit.",
    )


Tenants = Mapping[Annotated[str, Field(pattern=r"^(\*|[A-Za-z0-9._-]{1,64})$")], TenantOptions]


class FcfsOptions(BaseModel):
    """Settings of `Fcfs`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_budget_s: float | None = Field(
        0.25, gt=0.0, description="Aim for a step's seconds; null: steps are filled up to the executor's limit."
    )
    itl_target_s: float | None = Field(
        None,
        gt=0.0,
        description="Aim for the seconds between two tokens of a stream; null: the step's budget is the only aim.",
    )
    decode_share: float = Field(
        0.25,
        ge=0.0,
        le=0.9,
        description="Part of the predicted time that decoding keeps in any 8 steps with something to decode; "
        "0 protects nothing.",
    )
    max_queue: int = Field(4096, ge=1, description="Waiting sequences beyond which new ones are refused.")
    max_queue_tokens: int | None = Field(
        None, ge=1, description="Prompt tokens without cache that may wait; null: no limit."
    )
    max_queue_s: float | None = Field(
        300.0, gt=0.0, description="Predicted seconds of prompts that may wait; null: no limit."
    )
    tenants: Tenants = Field({}, description='What each tenant may have; `"*"` is for those not named.')
    timings: str | None = Field(
        None,
        min_length=1,
        description="Folder in which measured step times are kept for the next start; null keeps none.",
    )


class BucketedOptions(BaseModel):
    """Settings of `Bucketed`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    edges: tuple[int, ...] | None = Field(
        None, description="Uncached tokens at which the further buckets begin; null: learned from recent prompts."
    )
    step_budget_s: float | None = Field(
        0.25, gt=0.0, description="Aim for a step's seconds; null: steps are filled up to the executor's limit."
    )
    itl_target_s: float | None = Field(
        None,
        gt=0.0,
        description="Aim for the seconds between two tokens of a stream; null: the step's budget is the only aim.",
    )
    decode_share: float = Field(
        0.25,
        ge=0.0,
        le=0.9,
        description="Part of the predicted time that decoding keeps in any 8 steps with something to decode; "
        "0 protects nothing.",
    )
    max_queue: int = Field(4096, ge=1, description="Waiting sequences beyond which new ones are refused.")
    max_queue_tokens: int | None = Field(
        None, ge=1, description="Prompt tokens without cache that may wait; null: no limit."
    )
    max_queue_s: float | None = Field(
        300.0, gt=0.0, description="Predicted seconds of prompts that may wait; null: no limit."
    )
    max_overtakes: int = Field(
        1024, ge=0, description="How often a waiting sequence may be passed by ones behind it; 0 keeps strict order."
    )
    aging_steps: int = Field(256, ge=1, description="Steps of waiting that weigh as much as one point of priority.")
    tenants: Tenants = Field({}, description='What each tenant may have; `"*"` is for those not named.')

    timings: str | None = Field(
        None,
        min_length=1,
        description="Folder in which measured step times are kept for the next start; null keeps none.",
    )

    @field_validator("edges")
    @classmethod
    def _ascending(cls, edges: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if edges and (edges[0] < 1 or any(a >= b for a, b in pairwise(edges))):
            raise ValueError("edges must be positive and ascending")
        return edges
