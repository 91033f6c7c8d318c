"""A fleet as somebody asks for it: one that is known, with other devices, model, traffic or figures, from a file too.

The file is TOML. Tables `device.NAME` and `model.NAME` define further ones, by the fields of `Device` and the arguments
of `transformer`; `traffic`, `service`, `efficiency`, `prefill_layout` and `decode_layout` change figures of the fleet.
"""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfra.bench.simulate.plan.devices import DEVICES, Device, device_named
from deepinfra.bench.simulate.plan.fleets import DEFAULT, fleet_named
from deepinfra.bench.simulate.plan.given import check, replaced
from deepinfra.bench.simulate.plan.models import MODELS, model_named
from deepinfra.bench.simulate.plan.roofline import Layout, Roofline
from deepinfra.bench.simulate.plan.shape import ModelShape, transformer
from deepinfra.errors import ConfigError

if TYPE_CHECKING:
    from deepinfra.bench.simulate.plan.fleet import Fleet

__all__ = ("Asked", "tokens_of")

_SUFFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}

MOST = 1024
"""Devices of a layout that is chosen."""

_CHANGED = ("traffic", "service", "efficiency", "prefill_layout", "decode_layout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to plan; `None` is the fleet's own.

    Attributes:
        fleet: To begin with.
        prefill: Device that computes prompts.
        decode: Device that decodes.
        model: What is served.
        price: Of a device of either kind for an hour, in US dollars.
        context: Mean context of a generated token; requests are then equally long.
        figures: Others to change, by place (`traffic`, `service`, ...) and name.
        path: File to read; what is asked for here wins over it.
    """

    fleet: str = DEFAULT
    prefill: str | None = None
    decode: str | None = None
    model: str | None = None
    price: float | None = None
    context: float | None = None
    figures: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    path: Path | None = None

    def assembled(self) -> Fleet:
        """The fleet.

        Raises:
            ConfigError: A name is unknown, a figure is out of its limits, or the file is not as it should be.
        """
        tables = _read(self.path) if self.path is not None else {}
        devices = DEVICES | _devices(tables.pop("device", {}), str(self.path))
        models = MODELS | _models(tables.pop("model", {}), str(self.path))
        known = fleet_named(self.fleet)
        prefill = device_named(self.prefill, devices) if self.prefill else known.prefill
        decode = device_named(self.decode, devices) if self.decode else known.decode
        model = model_named(self.model, models) if self.model else known.model
        own = model is known.model
        fleet = dataclasses.replace(
            known,
            prefill=prefill,
            decode=decode,
            model=model,
            prefill_layout=known.prefill_layout if own and prefill is known.prefill else layout_for(prefill, model),
            decode_layout=known.decode_layout if own and decode is known.decode else layout_for(decode, model),
        )
        for place, wanted in tables.items():
            if place not in _CHANGED:
                raise ConfigError(f"{self.path}: {place} is no table of a plan; known: device, model, {_listed()}")
            fleet = _changed(fleet, place, _table(wanted, place), str(self.path))
        for place, wanted in self.figures.items():
            fleet = _changed(fleet, place, wanted, "asked for")
        if self.price is not None:
            for place in ("prefill", "decode"):
                fleet = _changed(fleet, place, {"usd_hour": self.price}, "asked for")
        if self.context is not None:
            prompt = self.context - fleet.traffic.output / 2.0
            if prompt <= 0.0:
                raise ConfigError(
                    f"context: {self.context:g} is too short for answers of {fleet.traffic.output:g} tokens"
                )
            shape = {"prompt": prompt, "position": prompt / 2.0, "context": self.context}
            fleet = _changed(fleet, "traffic", shape, "asked for")
        return fleet


def layout_for(device: Device, model: ModelShape) -> Layout:
    """As few devices as leave half of their memory to KV; a model of experts has all of a domain, or more."""
    largest = 1 << device.domain.bit_length() - 1
    width = largest if model.experts else 1
    while 2 * _weights(device, model, width) > device.memory_nbytes and width < (MOST if model.experts else largest):
        width *= 2
    return Layout(width=width, source="chosen so that weights take less than half of memory")


def _weights(device: Device, model: ModelShape, width: int) -> float:
    try:
        return Roofline(device, model, Layout(width=width)).weights_nbytes
    except ConfigError:  # they do not fit
        return inf


def tokens_of(text: str, name: str) -> float:
    """A number of tokens like `155T`, `10B` (or `10G`), `12k` or `4096`.

    Raises:
        ConfigError: It is none; `name` is in the sentence.
    """
    number, factor = (text[:-1], _SUFFIXES[text[-1]]) if text and text[-1] in _SUFFIXES else (text, 1.0)
    try:
        return float(number) * factor
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is no number like 4096, 12k, 10B or 155T") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _devices(tables: object, source: str) -> dict[str, Device]:
    fields = [each for each in dataclasses.fields(Device) if each.name not in ("name", "sources")]
    known = {each.name: str(each.type) for each in fields}
    needed = [each.name for each in fields if each.default is dataclasses.MISSING and each.name != "source"]
    found = {}
    for name, table in _table(tables, "device").items():
        place = f"device.{name}"
        values = _values(_table(table, place), known, place)
        _complete(values, needed, place)
        found[name] = Device(name=name, **{"source": source, **values})
        check(found[name], place)
    return found


def _models(tables: object, source: str) -> dict[str, ModelShape]:
    parameters = inspect.signature(transformer).parameters.values()
    known = {each.name: str(each.annotation) for each in parameters if each.name != "name"}
    needed = [each.name for each in parameters if each.default is each.empty and each.name not in ("name", "source")]
    found = {}
    for name, table in _table(tables, "model").items():
        place = f"model.{name}"
        values = _values(_table(table, place), known, place)
        _complete(values, needed, place)
        for each in ("precision", "kv_precision"):
            if values.get(each, "bf16") not in ("fp4", "fp8", "bf16"):
                raise ConfigError(f"{place}.{each}: {values[each]!r} is none of fp4, fp8, bf16")
        found[name] = transformer(name=name, **{"source": source, **values})
        check(found[name], place)
    return found


def _changed(fleet: Fleet, place: str, wanted: Mapping[str, object], source: str) -> Fleet:
    record = getattr(fleet, place)
    known = {each.name: str(each.type) for each in dataclasses.fields(record) if each.name != "sources"}
    values = _values(wanted, known, place)
    source = values.pop("source", source)
    return dataclasses.replace(fleet, **{place: replaced(record, values, source)})


def _values(table: Mapping[str, object], known: Mapping[str, str], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        kind = known.get(name)
        if kind is None:
            raise ConfigError(f"{place}.{name}: unknown; known: {', '.join(known)}")
        right = {"str": str, "bool": bool, "int": int}.get(kind, (int, float))
        if not isinstance(value, right) or isinstance(value, bool) != (kind == "bool"):
            raise ConfigError(f"{place}.{name}: {value!r} must be {_KINDS.get(kind, 'a number')}")
        found[name] = float(value) if right == (int, float) else value  # type: ignore[arg-type]
    return found


_KINDS = {"str": "a string", "bool": "true or false", "int": "a whole number"}


def _complete(values: Mapping[str, object], needed: list[str], place: str) -> None:
    missing = [name for name in needed if name not in values]
    if missing:
        raise ConfigError(f"{place}: {', '.join(missing)} missing")


def _table(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}: {value!r} must be a table")
    return value


def _listed() -> str:
    return ", ".join(_CHANGED)
