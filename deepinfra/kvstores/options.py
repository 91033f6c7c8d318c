"""What may be configured of the stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, model_validator

from deepinfra.kvstores.policy import PolicyName
from deepinfra.kvstores.retention import Lifetimes
from deepinfra.kvstores.tiered.admission import parse_rule

__all__ = ("MemoryStoreOptions", "SsdStoreOptions", "TierOptions", "TieredStoreOptions", "WriteOptions")

_TTL = Lifetimes()


def _folder(text: str) -> str:
    if "\0" in text:
        raise ValueError("a path has no NUL in it")
    try:
        Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{text.split('/')[0]} is no user's home: {error}") from None
    return text


class MemoryStoreOptions(BaseModel):
    """Options of `MemoryStore`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    capacity_nbytes: int = Field(1 << 30, gt=0, description="Bytes held at most, overhead of records included.")
    default_ttl_s: float = Field(_TTL.default_s, gt=0, description="Seconds that other records live.")
    agent_ttl_s: float = Field(_TTL.agent_s, gt=0, description="Seconds that records of traffic `agent` live.")
    chat_ttl_s: float = Field(_TTL.chat_s, gt=0, description="Seconds that records of traffic `chat` live.")
    policy: PolicyName = Field(
        "reuse",
        description="Who goes first: `reuse` keeps what came back longer than what was asked for once, `lru` what was "
        "used last.",
    )
    quotas: dict[str, NonNegativeInt] = Field({}, description="Bytes held at most by tenant; 0: no limit.")
    tenant_quota_nbytes: int = Field(0, ge=0, description="Bytes held at most by each other tenant; 0: no limit.")
    tenant_write_nbytes_per_s: float = Field(0, ge=0, description="Bytes each tenant may save a second; 0: no limit.")


class SsdStoreOptions(BaseModel):
    """Options of `SsdStore`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, AfterValidator(_folder)] = Field(
        "~/.cache/deepinfra/kv", min_length=1, description="Folder; several servers may share it."
    )
    capacity_nbytes: int = Field(10 << 30, gt=0, description="Bytes on disk at most, dead bytes included.")
    segment_nbytes: int = Field(64 << 20, gt=0, description="Bytes after which a file is sealed.")
    fsync: Literal["none", "interval", "always"] = Field("interval", description="When files are synced to the disk.")
    min_free_nbytes: int = Field(1 << 30, ge=0, description="Free bytes to leave on the file system.")
    default_ttl_s: float = Field(_TTL.default_s, gt=0, description="Seconds that other records live.")
    agent_ttl_s: float = Field(_TTL.agent_s, gt=0, description="Seconds that records of traffic `agent` live.")
    chat_ttl_s: float = Field(_TTL.chat_s, gt=0, description="Seconds that records of traffic `chat` live.")
    quotas: dict[str, NonNegativeInt] = Field({}, description="Bytes on disk at most by tenant; 0: no limit.")
    tenant_quota_nbytes: int = Field(0, ge=0, description="Bytes on disk at most by each other tenant; 0: no limit.")
    tenant_write_nbytes_per_s: float = Field(0, ge=0, description="Bytes each tenant may save a second; 0: no limit.")


def _rule(text: str) -> str:
    parse_rule(text)
    return text


Rule = Annotated[str, AfterValidator(_rule)]


class WriteOptions(BaseModel):
    """What is written to a tier, by class of traffic: `all`, `second-touch` or `prefix-depth:N`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default: Rule = "all"
    agent: Rule = "all"
    chat: Rule = "all"


def _by_class(write: object) -> object:
    return dict.fromkeys(WriteOptions.model_fields, write) if isinstance(write, str) else write


class TierOptions(BaseModel):
    """A store of `TieredStore`: its name, what is written to it, and its own keys."""

    model_config = ConfigDict(frozen=True, extra="allow")

    use: str = Field(min_length=1, description="Name of the store.")
    write: Annotated[WriteOptions, BeforeValidator(_by_class)] = Field(
        default=WriteOptions(),
        description="What is written to it: `all`, `second-touch` (what is asked for twice), `prefix-depth:N` (the "
        "first N blocks of a prefix), or a table of these by class: `default`, `agent`, `chat`.",
    )


class TieredStoreOptions(BaseModel):
    """Options of `TieredStore`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tiers: tuple[TierOptions, ...] = Field(
        (TierOptions(use="memory"), TierOptions(use="ssd")),
        min_length=1,
        description="Stores, fastest first: tables of `use`, `write` and the store's own keys.",
    )
    queue_nbytes: int = Field(256 << 20, gt=0, description="Bytes that may wait for each tier but the first.")
    drain_s: float = Field(10.0, ge=0, description="How long writing what waits may take at the end.")
    timeout_s: float = Field(5.0, gt=0, description="How long a call of a tier may take.")

    @model_validator(mode="after")
    def _first_takes_all(self) -> Self:
        if self.tiers[0].write != WriteOptions():
            raise ValueError("tiers.0.write: the first tier takes every record")
        return self
