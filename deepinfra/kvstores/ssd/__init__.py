"""`SsdStore`: records in append-only segments on a local disk; survives restart and kill -9."""

from deepinfra.kvstores.ssd.store import SsdStore

__all__ = ("SsdStore",)
