"""Progress, of downloads above all: a bar on a terminal, plain lines elsewhere. Written to standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from deepinfra.models.records import Progress

__all__ = ("nbytes_text", "shown_count", "shown_line", "shown_progress")

_LINES = 10
"""Plain lines for one download or count, besides its first and last."""


def nbytes_text(nbytes: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("the last unit takes everything")


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A `Progress` for the models' functions; shows nothing if nothing is started."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as rich:
        yield _Bars(rich)


@contextmanager
def shown_line() -> Iterator[Callable[[str], None]]:
    """What is going on: one line that changes on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: typer.echo(text, err=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


@contextmanager
def shown_count() -> Iterator[Callable[[str, int, int, str], None]]:
    """`show(what, done, total, note)`: one bar for each `what` on a terminal, ten plain lines for it elsewhere."""
    shown: dict[str, int] = {}
    if not sys.stderr.isatty():

        def line(what: str, done: int, total: int, note: str) -> None:
            part = _LINES * done // max(1, total)
            if part > shown.get(what, -1):
                shown[what] = part
                typer.echo(f"{what}: {done:,} of {total:,}, {note}", err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as rich:
        tasks: dict[str, TaskID] = {}

        def bar(what: str, done: int, total: int, note: str) -> None:
            if what not in tasks:
                tasks[what] = rich.add_task(what, total=total, note=note)
            rich.update(tasks[what], completed=done, note=note)

        yield bar


class _Bars:
    def __init__(self, rich: RichProgress) -> None:
        self._rich = rich
        self._task: TaskID | None = None

    def start(self, what: str, total: int | None) -> None:
        self._task = self._rich.add_task(what, total=total)

    def advance(self, nbytes: int) -> None:
        if self._task is not None:
            self._rich.advance(self._task, nbytes)

    def done(self) -> None:
        if self._task is not None:
            self._rich.stop_task(self._task)
        self._task = None


class _Lines:
    def __init__(self) -> None:
        self._what, self._total, self._done, self._shown = "", 0, 0, 0

    def start(self, what: str, total: int | None) -> None:
        self._what, self._total, self._done, self._shown = what, total or 0, 0, 0
        typer.echo(f"{what}: {nbytes_text(total)}" if total else what, err=True)

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        part = self._done * _LINES // self._total if self._total else 0
        if part > self._shown and part < _LINES:
            self._shown = part
            typer.echo(f"{self._what}: {100 * self._done // self._total} %", err=True)

    def done(self) -> None:
        typer.echo(f"{self._what}: {nbytes_text(self._done)} done", err=True)
