"""API keys from a file and from the environment."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from deepinfra.config.settings import ServerSettings
from deepinfra.core.identity import ApiKey
from deepinfra.core.kv import Traffic
from deepinfra.errors import ConfigError

__all__ = ("KeyEntry", "keys_of", "read_keys")

_SECRET = re.compile(r"[!-~]{16,512}")
"""Shorter ones could be guessed, or found from their digest; other characters do not pass through a header."""

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class KeyEntry(BaseModel):
    """One `[[key]]` of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Word = Field(description="for logs")
    key: SecretStr | None = Field(default=None, description="the key itself, at least 16 characters")
    key_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        default=None, description="or its SHA-256, so that the file holds no secret"
    )
    tenant: Word | None = Field(default=None, description="whose it is; by default the name")
    requests_per_minute: int | None = Field(default=None, ge=1, description="most requests per minute")
    max_concurrent: int | None = Field(default=None, ge=1, description="most requests under way")
    retention: Traffic | None = Field(
        default=None, description="how long its KV is kept, whatever a request says: `agent`, `chat`, `default`, `none`"
    )

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError("give either key or key_sha256")
        if self.key is not None and not _SECRET.fullmatch(self.key.get_secret_value()):
            raise ValueError("key has 16 to 512 visible ASCII characters, so that it cannot be guessed")
        return self

    @property
    def api_key(self) -> ApiKey:
        """The key."""
        secret = self.key.get_secret_value() if self.key is not None else None
        return ApiKey(
            name=self.name,
            sha256=bytes.fromhex(self.key_sha256 or "") if secret is None else hashlib.sha256(secret.encode()).digest(),
            tenant=self.tenant or self.name,
            requests_per_minute=self.requests_per_minute,
            max_concurrent=self.max_concurrent,
            retention=self.retention,
        )


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: Annotated[list[KeyEntry], Field(min_length=1)]


def read_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """The keys in a TOML file, one table `[[key]]` each.

    Raises:
        ConfigError: The file cannot be read, or a key is wrong; never quotes one.
    """
    path = Path(path).expanduser()
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file of API keys {path.absolute()}") from None
    except tomllib.TOMLDecodeError:  # whose message may quote the line
        raise ConfigError(f"{path} is no TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}") from None
    try:
        file = _File.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        at = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{path}: {at}: {problem['msg'].removeprefix('Value error, ')}") from None
    return _distinct((entry.api_key for entry in file.key), str(path))


def keys_of(settings: ServerSettings) -> tuple[ApiKey, ...] | None:
    """All keys of a server; `None` if it asks for none.

    Raises:
        ConfigError: See `read_keys`.
    """
    keys: list[ApiKey] = []
    if settings.api.keys_file is not None:
        keys += read_keys(settings.api.keys_file)
    if settings.api_keys is not None:
        keys += _listed(settings.api_keys)
    if settings.api.keys_file is None and settings.api_keys is None:
        return None
    return _distinct(keys, "api_keys and api.keys_file together")


def _listed(secret: SecretStr) -> list[ApiKey]:
    """`KEY` or `TENANT:KEY`, separated by commas."""
    keys: list[ApiKey] = []
    for number, item in enumerate(secret.get_secret_value().split(","), 1):
        tenant, colon, key = item.strip().rpartition(":")
        name = f"{tenant or 'key'}-{number}"
        try:
            entry = KeyEntry(name=name, key=SecretStr(key), tenant=tenant if colon else None)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise ConfigError(
                f"api_keys: item {number} should be KEY or TENANT:KEY: {problem['msg'].removeprefix('Value error, ')}"
            ) from None
        keys.append(entry.api_key)
    return keys


def _distinct(keys: Iterable[ApiKey], where: str) -> tuple[ApiKey, ...]:
    """Two keys of one name could not be told apart in a log, two of one secret in a request."""
    found: dict[object, ApiKey] = {}
    for key in keys:
        for what in (key.name, key.sha256):
            if what in found:
                raise ConfigError(f"{where}: the keys {found[what].name!r} and {key.name!r} are one")
            found[what] = key
    return tuple(dict.fromkeys(found.values()))
