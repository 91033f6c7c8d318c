"""Limits of tenants in a configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfra.config import Blueprint, read_settings, resolve
from deepinfra.config.explain import explain
from deepinfra.core.ids import SeqId
from deepinfra.core.step import Job
from deepinfra.errors import ConfigError, TenantFullError
from deepinfra.registry import load_plugins

HEAD = '[pool.executor]\nuse = "toy"\n\n[pool.scheduler]\nuse = "{use}"\n'
BOTH = pytest.mark.parametrize("use", ["bucketed", "fcfs"])


def blueprint(tmp_path: Path, text: str, use: str = "bucketed", **environ: str) -> Blueprint:
    path = tmp_path / "deepinfra.toml"
    path.write_text(HEAD.format(use=use) + text)
    settings, provenance = read_settings(path, environ=environ)
    return resolve(settings, load_plugins(), provenance)


@BOTH
def test_what_the_file_allows_a_tenant_is_what_it_may_have(tmp_path: Path, use: str) -> None:
    text = '[pool.scheduler.tenants.team]\nmax_queue = 2\n[pool.scheduler.tenants."*"]\nmax_queue = 1\n'
    pool = blueprint(tmp_path, text, use).pool
    assert pool is not None
    scheduler = pool.scheduler.build()
    scheduler.add(Job(SeqId(1), 10, 0, 1, 0.0, "team"))
    scheduler.add(Job(SeqId(2), 10, 0, 1, 0.0, "team"))
    scheduler.add(Job(SeqId(3), 10, 0, 1, 0.0, "other"))
    for tenant in ("team", "other"):
        with pytest.raises(TenantFullError):
            scheduler.add(Job(SeqId(4), 10, 0, 1, 0.0, tenant))


@BOTH
def test_explain_has_a_line_for_each_limit_of_each_tenant(tmp_path: Path, use: str) -> None:
    text = "[pool.scheduler.tenants.team]\nweight = 2\n"
    values = {value.name: value for value in explain(blueprint(tmp_path, text, use))}
    weight, running = (values[f"pool.scheduler.tenants.team.{name}"] for name in ("weight", "max_running"))
    assert (weight.value, weight.origin) == (2.0, f"{tmp_path}/deepinfra.toml:7")
    assert (running.value, running.origin) == (None, f"default of {use}")
    assert all(value.about for value in values.values())


def test_the_environment_sets_one_too(tmp_path: Path) -> None:
    made = blueprint(tmp_path, "", DEEPINFRA_POOL__SCHEDULER__TENANTS__TEAM__MAX_RUNNING="3")
    values = {value.name: value.value for value in explain(made)}
    assert values["pool.scheduler.tenants.team.max_running"] == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[pool.scheduler.tenants.team]\nmax_que = 2\n",
            r"unknown .*scheduler\.tenants\.team\.max_que; .*'max_queue'.*:7",
        ),
        ('[pool.scheduler.tenants."*"]\nmax_running = 0\n', r"pool\.scheduler\.tenants\.\*\.max_running: .*:7"),
        ("[pool.scheduler.tenants]\nteam = 3\n", r"pool\.scheduler\.tenants\.team: should be a table"),
        ('[pool.scheduler.tenants."a b"]\nweight = 1\n', r"pool\.scheduler\.tenants\.a b: .*pattern"),
    ],
)
def test_what_is_wrong_is_named_with_where_it_stands(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        blueprint(tmp_path, text)
