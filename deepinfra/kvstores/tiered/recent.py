"""A bounded memory of what was met lately."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ("Recent",)

V = TypeVar("V")


class Recent(Generic[V]):
    """Values by key; beyond `most` keys the one met least lately goes. About 150 bytes each, keys not counted."""

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._values: OrderedDict[bytes, V] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    def add(self, key: bytes, value: V) -> None:
        """Remember `value`, in place of an older one."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def get(self, key: bytes) -> V | None:
        """What is remembered of `key`, which is met by this."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def discard(self, key: bytes) -> None:
        """Forget `key`; nothing if it is not known."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
