"""A recipe that is built once from a model's files: when it is entered, or at first use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from threading import Lock
from typing import Generic, Protocol, Self, TypeVar

from deepinfra.interfaces import Recipe, Tokenizer

__all__ = ("Built", "BuiltOnce")


class Built(Protocol):
    """What was built; immutable, shared by threads."""

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Recipe.tokenizer`."""
        ...

    @property
    def version(self) -> str:
        """See `Recipe.version`."""
        ...


B = TypeVar("B", bound=Built)


class BuiltOnce(Recipe, Generic[B]):
    """Builds in a thread when entered, else in the first caller's; other callers wait. Forgets it when left."""

    def __init__(self) -> None:
        self._kept: B | None = None
        self._lock = Lock()

    @abstractmethod
    def build(self) -> B:
        """Read the model's files; takes seconds."""

    @property
    def built(self) -> B:
        """What `build` returned; raises what it raises."""
        with self._lock:
            if self._kept is None:
                self._kept = self.build()
            return self._kept

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        await self.offload(getattr, self, "built")
        try:
            yield self
        finally:
            self._kept = None

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Recipe.tokenizer`."""
        return self.built.tokenizer

    @property
    def version(self) -> str:
        """SHA-256 over what was built: the tokenizer's definition, the format or template, the recipe's rules."""
        return self.built.version
