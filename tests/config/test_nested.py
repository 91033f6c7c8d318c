"""Stores made of stores: the settings of each are its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfra.config import Blueprint, read_settings, resolve
from deepinfra.config.explain import explain
from deepinfra.config.folders import kv_folder
from deepinfra.errors import ConfigError, UnknownComponentError
from deepinfra.kvstores import MemoryStore, SsdStore, TieredStore
from deepinfra.registry import Registry, load_plugins

HEAD = '[pool.executor]\nuse = "toy"\n[pool.store]\nuse = "tiered"\n'
TWO = """[[pool.store.tiers]]
use = "memory"
capacity_nbytes = 2_000_000
[[pool.store.tiers]]
use = "ssd"
write = { default = "second-touch" }
"""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_plugins()


def blueprint(registry: Registry, folder: Path, text: str, environ: dict[str, str] | None = None) -> Blueprint:
    (folder / "d.toml").write_text(HEAD + text)
    settings, provenance = read_settings(folder / "d.toml", environ=environ or {})
    return resolve(settings, registry, provenance)


def built(plan: Blueprint) -> TieredStore:
    assert plan.pool is not None
    assert plan.pool.store is not None
    store = plan.pool.store.build()
    assert isinstance(store, TieredStore)
    return store


def test_tiers_are_built_with_their_own_options(registry: Registry, tmp_path: Path) -> None:
    memory, disk = built(blueprint(registry, tmp_path, TWO)).tiers
    assert isinstance(memory.store, MemoryStore)
    assert memory.store.capacity_nbytes == 2_000_000
    assert isinstance(disk.store, SsdStore)
    assert disk.store.path == kv_folder()
    assert disk.write == {"default": "second-touch", "agent": "all", "chat": "all"}


def test_without_tiers_it_is_ram_before_a_disk(registry: Registry, tmp_path: Path) -> None:
    tiers = built(blueprint(registry, tmp_path, "drain_s = 1.0\n")).tiers
    assert [type(tier.store) for tier in tiers] == [MemoryStore, SsdStore]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('use = "ssd"', 'use = "ssd"\npth = "x"', r"unknown setting pool.store.tiers.1.pth; .*'path'.*d.toml:10"),
        ("2_000_000", "0", r"pool.store.tiers.0.capacity_nbytes: input should be greater than 0 .*d.toml:7"),
        ("second-touch", "third", r"pool.store.tiers.1.write.default: 'third' is none of 'all', .*d.toml:10"),
        ('use = "memory"', "", r"pool.store.tiers.0.use: field required"),
        ('use = "memory"', 'use = "memory"\nwrite = "second-touch"', r"tiers.0.write: the first tier takes every"),
    ],
)
def test_a_wrong_key_of_a_tier_is_named(registry: Registry, tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        blueprint(registry, tmp_path, TWO.replace(old, new))


def test_an_unknown_tier_is_named_with_its_place(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(UnknownComponentError, match=r"'sdd'; known: .*ssd, tiered \(pool.store.tiers.1.use, .*:9\)"):
        blueprint(registry, tmp_path, TWO.replace('"ssd"', '"sdd"'))


def test_explain_tells_what_was_written_of_a_tier_and_what_is_its_default(registry: Registry, tmp_path: Path) -> None:
    values = {value.name: value for value in explain(blueprint(registry, tmp_path, TWO), ask_parts=True)}
    assert values["pool.store.tiers.0.capacity_nbytes"].origin == f"{tmp_path}/d.toml:7"
    assert values["pool.store.tiers.1.capacity_nbytes"].origin == "default of ssd"
    assert values["pool.store.tiers.1.path"].value == str(kv_folder())
    assert values["pool.store.tiers.0.write"].origin == "default of tiered"
    assert "pool.store.tiers" not in values


def test_the_environment_may_list_tiers_as_json(registry: Registry, tmp_path: Path) -> None:
    environ = {"DEEPINFRA_POOL__STORE__TIERS": '[{"use": "memory", "capacity_nbytes": 5}]'}
    (tier,) = built(blueprint(registry, tmp_path, TWO, environ)).tiers
    assert isinstance(tier.store, MemoryStore)
    assert tier.store.capacity_nbytes == 5
