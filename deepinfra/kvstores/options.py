"""What may be configured of the stores."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from deepinfra.kvstores.retention import Lifetimes

__all__ = ("MemoryStoreOptions",)

_TTL = Lifetimes()


class MemoryStoreOptions(BaseModel):
    """Options of `MemoryStore`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    capacity_nbytes: int = Field(1 << 30, gt=0, description="Bytes held at most, overhead of records included.")
    default_ttl_s: float = Field(_TTL.default_s, gt=0, description="Seconds that other records live.")
    agent_ttl_s: float = Field(_TTL.agent_s, gt=0, description="Seconds that records of traffic `agent` live.")
    chat_ttl_s: float = Field(_TTL.chat_s, gt=0, description="Seconds that records of traffic `chat` live.")
