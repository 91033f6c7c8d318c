"""Parts by name: what plug-ins register, and where each came from. No module-level state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, get_args

import pluggy
from pydantic import BaseModel

from deepinfra import hookspecs
from deepinfra.errors import PluginConflictError, PluginError, UnknownComponentError
from deepinfra.hookspecs import ASGIApp, Observer, hookimpl
from deepinfra.interfaces import Component, Executor, ExpertPlacer, KVStore, Recipe, Scheduler, Speculator

if TYPE_CHECKING:
    from deepinfra.engine import Engine

__all__ = ("KINDS", "NONE", "RESERVED_KEYS", "Entry", "Kind", "Origin", "Registry", "hookimpl", "load_plugins")

Kind: TypeAlias = Literal["recipe", "scheduler", "kvstore", "executor", "speculator", "placer"]
KINDS: tuple[Kind, ...] = get_args(Kind)

ENTRY_POINT_GROUP = "deepinfra"

NONE = "none"
"""The name that means "without this part" in a configuration; nothing can be registered under it."""

RESERVED_KEYS = frozenset({"use", "process", "write"})
"""Keys that a configuration table holds beside the part's own."""

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

P = TypeVar("P", bound=Component)
P_co = TypeVar("P_co", bound=Component, covariant=True)
O = TypeVar("O", bound=BaseModel)  # noqa: E741


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plug-in came from.

    Attributes:
        plugin: Name of its entry point, or of the module given to `load_plugins`.
        distribution: The distribution that ships it; empty if it was given as an object.
        version: The distribution's version.
    """

    plugin: str
    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        if self.distribution:
            return f"{self.distribution} {self.version}"
        return f"{self.plugin} (not installed)"


@dataclass(frozen=True, slots=True)
class Entry(Generic[P_co]):
    """A registered part.

    Attributes:
        kind: Which of the six.
        name: What a configuration calls it.
        options: Its options; frozen, unknown keys refused.
        origin: Who registered it.
        process: Whether a server runs it in a child process unless told otherwise; executors only.
        nested: The option that lists further parts of the same kind, which it is made of; empty for none.
    """

    kind: Kind
    name: str
    options: type[BaseModel]
    origin: Origin
    _factory: Callable[..., P_co]
    process: bool = False
    nested: str = ""

    def build(self, options: BaseModel, nested: Sequence[Component] = ()) -> P_co:
        """Make the part; cheap, reads headers at most.

        Args:
            options: Checked ones.
            nested: The parts that its option `nested` lists, made.

        Raises:
            ModelError: The part looks at a model that cannot be used.
        """
        return self._factory(options, nested) if self.nested else self._factory(options)


class Registry:
    """The parts of all plug-ins. Open for registration inside `deepinfra_register` only."""

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self._plugins = plugins
        self._origins: dict[str, Origin] = {}
        self._registering: Origin | None = None
        self._recipes: dict[str, Entry[Recipe]] = {}
        self._schedulers: dict[str, Entry[Scheduler]] = {}
        self._kvstores: dict[str, Entry[KVStore]] = {}
        self._executors: dict[str, Entry[Executor]] = {}
        self._speculators: dict[str, Entry[Speculator]] = {}
        self._placers: dict[str, Entry[ExpertPlacer]] = {}

    # -- what a plug-in calls ---------------------------------------------------------------------

    def recipe(self, name: str, factory: Callable[[O], Recipe], *, options: type[O]) -> None:
        """Register a recipe.

        Args:
            name: Lower-case words joined by `-`.
            factory: Makes the part from validated options; imports what it needs inside.
            options: A frozen pydantic model that forbids unknown keys. A field named `model` gets the server's
                model unless the configuration says otherwise.

        Raises:
            PluginConflictError: Another plug-in has the name.
            PluginError: The name or the options are not as above.
        """
        self._add(self._recipes, "recipe", name, factory, options)

    def scheduler(self, name: str, factory: Callable[[O], Scheduler], *, options: type[O]) -> None:
        """Register a scheduler; see `recipe`."""
        self._add(self._schedulers, "scheduler", name, factory, options)

    def kvstore(self, name: str, factory: Callable[..., KVStore], *, options: type[O], nested: str = "") -> None:
        """Register a KV store; see `recipe`.

        Args:
            name: As for `recipe`.
            factory: As for `recipe`. With `nested` it is given the options and a sequence of stores.
            options: As for `recipe`. A field `path` gets the server's KV folder by default.
            nested: The field that lists the stores it is made of: a tuple of models with `use` that allow further
                keys, which are those stores' own.
        """
        self._add(self._kvstores, "kvstore", name, factory, options, nested=nested)

    def executor(self, name: str, factory: Callable[[O], Executor], *, options: type[O], process: bool = True) -> None:
        """Register an executor; see `recipe`.

        Args:
            name: As for `recipe`.
            factory: As for `recipe`. With `process` it is called in the server too, for the executor's headers.
            options: As for `recipe`; must survive a round trip through JSON.
            process: Whether a server runs it in a child process by default: right for everything that keeps a
                Python thread busy.
        """
        self._add(self._executors, "executor", name, factory, options, process)

    def speculator(self, name: str, factory: Callable[[O], Speculator], *, options: type[O]) -> None:
        """Register a speculator; see `recipe`."""
        self._add(self._speculators, "speculator", name, factory, options)

    def placer(self, name: str, factory: Callable[[O], ExpertPlacer], *, options: type[O]) -> None:
        """Register an expert placer; see `recipe`."""
        self._add(self._placers, "placer", name, factory, options)

    # -- what the configuration asks --------------------------------------------------------------

    @property
    def recipes(self) -> Mapping[str, Entry[Recipe]]:
        """Recipes by name."""
        return self._recipes

    @property
    def schedulers(self) -> Mapping[str, Entry[Scheduler]]:
        """Schedulers by name."""
        return self._schedulers

    @property
    def kvstores(self) -> Mapping[str, Entry[KVStore]]:
        """KV stores by name."""
        return self._kvstores

    @property
    def executors(self) -> Mapping[str, Entry[Executor]]:
        """Executors by name."""
        return self._executors

    @property
    def speculators(self) -> Mapping[str, Entry[Speculator]]:
        """Speculators by name."""
        return self._speculators

    @property
    def placers(self) -> Mapping[str, Entry[ExpertPlacer]]:
        """Expert placers by name."""
        return self._placers

    def of_kind(self, kind: Kind) -> Mapping[str, Entry[Component]]:
        """Parts of one kind by name."""
        shelves: dict[Kind, Mapping[str, Entry[Component]]] = {
            "recipe": self._recipes,
            "scheduler": self._schedulers,
            "kvstore": self._kvstores,
            "executor": self._executors,
            "speculator": self._speculators,
            "placer": self._placers,
        }
        return shelves[kind]

    def find(self, kind: Kind, name: str) -> Entry[Component]:
        """The part of that kind and name.

        Raises:
            UnknownComponentError: There is none.
        """
        shelf = self.of_kind(kind)
        if name not in shelf:
            raise UnknownComponentError(kind, name, tuple(shelf))
        return shelf[name]

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Every loaded plug-in, in the order loaded."""
        return tuple(self._origins.values())

    def routes(self, engine: Engine) -> dict[str, ASGIApp]:
        """Applications to mount beside the server's own, of all plug-ins.

        Raises:
            PluginConflictError: Two plug-ins want one path.
            PluginError: A path does not begin with `/`.
        """
        mounts: dict[str, ASGIApp] = {}
        owners: dict[str, str] = {}
        for impl in self._plugins.hook.deepinfra_routes.get_hookimpls():
            owner = str(self._origins[impl.plugin_name])
            for path, app in self._call("deepinfra_routes", impl.plugin, engine=engine).items():
                if not path.startswith("/") or path == "/":
                    raise PluginError(f"{owner} mounts an application at {path!r}; a path is like '/admin'")
                if path in mounts:
                    raise PluginConflictError("path", path, owners[path], owner)
                mounts[path], owners[path] = app, owner
        return mounts

    def observers(self) -> tuple[Observer, ...]:
        """Observers of all plug-ins, in the order loaded."""
        groups = reversed(self._plugins.hook.deepinfra_observers())
        return tuple(observer for group in groups for observer in group)

    # -- loading ----------------------------------------------------------------------------------

    def _add(
        self,
        shelf: dict[str, Entry[P]],
        kind: Kind,
        name: str,
        factory: Callable[..., P],
        options: type[BaseModel],
        process: bool = False,
        nested: str = "",
    ) -> None:
        origin = self._registering
        if origin is None:
            raise PluginError(f"{kind} {name!r} must be registered inside deepinfra_register")
        what = f"{kind} {name!r} of {origin}"
        if not _NAME.fullmatch(name) or name == NONE:
            raise PluginError(f"{what}: a name is lower-case words joined by '-', and not {NONE!r}")
        given: object = options
        if not (isinstance(given, type) and issubclass(given, BaseModel)):
            raise PluginError(f"{what}: options must be a pydantic model")
        if options.model_config.get("extra") != "forbid" or not options.model_config.get("frozen"):
            raise PluginError(f"{what}: {options.__name__} needs ConfigDict(frozen=True, extra='forbid')")
        if taken := RESERVED_KEYS & options.model_fields.keys():
            raise PluginError(f"{what}: {options.__name__} may not have a field {min(taken)!r}")
        if nested and nested not in options.model_fields:
            raise PluginError(f"{what}: {options.__name__} has no field {nested!r}")
        if name in shelf:
            raise PluginConflictError(kind, name, str(shelf[name].origin), str(origin))
        shelf[name] = Entry(kind, name, options, origin, factory, process, nested)

    def _call(self, hook: str, plugin: object, **arguments: object) -> Any:
        """Call one plug-in's implementation of a hook, so that its author is known; `None` if it has none."""
        for impl in getattr(self._plugins.hook, hook).get_hookimpls():
            if impl.plugin is plugin:
                return impl.function(**{name: arguments[name] for name in impl.argnames})
        return None

    def _load(self, plugin: object, origin: Origin) -> None:
        """Check a plug-in's hooks and let it register."""
        unmarked = [
            name
            for name in dir(plugin)
            if name.startswith("deepinfra_") and self._plugins.parse_hookimpl_opts(plugin, name) is None
        ]
        if unmarked:
            raise PluginError(f"plug-in {origin.plugin!r} of {origin}: {unmarked[0]} is not marked with @hookimpl")
        key = f"{origin.distribution}:{origin.plugin}"
        try:
            self._plugins.register(plugin, key)
            self._plugins.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plug-in {origin.plugin!r} of {origin}: {' '.join(str(error).split())}") from error
        if not self._plugins.get_hookcallers(plugin):
            raise PluginError(f"plug-in {origin.plugin!r} of {origin} implements no hook")
        self._origins[key] = origin
        self._registering = origin
        try:
            self._call("deepinfra_register", plugin, registry=self)
        finally:
            self._registering = None


def load_plugins(*extra: object) -> Registry:
    """Load every installed plug-in, and `extra` ones.

    Args:
        extra: Modules or objects with hooks that are not installed as a distribution; a child process cannot load
            them, so executors they register run inside the server.

    Raises:
        PluginError: A plug-in cannot be imported, misspells a hook or registers something invalid; names its
            distribution. Nothing is skipped in silence.
        PluginConflictError: Two plug-ins claim one name.
    """
    plugins = pluggy.PluginManager("deepinfra")
    plugins.add_hookspecs(hookspecs)
    registry = Registry(plugins)
    for point in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (_dist(p), p.name)):
        version = point.dist.version if point.dist else ""
        with _blamed_on(Origin(point.name, _dist(point), version)) as origin:
            registry._load(point.load(), origin)
    for plugin in extra:
        name = getattr(plugin, "__name__", type(plugin).__name__)
        with _blamed_on(Origin(str(name))) as origin:
            registry._load(plugin, origin)
    return registry


def _dist(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else ""


@contextmanager
def _blamed_on(origin: Origin) -> Iterator[Origin]:
    """One of the three doors: whatever a plug-in raises becomes a PluginError that names it."""
    try:
        yield origin
    except PluginError:
        raise
    except Exception as error:
        what = f"plug-in {origin.plugin!r} of {origin} cannot be loaded"
        raise PluginError(f"{what}: {type(error).__name__}: {error}") from error
