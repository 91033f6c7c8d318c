"""KV stores: `MemoryStore` in RAM, `SsdStore` on a local disk, `TieredStore` over several. Loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfra.lazy import lazily

if TYPE_CHECKING:
    from deepinfra.kvstores.memory import MemoryStore
    from deepinfra.kvstores.ssd import SsdStore
    from deepinfra.kvstores.tiered import Tier, TieredStore

__all__ = ("MemoryStore", "SsdStore", "Tier", "TieredStore")

__getattr__ = lazily(
    __name__,
    {
        "MemoryStore": "deepinfra.kvstores.memory",
        "SsdStore": "deepinfra.kvstores.ssd",
        "Tier": "deepinfra.kvstores.tiered",
        "TieredStore": "deepinfra.kvstores.tiered",
    },
)
