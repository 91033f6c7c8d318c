"""Fixtures that every test may use."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deepinfra.config.openmp import calm_openmp

if TYPE_CHECKING:
    from deepinfra_kernels.library import Library

calm_openmp()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every test that waits runs on both backends."""
    backend: str = request.param
    return backend


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """A store that is late is a miss; on a loaded machine that would be any. Tests of late ones say what is late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepinfra.engine.pool._MATCH_TIMEOUT_S", 30.0)
        patch.setattr("deepinfra.engine.explain._LOOK_TIMEOUT_S", 30.0)
        patch.setattr("deepinfra.kvstores.tiered.guard.MATCH_S", 30.0)
        patch.setattr("deepinfra.kvstores.ssd.store.LOOK_S", 30.0)
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2 GGUF file, fetched once; `TEST_MODELS_FOLDER` names another cache folder than the user's."""
    from deepinfra.models import pull

    folder = os.environ.get("TEST_MODELS_FOLDER")
    return pull("smollm2", cache_dir=Path(folder) if folder else None)


@pytest.fixture(scope="session")
def kernels() -> Callable[[str], Library]:
    """Loads a path's library of deepinfra-kernels; built once for each state of its sources."""
    from deepinfra_kernels.library import load

    from deepinfra.models.cache import kernel_cache_dir

    return functools.cache(lambda path: load(path, kernel_cache_dir()))


@dataclass(frozen=True, slots=True)
class Outside:
    """A place where the package is used from outside: an own folder and home, models and kernels found, plug-ins.

    Attributes:
        folder: Where commands run.
        environ: Their environment: nothing of `DEEPINFRA_…` but what a test adds.
        site: Where `install` puts what pip would put into site-packages.
    """

    folder: Path
    environ: dict[str, str]
    site: Path

    def install(self, project: Path) -> None:
        """What `pip install -e PROJECT` does, for this environment alone."""
        about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        info = self.site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
        lines: list[str] = []
        for group, points in about["entry-points"].items():
            lines += [f"[{group}]", *(f"{name} = {module}" for name, module in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        self.environ["PYTHONPATH"] = os.pathsep.join((str(project), self.environ.get("PYTHONPATH") or str(self.site)))

    def run(self, *command: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture(scope="session")
def make_outside(smollm2_path: Path) -> Callable[[Path], Outside]:
    from deepinfra.models.cache import kernel_cache_dir

    def make(root: Path) -> Outside:
        folder, cache, site = root / "folder", root / "cache", root / "site"
        for each in (folder, cache / "deepinfra", site, root / "home"):
            each.mkdir(parents=True)
        models = next(parent for parent in smollm2_path.parents if (parent / ".locks").exists())
        (cache / "deepinfra" / "models").symlink_to(models)
        built = kernel_cache_dir()  # else every place would build its own, for half a minute
        built.mkdir(parents=True, exist_ok=True)
        (cache / "deepinfra" / "kernels").symlink_to(built)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPINFRA_", "PYTHON"))}
        environ |= {
            "HOME": str(root / "home"),
            "XDG_CACHE_HOME": str(cache),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), environ.get("PATH", ""))),
            "COLUMNS": "120",
        }
        return Outside(folder, environ, site)

    return make


@pytest.fixture
def outside(tmp_path: Path, make_outside: Callable[[Path], Outside]) -> Outside:
    """See `Outside`; a fresh one."""
    return make_outside(tmp_path)
