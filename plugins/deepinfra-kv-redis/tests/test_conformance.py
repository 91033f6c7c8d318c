"""The laws of a KV store, against a real server."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from deepinfra_kv_redis.store import RedisStore

from deepinfra.interfaces import KVStore
from deepinfra.testing import KVStoreConformance

pytestmark = pytest.mark.redis


class TestRedisStore(KVStoreConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def _server(self, shared_server: Any) -> None:
        self.url = shared_server.url

    def make(self, tmp_path: Path) -> KVStore:
        return RedisStore(self.url, prefix=hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16])
