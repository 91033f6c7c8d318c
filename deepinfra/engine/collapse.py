"""Lets a lone exception leave a task group as itself, so that callers can catch what they expect."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

__all__ = ("collapsed",)


@contextmanager
def collapsed() -> Generator[None]:
    """Unwrap exception groups that hold exactly one exception.

    Source: Starlette's collapsing task group, for the same reason: handlers look for the exception, not the group.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        inner: BaseException = group
        while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
            inner = inner.exceptions[0]
        if inner is group:
            raise
        raise inner from inner.__cause__
