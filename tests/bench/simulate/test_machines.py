from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from deepinfra.bench.simulate import generated, simulate
from deepinfra.bench.simulate.configured import Fleet, configured
from deepinfra.bench.simulate.machines import Machine, machine_measured, machine_named
from deepinfra.bench.simulate.traces import LengthClass
from deepinfra.config import Blueprint, ServerSettings, resolve
from deepinfra.core.cost import Sample, StepCost, StepWork
from deepinfra.errors import ConfigError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.registry import load_plugins
from deepinfra.schedulers.timings import Timings

COST = StepCost(step=0.01, chunk_token=1e-4, decode_row=2e-4)


def blueprint(timings: Path, **scheduler: object) -> Blueprint:
    pool = {
        "executor": {"use": "toy", "process": False, "num_blocks": 64},
        "scheduler": {"use": "bucketed", "timings": str(timings), **scheduler},
        "store": {"use": "memory"},
    }
    return resolve(ServerSettings.model_validate({"pool": pool}), load_plugins())


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A folder with what steps of the toy were measured to take."""

    async def speed() -> str:
        async with ToyExecutor(num_blocks=64) as executor:
            return executor.speed

    works = [StepWork(n * 50, 0.0, 0, 0.0, 0) for n in range(1, 9)] + [StepWork(0, 0.0, n, 0.0, 0) for n in range(1, 9)]
    Timings(tmp_path, anyio.run(speed)).save(COST, [Sample(work, COST.seconds(work)) for work in works])
    return tmp_path


def test_steps_cost_what_was_measured_of_the_configured_executor(measured: Path) -> None:
    pool = blueprint(measured).pool
    assert pool is not None
    machine = machine_measured(pool)
    cost = machine.options["cost"]
    assert isinstance(cost, StepCost)
    assert cost.seconds(StepWork(chunk_tokens=200)) == pytest.approx(0.03, rel=0.1)
    assert machine.options["num_blocks"] == 64


def test_a_simulation_neither_reads_nor_writes_measured_times(measured: Path) -> None:
    before = {path: path.read_bytes() for path in measured.iterdir()}
    setup = configured(blueprint(measured), name="x")
    result = simulate(generated(10, 5.0, [LengthClass(1.0, 40, 4)]), setup)
    assert [row.outcome for row in result.requests] == ["length"] * 10
    assert {path: path.read_bytes() for path in measured.iterdir()} == before


def test_a_configuration_tells_what_it_is_in_words(tmp_path: Path) -> None:
    machine = Machine(name="mine", devices=4, options={"cost": COST})
    setup = configured(blueprint(tmp_path, max_overtakes=3), name="x", machine=machine, fleet=Fleet(pools=2))
    assert (setup.devices, setup.pool_names) == (8, ("pool-0", "pool-1"))
    assert setup.settings == {
        "pools": "2 replicas",
        "scheduler": "bucketed max_overtakes=3",
        "store": "memory",
        "speculator": "none",
        "steps cost": "mine",
    }


def test_devices_and_a_model_say_how_much_fits() -> None:
    machine = machine_named("h100x8/llama-70b")
    assert machine.devices == 8
    assert set(machine.options) == {"cost", "num_blocks", "block_size", "block_nbytes"}


def test_a_file_that_is_not_there_is_told_by_name() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.json"):
        machine_named("nothing.json")


def test_without_measured_times_there_is_no_machine(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="executor 'toy' cost was not measured here"):
            configured(blueprint(folder), name="x")
    (tmp_path / "another.json").write_text("{}")
    with pytest.raises(ConfigError, match="was not measured here"):
        configured(blueprint(tmp_path), name="x")
