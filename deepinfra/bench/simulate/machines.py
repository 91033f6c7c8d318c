"""What a pool's steps cost and how much KV it holds: by name, from a file, or as it was measured here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from deepinfra.bench.simulate.plan.replicas import replica_for
from deepinfra.config import PoolBlueprint
from deepinfra.config.folders import timings_folder
from deepinfra.core.cost import StepCost
from deepinfra.errors import ConfigError
from deepinfra.interfaces.executor import Executor
from deepinfra.schedulers.predictor import StepPredictor
from deepinfra.schedulers.timings import Timings

__all__ = ("Machine", "machine_measured", "machine_named")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one pool runs on, as far as a simulation needs to know it.

    Attributes:
        name: In words, for reports.
        devices: Of the pool.
        options: Keys of the `simulated` executor that it decides, among them `cost`.
    """

    name: str
    devices: int = 1
    options: Mapping[str, object] = field(default_factory=dict)


def machine_named(name: str) -> Machine:
    """A machine by device and model (`h100x8/llama-70b`), or by a JSON file of `StepCost` or of `deepinfra profile`.

    Raises:
        ConfigError: No such device or model, or the file holds no figures.
        OSError: The file cannot be read.
    """
    if name.endswith(".json") or Path(name).is_file():
        return Machine(name=Path(name).name, options={"cost": _figures(Path(name))})
    replica = replica_for(name)
    options = {
        "cost": replica.cost,
        "num_blocks": replica.num_blocks,
        "block_size": replica.block_size,
        "block_nbytes": replica.block_nbytes,
    }
    return Machine(name=name, devices=replica.devices, options=options)


def machine_measured(pool: PoolBlueprint) -> Machine:
    """This machine with a pool's own executor, whose steps were measured here by `deepinfra profile` or a server.

    Enters the executor, since only then it says by what its step times are known and how much it holds. Blocks.

    Raises:
        ConfigError: Nothing was measured.
        ModelError: The executor's model cannot be used.
    """
    folder = Path(pool.scheduler.options.model_dump().get("timings") or timings_folder()).expanduser()
    # Without any file there is no need to read weights first.
    machine = anyio.run(_measured, pool.build().executor, folder) if any(folder.glob("*.json")) else None
    if machine is None:
        raise ConfigError(
            f"what steps of executor {pool.executor.entry.name!r} cost was not measured here: run `deepinfra profile`, "
            "or give figures with --cost"
        )
    return machine


async def _measured(executor: Executor, folder: Path) -> Machine | None:
    async with executor:
        predictor = StepPredictor()
        predictor.restore(Timings(folder, executor.speed).load())
        if predictor.cost is None:
            return None
        layout, limits = executor.layout, executor.limits
        options = {
            "cost": predictor.cost,
            "num_blocks": limits.num_blocks,
            "block_size": layout.block_size,
            "block_nbytes": layout.block_nbytes,
            "max_step_tokens": limits.max_step_tokens,
            "max_seqs": limits.max_seqs,
            "max_context": limits.max_context,
        }
        return Machine(name=f"measured here: {executor.speed}", options=options)


def _figures(path: Path) -> StepCost:
    """Read figures; those not named are 0."""
    try:
        told = json.loads(path.read_text())
        told = told.get("cost", told)
        figures = {name: float(value) for name, value in told.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a JSON object of seconds: {error}") from error
    if unknown := figures.keys() - set(StepCost._fields):
        raise ConfigError(f"{path}: unknown figure {min(unknown)!r}; known: {', '.join(StepCost._fields)}")
    if wrong := next((name for name, value in figures.items() if not 0.0 <= value < float("inf")), None):
        raise ConfigError(f"{path}: {wrong} must be seconds, at least 0, not {figures[wrong]}")
    if not any(figures.values()):
        raise ConfigError(f"{path}: no figure is above 0, so that steps would take no time")
    return StepCost(**figures)
