"""The three hooks of a plug-in. None is on the token path: they run once, when a server is put together.

A plug-in is a module (or any object) named by an entry point of the group `deepinfra`, with functions marked
`@hookimpl`. A function may leave out arguments that it does not need, so hooks can gain arguments later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pluggy

if TYPE_CHECKING:
    from deepinfra.engine import Engine, EngineStats
    from deepinfra.registry import Registry

__all__ = (
    "ASGIApp",
    "Observer",
    "deepinfra_observers",
    "deepinfra_register",
    "deepinfra_routes",
    "hookimpl",
    "hookspec",
)

hookspec = pluggy.HookspecMarker("deepinfra")

hookimpl = pluggy.HookimplMarker("deepinfra")
"""Marks a function of a plug-in as the implementation of the hook of the same name."""

_Message: TypeAlias = MutableMapping[str, Any]
ASGIApp: TypeAlias = Callable[
    [_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]], Awaitable[None]
]
"""An ASGI application."""

Observer: TypeAlias = "Callable[[EngineStats], None]"
"""Is told the engine's counters once a second while it serves, and a last time when it has stopped."""


@hookspec
def deepinfra_register(registry: Registry) -> None:
    """Register parts by name: `registry.scheduler("mine", factory, options=MineOptions)` and its sisters.

    Runs at every start, also of `deepinfra --help`-like commands: import the part inside the factory.
    """


@hookspec
def deepinfra_routes(engine: Engine) -> Mapping[str, ASGIApp]:
    """ASGI applications to mount beside the server's own, by path (`"/admin"`).

    Args:
        engine: The engine that will be served; not entered yet.
    """
    return {}


@hookspec
def deepinfra_observers() -> Sequence[Observer]:
    """Observers of the engine that `deepinfra serve` runs; called on the event loop, so each must return at once."""
    return ()
