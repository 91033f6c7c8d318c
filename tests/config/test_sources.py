"""Keywords over environment over file over defaults; every value knows where it was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.config.settings import ServerSettings
from deepinfra.config.sources import Tree, read_settings
from deepinfra.errors import ConfigError

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = Path("deepinfra.toml")
        path.write_text(text)
        return path

    return write


def refused(path: Path | None = None, environ: dict[str, str] | None = None, keywords: Tree | None = None) -> str:
    with pytest.raises(ConfigError) as info:
        read_settings(path, environ=environ or {}, keywords=keywords)
    return str(info.value)


def test_without_sources_everything_is_a_default() -> None:
    settings, provenance = read_settings(environ={})
    assert settings == ServerSettings()
    assert provenance.of(("pool", "store", "use")) is None


LAYERS = ("file", "environment", "keyword")


@given(st.sets(st.sampled_from(LAYERS)))
def test_the_strongest_source_wins(tmp_path_factory: pytest.TempPathFactory, present: set[str]) -> None:
    path = tmp_path_factory.mktemp("settings") / "deepinfra.toml"
    path.write_text("port = 1" if "file" in present else "")
    environ = {"DEEPINFRA_PORT": "2"} if "environment" in present else {}
    settings, provenance = read_settings(path, environ=environ, keywords={"port": 3} if "keyword" in present else {})
    winner = max((LAYERS.index(name) for name in present), default=-1)
    assert settings.port == (8000, 1, 2, 3)[winner + 1]
    assert provenance.of(("port",)) == (None, f"{path}:1", "environment DEEPINFRA_PORT", "keyword")[winner + 1]


def test_defaults_of_a_command_are_weaker_than_the_file(write: Write) -> None:
    defaults = {"port": 1, "host": "::1"}
    settings, provenance = read_settings(write("port = 2"), defaults=defaults, environ={})
    assert (settings.port, settings.host) == (2, "::1")
    assert provenance.of(("host",)) == "default of this command"


def test_a_part_keeps_keys_from_several_sources(write: Write) -> None:
    path = write('[pool.scheduler]\nuse = "fcfs"\nmax_queue = 5')
    settings, _ = read_settings(path, environ={"DEEPINFRA_POOL__SCHEDULER__OTHER": "7"})
    assert settings.pool.scheduler.model_extra == {"max_queue": 5, "other": "7"}


def test_another_part_from_a_stronger_source_does_not_get_the_old_parts_keys(write: Write) -> None:
    path = write('[pool.store]\nuse = "ssd"\npath = "/kv"')
    settings, _ = read_settings(path, environ={"DEEPINFRA_POOL__STORE__USE": "memory"})
    assert settings.pool.store.model_dump() == {"use": "memory"}


def test_where_an_executor_runs_outlives_another_choice_of_executor(write: Write) -> None:
    path = write('[pool.executor]\nuse = "torch"\nprocess = false\nthreads = 2')
    settings, _ = read_settings(path, environ={"DEEPINFRA_POOL__EXECUTOR__USE": "toy"})
    assert settings.pool.executor.model_dump() == {"use": "toy", "process": False}


def test_the_same_part_from_a_stronger_source_keeps_its_keys(write: Write) -> None:
    path = write('[pool.store]\nuse = "ssd"\npath = "/kv"')
    settings, _ = read_settings(path, environ={"DEEPINFRA_POOL__STORE__USE": "ssd"})
    assert settings.pool.store.model_dump() == {"use": "ssd", "path": "/kv"}


def test_an_environment_value_may_be_json() -> None:
    environ = {"DEEPINFRA_PREFILL": '[{"scheduler": {"use": "fcfs"}}]', "DEEPINFRA_DECODE": "[{}]"}
    settings, _ = read_settings(environ=environ)
    assert [pool.scheduler.use for pool in settings.prefill] == ["fcfs"]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("DEEPINFRA_MODLE", "x", "unknown setting modle; did you mean 'model'? (environment DEEPINFRA_MODLE)"),
        ("DEEPINFRA_API__SIZE", "1", "unknown setting api.size; known: max_body_nbytes, max_n, keepalive_s"),
        ("DEEPINFRA_POOL__SCHEDULR__USE", "x", "unknown setting pool.schedulr; did you mean 'scheduler'?"),
        ("DEEPINFRA_PORT", "eighty", "port: input should be a valid integer"),
        ("DEEPINFRA_PORT", "70000", "port: input should be less than or equal to 65535"),
        ("DEEPINFRA_PREFILL", "[{]", "environment DEEPINFRA_PREFILL is not JSON"),
        ("DEEPINFRA_PREFILL", "[{}]", "a split server needs both `prefill` and `decode` pools"),
        ("DEEPINFRA_", "x", "unknown setting"),
    ],
)
def test_a_wrong_environment_value_is_named(name: str, value: str, sentence: str) -> None:
    assert sentence in refused(environ={name: value})


def test_names_of_others_in_the_environment_are_ignored() -> None:
    settings, _ = read_settings(environ={"PORT": "1", "deepinfra_port": "2", "DEEPINFRAX": "3"})
    assert settings.port == 8000


def test_a_table_and_a_value_of_one_name_contradict_each_other() -> None:
    environ = {"DEEPINFRA_POOL": "x", "DEEPINFRA_POOL__STORE__USE": "none"}
    assert "DEEPINFRA_POOL__STORE__USE contradicts environment DEEPINFRA_POOL" in refused(environ=environ)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('\n\nmodle = "x"', "unknown setting modle; did you mean 'model'? (deepinfra.toml:3)"),
        ("[pool.schedulr]\nuse = 'x'", "unknown setting pool.schedulr; did you mean 'scheduler'? (deepinfra.toml:1)"),
        ("[api]\n# limits\nkeepalive_s = 0", "api.keepalive_s: input should be greater than 0 (deepinfra.toml:3)"),
        ("[[prefill]]\n[[prefill]]\nx = 1", "unknown setting prefill.1.x; known: scheduler, executor, store"),
        ("[[prefill]]\n[[prefill]]\nx = 1", "(deepinfra.toml:3)"),
        ("pool = 'x'", "pool: should be a table (deepinfra.toml:1)"),
        ("port = ", "deepinfra.toml cannot be read: Invalid value (at end of document)"),
        ("[pool.scheduler]\nmax_queue = 1\n[[prefill]]\n[[decode]]", "give either `pool`, or `prefill` and `decode`"),
    ],
)
def test_a_wrong_file_is_refused_with_the_line(write: Write, text: str, sentence: str) -> None:
    assert sentence in refused(write(text))


def test_a_file_that_is_not_there_is_refused() -> None:
    assert refused(Path("missing.toml")) == "there is no configuration file missing.toml"


def test_a_split_server_has_no_pool_and_no_stores_by_default(write: Write) -> None:
    settings, _ = read_settings(write("[[prefill]]\n[[decode]]"), environ={})
    assert "pool" not in settings.model_fields_set
    assert {pool.store.use for pool in (*settings.prefill, *settings.decode)} == {"none"}
