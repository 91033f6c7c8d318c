"""What may be configured of the stores."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from deepinfra.kvstores.retention import Lifetimes

__all__ = ("MemoryStoreOptions", "SsdStoreOptions")

_TTL = Lifetimes()


class MemoryStoreOptions(BaseModel):
    """Options of `MemoryStore`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    capacity_nbytes: int = Field(1 << 30, gt=0, description="Bytes held at most, overhead of records included.")
    default_ttl_s: float = Field(_TTL.default_s, gt=0, description="Seconds that other records live.")
    agent_ttl_s: float = Field(_TTL.agent_s, gt=0, description="Seconds that records of traffic `agent` live.")
    chat_ttl_s: float = Field(_TTL.chat_s, gt=0, description="Seconds that records of traffic `chat` live.")


class SsdStoreOptions(BaseModel):
    """Options of `SsdStore`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field("~/.cache/deepinfra/kv", min_length=1, description="Folder; one server at a time may use it.")
    capacity_nbytes: int = Field(10 << 30, gt=0, description="Bytes on disk at most, dead bytes included.")
    segment_nbytes: int = Field(64 << 20, gt=0, description="Bytes after which a file is sealed.")
    fsync: Literal["none", "interval", "always"] = Field("interval", description="When files are synced to the disk.")
    min_free_nbytes: int = Field(1 << 30, ge=0, description="Free bytes to leave on the file system.")
    default_ttl_s: float = Field(_TTL.default_s, gt=0, description="Seconds that other records live.")
    agent_ttl_s: float = Field(_TTL.agent_s, gt=0, description="Seconds that records of traffic `agent` live.")
    chat_ttl_s: float = Field(_TTL.chat_s, gt=0, description="Seconds that records of traffic `chat` live.")
