"""Every value in effect is explained."""

from __future__ import annotations

from deepinfra.config import read_settings, resolve
from deepinfra.config.explain import Value, explain
from deepinfra.registry import load_plugins

TOY = {"pool": {"executor": {"use": "toy", "num_blocks": 9}, "store": {"use": "none"}}}


def explained(keywords: dict[str, object], environ: dict[str, str] | None = None) -> dict[str, Value]:
    settings, provenance = read_settings(keywords=keywords, environ=environ or {})
    return {value.name: value for value in explain(resolve(settings, load_plugins(), provenance))}


def test_the_settings_and_every_option_of_every_part_are_there() -> None:
    registry = load_plugins()
    names = set(explained({}))
    parts = {"recipe": registry.recipes["chat-template"], "pool.scheduler": registry.schedulers["bucketed"]}
    parts |= {"pool.executor": registry.executors["torch"], "pool.store": registry.kvstores["ssd"]}
    for at, entry in parts.items():
        assert {f"{at}.use"} | {f"{at}.{name}" for name in entry.options.model_fields} <= names
    top = {"model", "name", "host", "port", "client_timeout_s", "drain_deadline_s", "api.max_body_nbytes"}
    assert top | {"pool.executor.process", "pool.speculator.use", "pool.placer.use"} <= names


def test_every_value_says_what_it_means() -> None:
    assert [value.name for value in explained({}).values() if not value.about] == []


def test_a_value_that_follows_from_another_says_so() -> None:
    values = explained({"model": "org/other"})
    assert values["pool.executor.model"] == Value(
        "pool.executor.model", "org/other", "from model", values["pool.executor.model"].about
    )
    assert (values["name"].value, values["name"].origin) == ("org/other", "from model")


def test_a_part_that_was_left_out_says_who_left_it_out() -> None:
    values = explained(TOY, {"DEEPINFRA_POOL__SPECULATOR__USE": "none"})
    assert (values["pool.store.use"].value, values["pool.store.use"].origin) == ("none", "keyword")
    assert values["pool.speculator.use"].origin == "environment DEEPINFRA_POOL__SPECULATOR__USE"


def test_a_split_server_explains_each_pool() -> None:
    pool = {"executor": {"use": "toy"}}
    values = explained({"prefill": [pool], "decode": [pool, pool | {"scheduler": {"use": "fcfs"}}]})
    assert values["decode.0.scheduler.use"].value == "bucketed"
    assert (values["decode.1.scheduler.use"].value, values["decode.1.scheduler.use"].origin) == ("fcfs", "keyword")
    assert not any(name.startswith("pool.") for name in values)
