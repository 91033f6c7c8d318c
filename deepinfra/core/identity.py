"""Who may ask, and on whose account."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from deepinfra.core.kv import Traffic

__all__ = ("ApiKey",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key of a server. The key itself is not kept, only its SHA-256.

    Attributes:
        name: For logs; unique on a server.
        sha256: Digest of the key's bytes.
        tenant: Whose requests come with it; several keys may share one. Tenants share no cache and no stored answer.
        requests_per_minute: How many requests it may make, on average; as many at once if it rested for a minute.
        max_concurrent: How many of its requests may be under way.
        retention: Class of all its requests' KV, whatever these say themselves.
    """

    name: str
    sha256: bytes = field(repr=False)
    tenant: str
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    retention: Traffic | None = None

    @classmethod
    def of(
        cls,
        key: str,
        *,
        name: str,
        tenant: str | None = None,
        requests_per_minute: int | None = None,
        max_concurrent: int | None = None,
        retention: Traffic | None = None,
    ) -> ApiKey:
        """From the key as its owner sends it; without a tenant the name is one."""
        return cls(
            name=name,
            sha256=hashlib.sha256(key.encode()).digest(),
            tenant=tenant or name,
            requests_per_minute=requests_per_minute,
            max_concurrent=max_concurrent,
            retention=retention,
        )
