"""Which kernels run, which weights, and what is said about it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepinfra_kernels import build, cpu

from deepinfra.errors import ConfigError
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.machine import usable_cores
from deepinfra.testing.host import Host

PROMPT = [5, 9, 200, 31, 77, 6, 1, 300, 12]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def broken(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that do not compile, on a machine with a compiler."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "library.cpp").write_text("#error this compiler is too old\n")
    monkeypatch.setattr(build, "_SOURCES", tmp_path / "csrc")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was warned about that is no notice of a build."""

    def said() -> list[str]:
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        return [line for line in caplog.messages if not line.startswith("building")]

    return said


async def text(executor: TorchExecutor) -> list[int]:
    async with executor:
        host = Host(executor)
        return await host.generate(host.line(PROMPT), 6)


def test_torch_says_why_its_weights_are_dense(made: Any) -> None:
    path = str(made("llama-wide")[0])
    left = TorchExecutor(path, num_blocks=24, kernels="torch")
    told = TorchExecutor(path, num_blocks=24, kernels="torch", weights="dense")
    assert left.explain()["weights"] == "dense: torch multiplies decoded weights only"
    assert told.explain()["weights"] == "dense: as configured"


async def test_a_build_that_fails_is_one_warning_and_the_same_text(
    made: Any, broken: None, warnings: Callable[[], list[str]]
) -> None:
    path = str(made("llama-wide")[0])
    expected = await text(TorchExecutor(path, dtype="float32", num_blocks=24, kernels="torch"))
    assert warnings() == []
    executor = TorchExecutor(path, dtype="float32", num_blocks=24)
    assert await text(executor) == expected
    (line,) = warnings()
    assert "torch computes" in line
    assert "this compiler is too old" in line


async def test_explain_and_speed_say_inside_what_really_runs(made: Any, broken: None) -> None:
    executor = TorchExecutor(str(made("llama-wide")[0]), num_blocks=24)
    assert executor.explain()["kernels"] == f"{cpu.paths()[0]}: the best that this CPU runs"
    async with executor:
        assert executor.explain()["kernels"].startswith("torch: the")
        assert "too old" in executor.explain()["kernels"]
        assert "kernels torch weights dense" in executor.speed
        assert executor.computing.path == "torch"
    assert executor.explain()["kernels"].startswith(cpu.paths()[0])


async def test_kv_of_the_form_that_really_computes_is_named_inside(mixed: Path, broken: None) -> None:
    executor = TorchExecutor(str(mixed), num_blocks=24)
    assert executor.identity.numerics == "ordinary stored"
    async with executor:
        assert executor.identity.numerics == "ordinary dense"
    assert executor.identity.numerics == "ordinary stored"


async def test_kernels_that_were_asked_for_and_cannot_be_built_are_an_error(
    made: Any, broken: None, path_of_kernels: str
) -> None:
    executor = TorchExecutor(str(made("llama-wide")[0]), num_blocks=24, kernels=path_of_kernels)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"(?s)kernels = {path_of_kernels} cannot run.*too old"):
        async with executor:
            pass


async def test_stored_weights_that_were_asked_for_need_kernels(mixed: Path, broken: None) -> None:
    executor = TorchExecutor(str(mixed), num_blocks=24, weights="stored")
    with pytest.raises(ConfigError, match="weights = stored needs kernels"):
        async with executor:
            pass
    with pytest.raises(ConfigError, match="weights = stored needs kernels"):
        TorchExecutor(str(mixed), kernels="torch", weights="stored")


async def test_without_a_compiler_torch_computes_and_says_so(
    made: Any, elsewhere: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfra_kernels.build._COMPILERS", ("no-such-program",))
    path = str(made("llama-wide")[0])
    executor = TorchExecutor(path, dtype="float32", num_blocks=24)
    assert "no-such-program is not installed" in executor.explain()["kernels"]
    await text(executor)
    (line,) = warnings()
    assert line.count("no-such-program is not installed") == 1
    with pytest.raises(ConfigError, match=r"kernels = avx2 .*no-such-program"):
        TorchExecutor(path, kernels="avx2")


def test_the_number_of_threads_is_told_also_where_none_was_asked_for(made: Any) -> None:
    path = str(made("llama-wide")[0])
    assert TorchExecutor(path, threads=3).explain()["threads"] == "3"
    assert TorchExecutor(path).explain()["threads"] == str(usable_cores())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt-oss", "mixtures of experts"),
        ("gemma3", "layers of different windows"),
        ("qwen2-windows", "layers of different windows"),
        ("llama", "heads of size 8"),
    ],
)
async def test_a_model_that_kernels_do_not_compute_is_computed_by_torch(
    made: Any, name: str, why: str, warnings: Callable[[], list[str]]
) -> None:
    path = str(made(name)[0])
    executor = TorchExecutor(path, num_blocks=24)
    assert why in executor.explain()["kernels"]
    await text(executor)
    (line,) = warnings()
    assert why in line
    with pytest.raises(ConfigError, match=f"kernels = avx2 cannot run: .*{why}"):
        TorchExecutor(path, kernels="avx2")


async def test_a_path_that_the_cpu_lacks_is_refused_or_left_out(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "why_not", lambda path: "this CPU lacks avx512f" if path == "avx512" else "")
    path = str(made("llama-wide")[0])
    assert TorchExecutor(path).explain()["kernels"].startswith("avx2")
    with pytest.raises(ConfigError, match="kernels = avx512 cannot run: this CPU lacks avx512f"):
        TorchExecutor(path, kernels="avx512")


def test_weights_in_blocks_stay_so_unless_told_otherwise(mixed: Path, made: Any, path_of_kernels: str) -> None:
    settings: dict[str, Any] = {"kernels": path_of_kernels, "dtype": "float32", "num_blocks": 24}
    stored, dense = TorchExecutor(str(mixed), **settings), TorchExecutor(str(mixed), **settings, weights="dense")
    assert stored.explain()["weights"] == "stored: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 times activations of 8 bits"
    assert dense.explain()["weights"] == "dense: as configured"
    assert stored.memory_plan().weights_nbytes < dense.memory_plan().weights_nbytes / 2
    plain = str(made("llama-wide")[0])
    assert TorchExecutor(plain, **settings).explain()["weights"] == "dense: the model's matrices are F32"
    with pytest.raises(ConfigError, match="weights = stored: the model's matrices are F32"):
        TorchExecutor(plain, **settings, weights="stored")


async def test_executors_that_compute_differently_say_so(mixed: Path, path_of_kernels: str) -> None:
    settings: dict[str, Any] = {"kernels": path_of_kernels, "num_blocks": 24}
    stored, dense = TorchExecutor(str(mixed), **settings), TorchExecutor(str(mixed), **settings, weights="dense")
    assert stored.identity._replace(numerics="ordinary dense") == dense.identity
    assert stored.identity != dense.identity
    assert stored.speed != dense.speed
    assert f"kernels {path_of_kernels} weights stored" in stored.speed
    async with stored:
        assert stored.computing[1:3] == ("stored", path_of_kernels)
        assert stored.computing.kernels
