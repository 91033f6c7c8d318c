"""Fixtures that every test may use."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every test that waits runs on both backends."""
    backend: str = request.param
    return backend
