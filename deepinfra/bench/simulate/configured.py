"""What a configuration would do: the parts of a blueprint, on a machine that is simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from deepinfra.bench.simulate.machines import Machine, machine_measured
from deepinfra.bench.simulate.run import PoolSetup, Setup
from deepinfra.bench.simulate.store import modelled
from deepinfra.config import Blueprint, Part, PoolBlueprint
from deepinfra.core.buckets import DEFAULT_EDGES
from deepinfra.engine import Route, least_loaded
from deepinfra.errors import ConfigError
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.interfaces.scheduler import Scheduler

__all__ = ("Fleet", "configured", "edges_of")

SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many pools: so many that do everything, or so many for prompts and so many for answers."""

    pools: int = 0
    prefill: int = 0
    decode: int = 0

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}" if self.prefill else f"{self.pools} replica{'s' * (self.pools > 1)}"


def configured(
    blueprint: Blueprint,
    *,
    name: str,
    machine: Machine | None = None,
    fleet: Fleet | None = None,
    route: Route = least_loaded,
    settings: Mapping[str, str] | None = None,
    edges: Sequence[int] = DEFAULT_EDGES,
) -> Setup:
    """A setup with a configuration's schedulers, stores, speculators and placers.

    Args:
        blueprint: The configuration.
        name: What it is called in a report.
        machine: What each pool runs on; by default what its `simulated` executor says, or as its executor was
            measured here.
        fleet: How many pools; by default those of the configuration.
        route: Chooses among several pools of one kind.
        settings: What to say of it besides.
        edges: Of the report's length buckets.

    Raises:
        ConfigError: The fleet does not fit the configuration, or nothing is known of what steps cost.
        ModelError: An executor's model cannot be used.
    """
    whole, prefill, decode = _counted(blueprint, fleet)
    machines = {pool.name: machine or _own(pool) for pool, _ in (*whole, *prefill, *decode)}
    devices = sum(count * machines[pool.name].devices for pool, count in (*whole, *prefill, *decode))

    def setups(kind: Sequence[tuple[PoolBlueprint, int]], title: str) -> list[PoolSetup]:
        return [
            _pool_setup(pool, machines[pool.name], title if len(kind) == 1 else pool.name, count)
            for pool, count in kind
        ]

    told = {
        **(settings or {}),
        "pools": str(fleet) if fleet else ", ".join(pool.name for pool in blueprint.pools),
        "scheduler": _each(blueprint.pools, lambda pool: _words(pool.scheduler)),
        "store": _each(blueprint.pools, lambda pool: pool.store.entry.name if pool.store else "none"),
        "speculator": _each(blueprint.pools, lambda pool: pool.speculator.entry.name if pool.speculator else "none"),
        "steps cost": ", ".join(dict.fromkeys(each.name for each in machines.values())),
    }
    return Setup(
        name=name,
        pools=setups(whole, "pool"),
        prefill=setups(prefill, "prefill"),
        decode=setups(decode, "decode"),
        route=route,
        settings=told,
        devices=devices,
        edges=edges,
    )


def edges_of(blueprint: Blueprint) -> tuple[int, ...]:
    """The first scheduler's own bucket edges, or the default ones."""
    own = (getattr(pool.scheduler.options, "edges", None) for pool in blueprint.pools)
    return next((tuple(edges) for edges in own if edges), DEFAULT_EDGES)


_Counted = list[tuple[PoolBlueprint, int]]


def _counted(blueprint: Blueprint, fleet: Fleet | None) -> tuple[_Counted, _Counted, _Counted]:
    """Pools that do everything, those for prompts, and those for answers, each with how many there are of it."""
    if fleet is None:
        whole = [(blueprint.pool, 1)] if blueprint.pool else []
        return whole, [(pool, 1) for pool in blueprint.prefill], [(pool, 1) for pool in blueprint.decode]
    if len(blueprint.prefill) > 1 or len(blueprint.decode) > 1:
        raise ConfigError("this configuration names several pools of a kind; how many there are is decided by it alone")
    if not fleet.prefill:
        if blueprint.pool is None:
            raise ConfigError("this configuration splits prefill and decode; say how many of each with --split")
        return [(blueprint.pool, fleet.pools)], [], []
    first, last = (blueprint.pool, blueprint.pool) if blueprint.pool else (blueprint.prefill[0], blueprint.decode[0])
    return [], [(replace(first, name="prefill"), fleet.prefill)], [(replace(last, name="decode"), fleet.decode)]


def _own(pool: PoolBlueprint) -> Machine:
    if pool.executor.entry.name == SIMULATED:
        return Machine(name=f"{pool.name}.executor")
    return machine_measured(pool)


def _pool_setup(pool: PoolBlueprint, machine: Machine, name: str, replicas: int) -> PoolSetup:
    own = dict(pool.executor.options) if pool.executor.entry.name == SIMULATED else {}
    scheduler = pool.scheduler
    if "timings" in type(scheduler.options).model_fields:
        # Step times of the past would make two runs differ, and virtual ones are nobody else's business.
        scheduler = replace(scheduler, options=scheduler.options.model_copy(update={"timings": None}))

    def executor() -> SimulatedExecutor:
        return SimulatedExecutor(**{**own, **machine.options})

    return PoolSetup(
        scheduler=scheduler.build,
        executor=executor,
        store=modelled(pool.store) if pool.store else None,
        speculator=pool.speculator.build if pool.speculator else None,
        placer=pool.placer.build if pool.placer else None,
        name=name,
        replicas=replicas,
    )


def _each(pools: Sequence[PoolBlueprint], look: Callable[[PoolBlueprint], str]) -> str:
    return ", ".join(dict.fromkeys(map(look, pools)))


def _words(part: Part[Scheduler]) -> str:
    """Its name, and the keys that were not left as they are."""
    changed = part.options.model_dump(exclude_defaults=True, exclude={"timings"})
    return " ".join([part.entry.name, *(f"{key}={value}" for key, value in changed.items())])
