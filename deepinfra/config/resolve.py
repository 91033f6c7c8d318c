"""Settings to parts: every name looked up, every part's options checked, nothing built and no weights read."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from deepinfra.config.folders import kv_folder, timings_folder
from deepinfra.config.prefixes import read_prefix
from deepinfra.config.settings import PartChoice, PoolSettings, ServerSettings
from deepinfra.config.sources import Key, Provenance, refusal
from deepinfra.core.conversation import Conversation
from deepinfra.errors import ConfigError, UnknownComponentError, UnsupportedCombination
from deepinfra.interfaces import Component, Executor, ExpertPlacer, KVStore, Recipe, Scheduler, Speculator
from deepinfra.registry import NONE, Entry, Kind, Registry

if TYPE_CHECKING:
    from deepinfra.engine import Engine, Pool

__all__ = ("Blueprint", "Part", "PoolBlueprint", "checked", "resolve")

P = TypeVar("P", bound=Component)
P_co = TypeVar("P_co", bound=Component, covariant=True)


@dataclass(frozen=True, slots=True)
class Part(Generic[P_co]):
    """A chosen part: where the choice stands in the settings, what it is, its checked options, and its own parts."""

    at: Key
    entry: Entry[P_co]
    options: BaseModel
    nested: tuple[Part[P_co], ...] = ()

    def build(self) -> P_co:
        """Make it; see `Entry.build`."""
        return self.entry.build(self.options, [part.build() for part in self.nested])

    def flat(self) -> Iterator[Part[P_co]]:
        """It and all parts inside it."""
        yield self
        for part in self.nested:
            yield from part.flat()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBlueprint:
    """The parts of one pool. `process` says whether its executor runs in a child process; `None`: as that wants it."""

    name: str
    scheduler: Part[Scheduler]
    executor: Part[Executor]
    process: bool | None
    store: Part[KVStore] | None
    speculator: Part[Speculator] | None
    placer: Part[ExpertPlacer] | None
    replay: Literal["exact", "bounded"] = "exact"
    snapshots: Literal["off", "ram", "disk"] = "disk"

    @property
    def parts(self) -> tuple[Part[Component], ...]:
        """Every part there is."""
        parts = (self.scheduler, self.executor, self.store, self.speculator, self.placer)
        return tuple(part for part in parts if part is not None)

    def build(self) -> Pool:
        """Make the pool.

        Raises:
            UnsupportedCombination: A part needs what the executor does not provide.
            ModelError: The executor's model cannot be used.
        """
        from deepinfra.engine import Pool

        executor = self.executor.build()
        speculator = self.speculator.build() if self.speculator else None
        needs: list[tuple[Part[Component], str]] = []
        if self.speculator:
            needs.append((self.speculator, "drafts"))
        if self.placer:
            needs.append((self.placer, "placement"))
        for part, need in needs:
            if need not in executor.provides:
                has = ", ".join(sorted(executor.provides)) or "nothing"
                raise UnsupportedCombination(
                    f"{part.entry.kind} {part.entry.name!r} needs an executor that provides {need!r}; "
                    f"{self.executor.entry.name!r} provides {has}"
                )
        if executor.holds_interpreter if self.process is None else self.process:
            executor = self._in_child(executor)
        return Pool(
            self.scheduler.build(),
            executor,
            store=self.store.build() if self.store else None,
            speculator=speculator,
            placer=self.placer.build() if self.placer else None,
            name=self.name,
            replay=self.replay,
            snapshots=self.snapshots,
        )

    def _in_child(self, headers: Executor) -> Executor:
        """The executor behind a process: its name and settings cross, objects do not."""
        from deepinfra.executors.process import ProcessExecutor

        options = self.executor.options
        command = (sys.executable, "-m", "deepinfra.config.child", self.executor.entry.name, options.model_dump_json())
        num_slots = options.model_dump().get("num_slots")
        if isinstance(num_slots, int):
            return ProcessExecutor(headers, command, num_slots=num_slots)
        return ProcessExecutor(headers, command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Everything decided, nothing built. Either `pool`, or both `prefill` and `decode`."""

    name: str
    settings: ServerSettings
    provenance: Provenance
    recipe: Part[Recipe]
    pool: PoolBlueprint | None = None
    prefill: tuple[PoolBlueprint, ...] = ()
    decode: tuple[PoolBlueprint, ...] = ()
    public_prefixes: tuple[Conversation, ...] = ()

    @property
    def pools(self) -> tuple[PoolBlueprint, ...]:
        """All pools."""
        return (*((self.pool,) if self.pool else ()), *self.prefill, *self.decode)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that the parts read, to be fetched before `build`."""
        parts = (self.recipe, *(part for pool in self.pools for part in pool.parts))
        names = (each.options.model_dump().get("model") for part in parts for each in part.flat())
        return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))

    def without_stores(self) -> Blueprint:
        """The same, keeping no KV beyond the device."""

        def bare(pool: PoolBlueprint) -> PoolBlueprint:
            return replace(pool, store=None)

        return replace(
            self,
            pool=bare(self.pool) if self.pool else None,
            prefill=tuple(map(bare, self.prefill)),
            decode=tuple(map(bare, self.decode)),
        )

    def build(self) -> Engine:
        """Make the engine and all its parts; reads model headers, no weights, and acquires nothing.

        Raises:
            UnsupportedCombination: A part needs what another does not provide.
            ModelError: The model is not there or cannot be used.
        """
        from deepinfra.engine import Engine
        from deepinfra.models import opened_once

        with opened_once():
            return Engine(
                self.recipe.build(),
                self.pool.build() if self.pool else (),
                prefill=[pool.build() for pool in self.prefill],
                decode=[pool.build() for pool in self.decode],
                name=self.name,
                client_timeout_s=self.settings.client_timeout_s,
                public_prefixes=self.public_prefixes,
            )


def resolve(settings: ServerSettings, registry: Registry, provenance: Provenance | None = None) -> Blueprint:
    """Look up every part and check its options.

    Args:
        settings: What was asked for.
        registry: What there is.
        provenance: Where each setting was written, for messages.

    Raises:
        UnknownComponentError: A part of that name is not registered.
        ConfigError: A part's own key is unknown, of the wrong type or out of range, or a file that is named is wrong.
        UnsupportedCombination: Parts that cannot work together.
    """
    look = _Lookup(settings, registry, provenance or Provenance())
    blueprint = Blueprint(
        name=settings.name or _served_name(settings.model),
        settings=settings,
        provenance=look.provenance,
        recipe=look.part(registry.recipes, "recipe", settings.recipe, ("recipe",)),
        pool=None if settings.split else look.pool(settings.pool, ("pool",)),
        prefill=tuple(look.pool(pool, ("prefill", str(i))) for i, pool in enumerate(settings.prefill)),
        decode=tuple(look.pool(pool, ("decode", str(i))) for i, pool in enumerate(settings.decode)),
        public_prefixes=tuple(map(read_prefix, settings.public_prefixes)),
    )
    for pool in blueprint.pools:
        _refuse_tiers_in_one_folder(pool)
    return blueprint


def checked(
    entry: Entry[Component], own: Mapping[str, object], at: Key = (), provenance: Provenance | None = None
) -> BaseModel:
    """A part's options from its own keys.

    Raises:
        ConfigError: A key is unknown, missing, of the wrong type or out of range.
    """
    try:
        return entry.options.model_validate(own)
    except ValidationError as error:
        raise refusal(error, entry.options, at, provenance or Provenance()) from None


class _Lookup:
    """One `resolve`: what its steps share."""

    def __init__(self, settings: ServerSettings, registry: Registry, provenance: Provenance) -> None:
        self.settings, self.registry, self.provenance = settings, registry, provenance

    def part(self, shelf: Mapping[str, Entry[P]], kind: Kind, choice: PartChoice, at: Key) -> Part[P]:
        entry = shelf.get(choice.use)
        if entry is None:
            key = (*at, "use")
            written = self.provenance.of(key)
            where = ", ".join((".".join(key), *((written,) if written else ()))) if at[-1].isdecimal() else ""
            raise UnknownComponentError(kind, choice.use, tuple(shelf), where)
        own = dict(choice.model_extra or {})
        if "model" in entry.options.model_fields:
            own.setdefault("model", self.settings.model)
        if kind == "kvstore" and "path" in entry.options.model_fields:
            own.setdefault("path", str(kv_folder()))
        if kind == "scheduler" and "timings" in entry.options.model_fields:
            own.setdefault("timings", str(timings_folder()))
        options = checked(entry, own, at, self.provenance)
        listed = getattr(options, entry.nested) if entry.nested else ()
        choices = (PartChoice(use=each.use, **each.model_extra) for each in listed)
        nested = (self.part(shelf, kind, one, (*at, entry.nested, str(i))) for i, one in enumerate(choices))
        return Part(at, entry, options, tuple(nested))

    def maybe(self, shelf: Mapping[str, Entry[P]], kind: Kind, choice: PartChoice, at: Key) -> Part[P] | None:
        if choice.use != NONE:
            return self.part(shelf, kind, choice, at)
        if choice.model_extra:
            key = ".".join((*at, next(iter(choice.model_extra))))
            raise ConfigError(f"{key} has no meaning beside use = {NONE!r}")
        return None

    def pool(self, pool: PoolSettings, at: Key) -> PoolBlueprint:
        registry = self.registry
        executor = self.part(registry.executors, "executor", pool.executor, (*at, "executor"))
        installed = bool(executor.entry.origin.distribution)
        process = pool.executor.process
        if process is None and not (executor.entry.process and installed):
            process = False
        if process and not installed:
            raise UnsupportedCombination(
                f"{'.'.join(at)}.executor.process: {executor.entry.name!r} comes from {executor.entry.origin}, "
                "which a child process cannot load; install it as a distribution or set process = false"
            )
        return PoolBlueprint(
            name="-".join(at),
            scheduler=self.part(registry.schedulers, "scheduler", pool.scheduler, (*at, "scheduler")),
            executor=executor,
            process=process,
            store=self.maybe(registry.kvstores, "kvstore", pool.store, (*at, "store")),
            speculator=self.maybe(registry.speculators, "speculator", pool.speculator, (*at, "speculator")),
            placer=self.maybe(registry.placers, "placer", pool.placer, (*at, "placer")),
            replay=pool.replay,
            snapshots=pool.snapshots,
        )


def _refuse_tiers_in_one_folder(pool: PoolBlueprint) -> None:
    """Pools may share a folder; two tiers of one store would write everything into it twice."""
    owners: dict[Path, str] = {}
    for part in pool.store.flat() if pool.store else ():
        path = getattr(part.options, "path", None)
        if isinstance(path, (str, Path)):
            folder, name = Path(path).expanduser().resolve(), ".".join((*part.at, "path"))
            if folder in owners:
                raise UnsupportedCombination(f"{owners[folder]} and {name} are one folder, {folder}")
            owners[folder] = name


def _served_name(model: str) -> str:
    path = Path(model).expanduser()
    return path.stem if path.suffix == ".gguf" else path.name if path.exists() else model
