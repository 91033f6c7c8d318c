"""Plug-ins register through one door; whoever misuses it is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, ConfigDict

from deepinfra.errors import PluginConflictError, PluginError, UnknownComponentError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.registry import Registry, hookimpl, load_plugins


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0


def plugin(name: str, register: Callable[[Registry], None]) -> object:
    @hookimpl
    def deepinfra_register(registry: Registry) -> None:
        register(registry)

    return SimpleNamespace(__name__=name, deepinfra_register=deepinfra_register)


def with_executor(name: str) -> Callable[[Registry], None]:
    return lambda registry: registry.executor(name, lambda o: ToyExecutor(seed=o.seed), options=Options)


Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution of one module, as pip would leave it on the path."""

    def install(name: str, source: str) -> None:
        folder = tmp_path / name
        info = folder / f"{name}-1.5.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[deepinfra]\n{name}_hooks = {name}\n")
        monkeypatch.syspath_prepend(folder)

    return install


REGISTERS_TOY = """
from deepinfra.executors.options import ToyOptions
from deepinfra.registry import hookimpl

@hookimpl
def deepinfra_register(registry):
    registry.executor("rival", lambda options: None, options=ToyOptions)
"""


def test_a_registered_part_is_built_from_its_options() -> None:
    registry = load_plugins(plugin("mine", with_executor("mine-toy")))
    entry = registry.executors["mine-toy"]
    assert isinstance(entry.build(entry.options(seed=3)), ToyExecutor)


def test_an_installed_plugin_is_found_with_its_distribution_and_version(install: Install) -> None:
    install("regplug_a", REGISTERS_TOY)
    origin = load_plugins().executors["rival"].origin
    assert (origin.plugin, origin.distribution, origin.version) == ("regplug_a_hooks", "regplug_a", "1.5")


def test_a_name_claimed_twice_names_both_distributions(install: Install) -> None:
    install("regplug_b", REGISTERS_TOY)
    install("regplug_c", REGISTERS_TOY)
    with pytest.raises(PluginConflictError, match=r"'rival' is registered by both regplug_b 1\.5 and regplug_c 1\.5"):
        load_plugins()


def test_one_name_may_be_taken_once_for_each_kind() -> None:
    def register(registry: Registry) -> None:
        with_executor("same")(registry)
        registry.kvstore("same", lambda o: pytest.fail("not built"), options=Options)

    registry = load_plugins(plugin("mine", register))
    assert registry.find("executor", "same").origin == registry.find("kvstore", "same").origin


def test_a_plugin_that_cannot_be_imported_is_refused_by_name(install: Install) -> None:
    install("regplug_d", "import a_module_that_is_not_there")
    with pytest.raises(PluginError, match=r"regplug_d 1\.5 cannot be loaded: ModuleNotFoundError: .*a_module_that"):
        load_plugins()


def test_a_plugin_that_fails_while_registering_is_refused_by_name(install: Install) -> None:
    install("regplug_e", REGISTERS_TOY.replace("registry.executor(", "1 / 0, registry.executor("))
    with pytest.raises(PluginError, match=r"regplug_e 1\.5 cannot be loaded: ZeroDivisionError"):
        load_plugins()


def test_a_misspelt_hook_is_refused_by_name(install: Install) -> None:
    install("regplug_f", REGISTERS_TOY.replace("deepinfra_register", "deepinfra_registr"))
    with pytest.raises(PluginError, match=r"regplug_f 1\.5.* unknown hook 'deepinfra_registr'"):
        load_plugins()


def test_a_hook_argument_that_does_not_exist_is_refused(install: Install) -> None:
    install("regplug_g", REGISTERS_TOY.replace("(registry)", "(registry, extra)"))
    with pytest.raises(PluginError, match=r"regplug_g 1\.5.*extra"):
        load_plugins()


def test_a_hook_without_its_mark_is_refused(install: Install) -> None:
    install("regplug_h", REGISTERS_TOY.replace("@hookimpl", ""))
    with pytest.raises(PluginError, match=r"regplug_h 1\.5.*deepinfra_register is not marked with @hookimpl"):
        load_plugins()


def test_a_plugin_without_hooks_is_refused() -> None:
    with pytest.raises(PluginError, match=r"'empty' .*implements no hook"):
        load_plugins(SimpleNamespace(__name__="empty"))


class Open(BaseModel):
    """Neither frozen nor closed."""


class Reserved(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    use: str = ""


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("none", Options, "a name is"),
        ("Upper", Options, "a name is"),
        ("under_score", Options, "a name is"),
        ("fine", Open, "frozen=True"),
        ("fine", Reserved, "may not have a field 'use'"),
        ("fine", dict, "must be a pydantic model"),
    ],
)
def test_a_bad_registration_says_what_is_wrong(name: str, options: type[BaseModel], why: str) -> None:
    bad = plugin("bad", lambda r: r.executor(name, lambda o: ToyExecutor(), options=options))
    with pytest.raises(PluginError, match=why):
        load_plugins(bad)


def test_registering_after_loading_is_refused() -> None:
    registry = load_plugins(plugin("mine", with_executor("mine-toy")))
    with pytest.raises(PluginError, match="inside deepinfra_register"):
        with_executor("late")(registry)


def test_an_unknown_name_lists_the_known_ones() -> None:
    registry = load_plugins(plugin("mine", with_executor("mine-toy")))
    with pytest.raises(UnknownComponentError, match=r"no executor is named 'your-toy'.*mine-toy"):
        registry.find("executor", "your-toy")


def test_registries_share_nothing() -> None:
    load_plugins(plugin("mine", with_executor("mine-toy")))
    assert "mine-toy" not in load_plugins().executors


async def application(scope: object, receive: object, send: object) -> None: ...


def mounting(name: str, path: str) -> object:
    @hookimpl
    def deepinfra_routes() -> dict[str, object]:
        return {path: application}

    return SimpleNamespace(__name__=name, deepinfra_routes=deepinfra_routes)


def test_routes_of_all_plugins_are_joined() -> None:
    registry = load_plugins(mounting("a", "/a"), mounting("b", "/b"))
    assert registry.routes(SimpleNamespace()) == {"/a": application, "/b": application}  # type: ignore[arg-type]


def test_a_path_claimed_twice_names_both_plugins() -> None:
    registry = load_plugins(mounting("a", "/x"), mounting("b", "/x"))
    with pytest.raises(PluginConflictError, match=r"'/x' is registered by both a .* and b "):
        registry.routes(SimpleNamespace())  # type: ignore[arg-type]


def test_observers_come_in_the_order_loaded() -> None:
    def watching(name: str) -> object:
        @hookimpl
        def deepinfra_observers() -> Sequence[str]:
            return (name,)

        return SimpleNamespace(__name__=name, deepinfra_observers=deepinfra_observers)

    assert load_plugins(watching("a"), watching("b")).observers() == ("a", "b")
