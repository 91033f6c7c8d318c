"""What commands share that measure forms of the torch executor: which model, which options, and their own arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from deepinfra.cli.setup import OFFLINE, blueprint_for, fetch_models

if TYPE_CHECKING:
    from deepinfra.models import Model

__all__ = ("Measured", "chart_file", "measured", "names", "numbers", "writable")


class Measured(NamedTuple):
    """What is measured.

    Attributes:
        name: The model, as the configuration has it.
        model: Opened.
        forms: Names of forms.
        options: Of the executor, by form: as configured where the form says nothing.
    """

    name: str
    model: Model
    forms: tuple[str, ...]
    options: dict[str, dict[str, object]]

    def threads(self) -> int | None:
        """As configured."""
        found = next(iter(self.options.values())).get("threads")
        return found if isinstance(found, int) else None


def measured(
    command: str,
    config: Path | None,
    model: str | None,
    forms: str | None,
    option: str,
    *,
    most: int | None = None,
    only: Sequence[str] | None = None,
) -> Measured:
    """Read the configuration, and choose the forms where none are named, which standard error is told.

    It is told as well what is configured and not used: because a form decides it, or because it means nothing here.

    Args:
        command: Its name.
        config: The file that was named.
        model: The model that was named.
        forms: Forms that were named; `None` lets the model decide.
        option: Where they were.
        most: So many are wanted; default: any number.
        only: Options of the executor that mean something to the command; default: all, and `process`.

    Raises:
        ConfigError: A form is unknown or cannot be computed, or something else than a torch executor is configured.
        ModelError: The model cannot be used.
    """
    from deepinfra.bench.compare.forms import default_forms, form_options
    from deepinfra.errors import ConfigError
    from deepinfra.executors.torch import TorchExecutor
    from deepinfra.models import open_model

    blueprint = blueprint_for(config, {"model": model}, defaults=OFFLINE)
    if blueprint.pool is None:
        raise ConfigError(f"{command} measures one pool; this configuration splits prefill and decode")
    executor = blueprint.pool.executor
    if executor.entry.name != "torch":
        raise ConfigError(
            f"{command} measures forms of the torch executor; pool.executor.use is {executor.entry.name!r}"
        )
    chosen = None if forms is None else names(option, forms, most=most)
    for form in chosen or ():
        form_options(form)  # a name that is unknown costs no download
    fetch_models(blueprint)

    def tell_unused(name: str, value: object, why: str) -> None:
        where = blueprint.provenance.of((*executor.at, name))
        typer.echo(f"pool.executor.{name} = {value} ({where}) is not used: {why}", err=True)

    written = {name: value for name, value in executor.options if name in executor.options.model_fields_set}
    opened = open_model(str(written.pop("model")))
    if only is not None:
        for name in [name for name in written if name not in only]:
            tell_unused(name, written.pop(name), f"{command} has its own")
        if blueprint.pool.process:
            tell_unused("process", "true", f"{command} times the executor in this process")
    if chosen is None:
        chosen, why = default_forms(opened, written.get("kernels", "auto"))
        chosen = chosen[:most]
        typer.echo(f"{option} {','.join(chosen)} ({why})", err=True)
    options = {form: {**written, **form_options(form)} for form in chosen}
    for form, own in options.items():
        try:
            TorchExecutor(opened, **own)
        except ConfigError as error:
            raise ConfigError(f"{option} {form}: {error}") from None
    for name, value in written.items():
        if others := [form for form, own in options.items() if own[name] != value]:
            tell_unused(name, value, f"it is part of {', '.join(others)}")
    return Measured(blueprint.settings.model, opened, chosen, options)


def chart_file(option: str, chart: Path | None) -> None:
    """Make sure before a long run that there is a place for its chart.

    Raises:
        ConfigError: There is none, or the name is not one of an HTML file.
    """
    from deepinfra.errors import ConfigError

    if chart is None:
        return
    if chart.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{option} {chart}: a chart is an HTML file, to be opened in a browser; name it so")
    writable(option, chart)


def writable(option: str, path: Path) -> None:
    """Make sure before a long run that its file can be written; what is in it stays.

    Raises:
        ConfigError: It cannot.
    """
    from deepinfra.errors import ConfigError

    new = not path.exists()
    try:
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from None


def names(option: str, text: str, *, most: int | None = None) -> tuple[str, ...]:
    """`stored,bfloat16`.

    Raises:
        ConfigError: It names nothing, something twice, or more than `most`.
    """
    from deepinfra.errors import ConfigError

    found = tuple(filter(None, (each.strip() for each in text.split(","))))
    if not found:
        raise ConfigError(f"{option} names nothing")
    if len(set(found)) < len(found):
        raise ConfigError(f"{option} {text} names something twice")
    if most is not None and len(found) > most:
        raise ConfigError(f"{option} {text} names more than {most}")
    return found


def numbers(option: str, text: str) -> tuple[int, ...]:
    """`1,8,32`.

    Raises:
        ConfigError: It is something else.
    """
    from deepinfra.errors import ConfigError

    found = tuple(int(each) for each in text.split(",") if each.strip().isdecimal())
    if len(found) != len(text.split(",")) or min(found) < 1 or len(set(found)) < len(found):
        raise ConfigError(f"{option} takes numbers like 1,8,32, each once; {text!r} is something else")
    return found
