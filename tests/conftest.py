"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# OpenMP threads that spin while another process has their core turn a 10 ms step into a second; see
# docs/design/decisions. Must be set before anything loads torch.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every test that waits runs on both backends."""
    backend: str = request.param
    return backend


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2 GGUF file, fetched once; `DEEPINFRA_TEST_MODELS` names another cache folder than the user's."""
    from deepinfra.models import pull

    folder = os.environ.get("DEEPINFRA_TEST_MODELS")
    return pull("smollm2", cache_dir=Path(folder) if folder else None)
