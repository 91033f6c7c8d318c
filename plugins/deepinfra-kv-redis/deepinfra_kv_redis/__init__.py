"""A deepinfra plug-in: registers the KV store `redis`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from deepinfra.interfaces import KVStore
from deepinfra.registry import Registry, hookimpl

__all__ = ("RedisOptions", "deepinfra_register")

DAY_S = 86_400.0


def _checked_url(url: SecretStr) -> SecretStr:
    if not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("a URL begins with redis://, rediss:// (TLS) or unix://")
    return url


class RedisOptions(BaseModel):
    """Settings of `RedisStore`; unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[SecretStr, AfterValidator(_checked_url)] = Field(
        SecretStr("redis://127.0.0.1:6379/0"), description="Where the server is; may hold a password."
    )
    password_file: str | None = Field(None, min_length=1, description="File whose first line is the password.")
    prefix: str = Field(
        "deepinfra", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Beginning of every key; servers share by it."
    )
    timeout_s: float = Field(1.0, gt=0, description="How long the server may be silent.")
    max_record_nbytes: int = Field(64 << 20, gt=0, le=500 << 20, description="Largest record that is kept.")
    max_connections: int = Field(8, ge=1, description="Connections at most; each call uses one.")
    default_ttl_s: float = Field(DAY_S, gt=0, description="Seconds that other records live.")
    agent_ttl_s: float = Field(3 * DAY_S, gt=0, description="Seconds that records of traffic `agent` live.")
    chat_ttl_s: float = Field(7 * DAY_S, gt=0, description="Seconds that records of traffic `chat` live.")


@hookimpl
def deepinfra_register(registry: Registry) -> None:
    """Tell deepinfra what there is; runs at every start, so the client library is imported when it is used."""
    registry.kvstore("redis", _redis, options=RedisOptions)


def _redis(options: RedisOptions) -> KVStore:
    from deepinfra_kv_redis.store import RedisStore

    return RedisStore(**dict(options) | {"url": options.url.get_secret_value()})
