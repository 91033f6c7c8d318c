"""TieredStore: several stores as one, the fastest first."""

from deepinfra.kvstores.tiered.store import Tier, TieredStore

__all__ = ("Tier", "TieredStore")
