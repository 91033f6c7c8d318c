"""What a tenant may hold in a store, and write to it per second."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ("BURST_S", "Quotas")

BURST_S = 10.0
"""Seconds of writing that an idle tenant may do at once: a prompt of 100k tokens comes in one piece."""

_TENANTS = 1024
"""Tenants whose writing is remembered before those that did little of late are looked for and forgotten."""


class Quotas:
    """Bytes per tenant, and bytes written per second per tenant; 0 is no limit.

    The store counts what each tenant holds; this says what is too much. Writing is a bucket that fills by the rate up
    to `BURST_S` seconds of it. A record goes in while the bucket is not empty and may leave it in debt, so that one
    larger than the bucket is not refused for ever; over t seconds a tenant writes less than
    `(t + BURST_S) * write_nbytes_per_s` and one record.

    Args:
        default_nbytes: For every tenant that is not in `quotas`.
        quotas: Bytes by tenant.
        write_nbytes_per_s: For each tenant.

    Raises:
        ValueError: A limit is below 0.
    """

    def __init__(
        self,
        default_nbytes: int = 0,
        quotas: Mapping[str, int] = MappingProxyType({}),
        write_nbytes_per_s: float = 0,
    ) -> None:
        for name, value in (("", default_nbytes), *quotas.items()):
            if value < 0:
                raise ValueError(f"quota of tenant {name!r} is {value}: bytes, 0 for no limit")
        if write_nbytes_per_s < 0:
            raise ValueError(f"write_nbytes_per_s is {write_nbytes_per_s}: bytes, 0 for no limit")
        self._default, self._quotas = default_nbytes, dict(quotas)
        self._rate = write_nbytes_per_s
        self._buckets: dict[str, tuple[float, float]] = {}  # tenant -> bytes left, and when
        self._most = _TENANTS

    def __bool__(self) -> bool:
        """Whether any tenant is limited in what it holds."""
        return bool(self._default or any(self._quotas.values()))

    def quota(self, tenant: str) -> int:
        """Bytes that a tenant may hold; 0: no limit."""
        return self._quotas.get(tenant, self._default)

    def excess(self, tenant: str, nbytes: int) -> int:
        """Bytes that have to go if a tenant is to hold `nbytes`; 0: none."""
        quota = self.quota(tenant)
        return max(0, nbytes - quota) if quota else 0

    def take(self, tenant: str, nbytes: int, now: float) -> bool:
        """Whether a tenant may write a record of `nbytes` now; counts it as written if so.

        `now` is of a clock that never goes back (`Clock.now`). What continues a record that was refused is of no use;
        the caller refuses that too.
        """
        if not self._rate:
            return True
        left = self._left(tenant, now)
        if left <= 0:
            return False
        if len(self._buckets) >= self._most:
            full = self._rate * BURST_S
            self._buckets = {name: b for name, b in self._buckets.items() if self._left(name, now) < full}
            self._most = max(_TENANTS, 2 * len(self._buckets))
        self._buckets[tenant] = left - nbytes, now
        return True

    def _left(self, tenant: str, now: float) -> float:
        full = self._rate * BURST_S
        left, then = self._buckets.get(tenant, (full, now))
        return min(full, left + (now - then) * self._rate)
