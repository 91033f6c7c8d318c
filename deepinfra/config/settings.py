"""What a server can be told: the first of three frozen stages (settings, blueprint, engine)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

__all__ = ("ApiSettings", "ExecutorChoice", "PartChoice", "PoolSettings", "ServerSettings", "SplitPoolSettings")

PartName = Annotated[str, Field(min_length=1, description="name of the part; `deepinfra plugins` lists them")]


class PartChoice(BaseModel):
    """`use = "name"` and the part's own keys, which its own options check."""

    model_config = ConfigDict(frozen=True, extra="allow")

    use: PartName


class ExecutorChoice(PartChoice):
    """A choice of executor, and where it runs."""

    process: bool | None = Field(
        default=None, description="run it in a child process; by default if its steps hold the interpreter for long"
    )


class PoolSettings(BaseModel):
    """The parts of one pool."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scheduler: PartChoice = Field(default=PartChoice(use="bucketed"), description="who runs next")
    executor: ExecutorChoice = Field(default=ExecutorChoice(use="torch"), description="the model on a device")
    store: PartChoice = Field(default=PartChoice(use="ssd"), description='keeps KV by prefix; "none" for no store')
    speculator: PartChoice = Field(default=PartChoice(use="none"), description="guesses tokens")
    placer: PartChoice = Field(default=PartChoice(use="none"), description="which device holds which expert")
    replay: Literal["exact", "bounded"] = Field(
        default="exact",
        description="how a model's sliding windows come back behind a cached prefix that has no snapshot; `bounded` "
        "computes fewer rows again and is an approximation: the text may differ",
    )
    snapshots: Literal["off", "ram", "disk"] = Field(
        default="disk", description="where snapshots of sliding windows are kept: nowhere, in RAM, or like their blocks"
    )


class SplitPoolSettings(PoolSettings):
    """One pool of several; a store is named only where one is wanted, since two pools cannot share a folder."""

    store: PartChoice = Field(default=PartChoice(use="none"), description="keeps KV by prefix")


Origin = Annotated[str, Field(pattern=r"^https?://[^/\s*]+$")]


class ApiSettings(BaseModel):
    """The HTTP side: limits, callers, and what is kept for them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_nbytes: int = Field(default=8 * 2**20, ge=1024, description="largest request body")
    max_n: int = Field(default=64, ge=1, description="most answers of one request")
    keepalive_s: float = Field(default=10.0, gt=0, description="silence before a stream is kept alive by a comment")
    keys_file: str | None = Field(default=None, min_length=1, description="TOML file of API keys, tables `[[key]]`")
    cors_origins: tuple[Origin, ...] = Field(
        default=(), description="web origins whose pages may read answers, such as `https://chat.example.com`"
    )
    dialect: Literal["openai", "deepseek"] = Field(
        default="openai",
        description="whose habits chat and completions follow: `deepseek` refuses a wrong parameter with 422, and ends "
        "a call that was asked for by name with `tool_calls`",
    )
    max_stored: int = Field(default=10_000, ge=0, description="most answers of /v1/responses kept for later requests")
    max_stored_nbytes: int = Field(default=256 * 2**20, ge=0, description="most bytes of them")
    stored_ttl_s: float = Field(default=24 * 3600.0, gt=0, description="how long after its last use one is kept")
    tenant_metrics: bool = Field(
        default=False, description="tell each tenant's numbers by its name on `/metrics`, which needs no key"
    )
    receipts: Literal["never", "asked", "always"] = Field(
        default="asked",
        description="which answers carry `deepinfra.receipt`: what decided their tokens, for `deepinfra replay`",
    )


class ServerSettings(BaseModel):
    """Everything a server is told. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(default="smollm2", min_length=1, description="catalogue name, path or hub id")
    name: str | None = Field(default=None, min_length=1, description="what clients call it; by default from `model`")
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    client_timeout_s: float = Field(default=300.0, gt=0, description="a client that reads nothing for so long is gone")
    drain_deadline_s: float = Field(default=30.0, ge=0, description="how long streams may finish after SIGTERM")
    api_keys: SecretStr | None = Field(
        default=None,
        description="keys of which callers must send one, as `KEY` or `TENANT:KEY` separated by commas; best from the "
        "environment, or see `api.keys_file`",
    )
    api: ApiSettings = Field(default=ApiSettings(), description="the HTTP side")
    public_prefixes: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description="files with beginnings of prompts whose cached blocks all tenants share: a system prompt in plain "
        "text, or `*.json` with `system` and `tools` as in a chat request",
    )
    recipe: PartChoice = Field(default=PartChoice(use="chat-template"), description="request to tokens and back")
    pool: PoolSettings = Field(default=PoolSettings(), description="the parts of the one pool that does everything")
    prefill: tuple[SplitPoolSettings, ...] = Field(default=(), description="pools for prompts, instead of `pool`")
    decode: tuple[SplitPoolSettings, ...] = Field(default=(), description="pools for answers, instead of `pool`")

    @property
    def split(self) -> bool:
        """Whether prompts and answers are computed in different pools."""
        return bool(self.prefill or self.decode)

    @model_validator(mode="after")
    def _one_or_split(self) -> Self:
        if self.split and not (self.prefill and self.decode):
            raise ValueError("a split server needs both `prefill` and `decode` pools")
        if self.split and "pool" in self.model_fields_set:
            raise ValueError("give either `pool`, or `prefill` and `decode`")
        return self
