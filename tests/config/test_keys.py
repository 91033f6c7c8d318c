"""API keys from files and the environment; no message and no listing ever shows one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from deepinfra import ApiKey, from_toml
from deepinfra.config import keys_of, read_keys, read_settings, resolve
from deepinfra.config.explain import explain
from deepinfra.errors import ConfigError
from deepinfra.registry import load_plugins

SECRET = "sk-ann-0123456789"
DIGEST = hashlib.sha256(b"sk-bob-0123456789").hexdigest()


def file(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def of_environment(text: str) -> tuple[ApiKey, ...] | None:
    settings, _ = read_settings(environ={"DEEPINFRA_API_KEYS": text})
    return keys_of(settings)


def test_a_file_holds_keys_or_their_digests_with_tenants_and_limits(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        f"""
        [[key]]
        name = "ann"
        key = "{SECRET}"

        [[key]]
        name = "bob"
        key_sha256 = "{DIGEST}"
        tenant = "team"
        requests_per_minute = 60
        max_concurrent = 4
        """,
    )
    ann, bob = read_keys(path)
    assert ann == ApiKey.of(SECRET, name="ann")
    assert (ann.tenant, ann.requests_per_minute, ann.max_concurrent) == ("ann", None, None)
    assert bob == ApiKey.of("sk-bob-0123456789", name="bob", tenant="team", requests_per_minute=60, max_concurrent=4)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "key: Field required"),
        ("key = []", "key: List should have at least 1 item"),
        (f'[[key]]\nkey = "{SECRET}"', "key.0.name: Field required"),
        (f'[[key]]\nname = "a b"\nkey = "{SECRET}"', "key.0.name: String should match"),
        (f'[[key]]\nname = "a"\nkey = "{SECRET}"\nkey_sha256 = "{DIGEST}"', "key.0: give either key or key_sha256"),
        ('[[key]]\nname = "a"', "key.0: give either key or key_sha256"),
        ('[[key]]\nname = "a"\nkey = "short"', "key.0: key has 16 to 512 visible ASCII characters"),
        (f'[[key]]\nname = "a"\nkey = "{SECRET} "', "key.0: key has 16 to 512 visible ASCII characters"),
        (f'[[key]]\nname = "a"\nkey_sha256 = "{SECRET}"', "key.0.key_sha256: String should match"),
        (f'[[key]]\nname = "a"\nkey = "{SECRET}"\nlimit = 3', "key.0.limit: Extra inputs are not permitted"),
        (
            f'[[key]]\nname = "a"\nkey = "{SECRET}"\nrequests_per_minute = 0',
            "key.0.requests_per_minute: Input should be greater than or equal to 1",
        ),
        (f'[[key]]\nname = "a"\nkey = "{SECRET}"\n[[key]]\nname = "b"\nkey = "{SECRET}"', "'a' and 'b' are one"),
        (f'[[key]]\nname = "a"\nkey = "{SECRET}"\n[[key]]\nname = "a"\nkey_sha256 = "{DIGEST}"', "are one"),
        (f'[[key]]\nname = "a"\nkey = "{SECRET}', "is no TOML file"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_shows_no_key(tmp_path: Path, text: str, sentence: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file of API keys"):
        read_keys(tmp_path / "nowhere.toml")


def test_the_environment_lists_keys_with_or_without_tenants() -> None:
    assert of_environment(f"{SECRET}, team:sk-bob-0123456789") == (
        ApiKey.of(SECRET, name="key-1"),
        ApiKey.of("sk-bob-0123456789", name="team-2", tenant="team"),
    )


@pytest.mark.parametrize("text", ["", "short", f"{SECRET},", f"a b:{SECRET}", f"{SECRET},{SECRET}"])
def test_a_wrong_list_is_one_sentence_that_shows_no_key(text: str) -> None:
    with pytest.raises(ConfigError, match="api_keys") as caught:
        of_environment(text)
    assert SECRET not in str(caught.value)


def test_without_either_nobody_is_asked_for_a_key() -> None:
    settings, _ = read_settings(environ={})
    assert keys_of(settings) is None


def test_file_and_environment_add_up(tmp_path: Path) -> None:
    path = file(tmp_path, f'[[key]]\nname = "bob"\nkey_sha256 = "{DIGEST}"')
    environ = {"DEEPINFRA_API_KEYS": SECRET, "DEEPINFRA_API__KEYS_FILE": str(path)}
    keys = keys_of(read_settings(environ=environ)[0])
    assert [key.name for key in keys or ()] == ["bob", "key-1"]


def test_no_listing_shows_a_key() -> None:
    settings, provenance = read_settings(environ={"DEEPINFRA_API_KEYS": SECRET})
    values = explain(resolve(settings, load_plugins(), provenance))
    (value,) = [value for value in values if value.name == "api_keys"]
    assert (value.value, value.origin) == ("**********", "environment DEEPINFRA_API_KEYS")
    assert SECRET not in repr(values) + repr(settings) + str(settings) + settings.model_dump_json()


def test_an_engine_that_would_ask_for_no_key_is_not_made_of_settings_with_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deepinfra.toml"
    path.write_text('api.keys_file = "keys.toml"')
    with pytest.raises(ConfigError, match=r"asgi\(engine, keys=read_keys\('keys.toml'\)\)"):
        from_toml(path)
    path.write_text("")
    monkeypatch.setenv("DEEPINFRA_API_KEYS", SECRET)
    with pytest.raises(ConfigError, match="an engine asks for no API keys"):
        from_toml(path)


@pytest.mark.parametrize("origin", ["*", "https://*.example.com", "chat.example.com", "https://example.com/path"])
def test_a_web_origin_is_named_in_full(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"api.cors_origins.0"):
        read_settings(keywords={"api": {"cors_origins": [origin]}}, environ={})
