"""Settings to parts, without building any."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel, ConfigDict

from deepinfra.config import Blueprint, read_settings, resolve
from deepinfra.config.folders import kv_folder, timings_folder
from deepinfra.config.sources import Tree
from deepinfra.errors import ConfigError, UnknownComponentError, UnsupportedCombination
from deepinfra.executors.options import ToyOptions
from deepinfra.executors.process import ProcessExecutor
from deepinfra.executors.toy import ToyExecutor
from deepinfra.kvstores import SsdStore
from deepinfra.registry import Registry, hookimpl, load_plugins
from deepinfra.schedulers import Fcfs
from deepinfra.testing.tiny import TinyRecipe

TINY: Tree = {"recipe": {"use": "tiny"}, "pool": {"executor": {"use": "toy"}, "store": {"use": "none"}}}


class ModelOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "unset"


@pytest.fixture(scope="module")
def registry() -> Registry:
    plugin = ModuleType("tiny_plugin")

    @hookimpl
    def deepinfra_register(registry: Registry) -> None:
        registry.recipe("tiny", lambda options: TinyRecipe(), options=ModelOptions)
        registry.executor("homemade", lambda options: ToyExecutor(), options=ToyOptions)

    plugin.deepinfra_register = deepinfra_register  # type: ignore[attr-defined]
    return load_plugins(plugin)


def blueprint(registry: Registry, *trees: Tree, path: Path | None = None) -> Blueprint:
    keywords: dict[str, object] = {}
    for tree in trees:
        keywords = _joined(keywords, tree)
    settings, provenance = read_settings(path, keywords=keywords, environ={})
    return resolve(settings, registry, provenance)


def _joined(low: Tree, high: Tree) -> dict[str, object]:
    both = dict(low)
    for name, value in high.items():
        old = both.get(name)
        both[name] = _joined(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


def test_the_defaults_are_those_of_serve(registry: Registry) -> None:
    plan = blueprint(registry)
    assert plan.pool is not None
    assert plan.name == "smollm2"
    assert [part.entry.name for part in (plan.recipe, *plan.pool.parts)] == [
        "chat-template",
        "bucketed",
        "torch",
        "ssd",
    ]
    assert plan.pool.process is None


def test_the_store_of_the_defaults_is_capped_and_in_the_cache_folder(registry: Registry) -> None:
    plan = blueprint(registry)
    assert plan.pool is not None
    assert plan.pool.store is not None
    options = plan.pool.store.options.model_dump()
    assert Path(options["path"]) == kv_folder()
    assert options["capacity_nbytes"] == 10 * 2**30


def test_step_times_are_kept_in_the_cache_folder_unless_told_otherwise(registry: Registry) -> None:
    plan = blueprint(registry)
    assert plan.pool is not None
    assert plan.pool.scheduler.options.model_dump()["timings"] == str(timings_folder())
    told = blueprint(registry, {"pool": {"scheduler": {"use": "bucketed", "timings": "there"}}})
    assert told.pool is not None
    assert told.pool.scheduler.options.model_dump()["timings"] == "there"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert kv_folder() == Path("/somewhere/deepinfra/kv")


def test_parts_that_read_a_model_get_the_servers(registry: Registry) -> None:
    plan = blueprint(registry, TINY, {"model": "other/model"})
    assert plan.recipe.options == ModelOptions(model="other/model")
    assert plan.models == ("other/model",)


def test_a_part_may_read_another_model(registry: Registry) -> None:
    plan = blueprint(registry, TINY, {"recipe": {"model": "mine"}})
    assert plan.recipe.options == ModelOptions(model="mine")


@pytest.mark.parametrize(
    ("model", "name"), [("smollm2", "smollm2"), ("org/model", "org/model"), ("/nowhere/some.gguf", "some")]
)
def test_the_served_name_comes_from_the_model(registry: Registry, model: str, name: str) -> None:
    assert blueprint(registry, TINY, {"model": model}).name == name


def test_the_served_name_of_a_folder_is_its_last_part(registry: Registry, tmp_path: Path) -> None:
    assert blueprint(registry, TINY, {"model": str(tmp_path)}).name == tmp_path.name


def test_an_unknown_part_lists_the_known_ones(registry: Registry) -> None:
    with pytest.raises(UnknownComponentError, match=r"no scheduler is named 'fcsf'; known: bucketed, fcfs"):
        blueprint(registry, TINY, {"pool": {"scheduler": {"use": "fcsf"}}})


def test_a_parts_unknown_key_is_refused_with_its_place(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "deepinfra.toml"
    path.write_text('[pool.executor]\nuse = "toy"\nnum_block = 3\n')
    with pytest.raises(ConfigError, match=r"pool\.executor\.num_block; did you mean 'num_blocks'\? .*toml:3"):
        blueprint(registry, path=path)


def test_a_parts_wrong_value_is_refused(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"pool\.executor\.num_blocks: input should be greater than or equal to 1"):
        blueprint(registry, TINY, {"pool": {"executor": {"num_blocks": 0}}})


def test_a_value_that_no_member_of_a_union_takes_is_refused_in_one_sentence(registry: Registry) -> None:
    with pytest.raises(ConfigError) as refused:
        blueprint(registry, TINY, {"pool": {"executor": {"use": "torch", "num_blocks": 0}}})
    sentence = "pool.executor.num_blocks: input should be greater than or equal to 1, or 'auto' (keyword)"
    assert str(refused.value) == sentence


def test_keys_beside_none_are_refused(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"pool\.store\.path has no meaning beside use = 'none'"):
        blueprint(registry, TINY, {"pool": {"store": {"path": "/kv"}}})


def test_the_toy_runs_in_process_unless_told_otherwise(registry: Registry) -> None:
    engine = blueprint(registry, TINY).build()
    assert isinstance(engine.pools[0].executor, ToyExecutor)


def test_an_executor_moves_into_a_child_by_one_key(registry: Registry) -> None:
    engine = blueprint(registry, TINY, {"pool": {"executor": {"process": True}}}).build()
    assert isinstance(engine.pools[0].executor, ProcessExecutor)


def test_an_executor_that_is_not_installed_stays_in_process(registry: Registry) -> None:
    plan = blueprint(registry, TINY, {"pool": {"executor": {"use": "homemade"}}})
    assert plan.pool is not None
    assert not plan.pool.process


def test_an_executor_that_is_not_installed_cannot_be_forced_into_a_child(registry: Registry) -> None:
    with pytest.raises(UnsupportedCombination, match=r"'homemade' comes from tiny_plugin \(not installed\)"):
        blueprint(registry, TINY, {"pool": {"executor": {"use": "homemade", "process": True}}})


def test_a_placer_needs_an_executor_that_places(registry: Registry) -> None:
    with pytest.raises(UnsupportedCombination, match=r"placer 'eplb' needs an executor that provides 'placement'"):
        blueprint(registry, TINY, {"pool": {"placer": {"use": "eplb"}}}).build()


SPLIT: Tree = {
    "recipe": {"use": "tiny"},
    "prefill": [{"executor": {"use": "toy"}, "scheduler": {"use": "fcfs"}}],
    "decode": [{"executor": {"use": "toy"}}, {"executor": {"use": "toy"}}],
}


def test_a_split_server_gets_its_pools_by_name(registry: Registry) -> None:
    engine = blueprint(registry, SPLIT).build()
    assert [pool.name for pool in engine.pools] == ["prefill-0", "decode-0", "decode-1"]
    assert isinstance(engine.pools[0].scheduler, Fcfs)
    assert all(pool.store is None for pool in engine.pools)


def test_two_pools_may_keep_kv_in_one_folder(registry: Registry, tmp_path: Path) -> None:
    pool = {"executor": {"use": "toy"}, "store": {"use": "ssd", "path": str(tmp_path), "quotas": {"a": 1}}}
    engine = blueprint(registry, {"recipe": {"use": "tiny"}, "prefill": [pool], "decode": [pool]}).build()
    assert [pool.store.path for pool in engine.pools if isinstance(pool.store, SsdStore)] == [tmp_path, tmp_path]


def test_resolving_builds_nothing(registry: Registry) -> None:
    assert blueprint(registry, {"model": "/no/such/model"}).models == ("/no/such/model",)
