"""The command line: one module per command, imported when it is asked for."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated

import typer

from deepinfra import __version__
from deepinfra.cli.failures import sentence_for

__all__ = ("app", "main")

app: typer.Typer
"""All commands; made when it is asked for, see `__getattr__`."""

_COMMANDS = {
    "serve": "serve",
    "generate": "generate",
    "chat": "chat",
    "pull": "pull",
    "explain": "explain",
    "plugins": "plugins",
    "check-plugin": "check_plugin",
    "doctor": "doctor",
    "replay": "replay",
    "verify-invariance": "verify_invariance",
    "profile": "profile",
    "top": "top",
    "bench": "bench",
    "cache": "cache",
    "recipe": "recipe",
    "simulate": "simulate",
}
"""Each command, or group of commands, with the module that has a function, or an application, of that module's name."""


def application(wanted: str = "") -> typer.Typer:
    """The command line, with all commands; or, if there is a command `wanted`, with that one only.

    To import all of them and make their parsers takes 0.15 s, which whoever starts one of them need not wait for.
    """
    made = typer.Typer(
        name="deepinfra",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="The whole LLM serving stack: serve a model, talk to it, see how it is set up.",
    )
    made.callback()(_root)
    for name, module in _COMMANDS.items() if wanted not in _COMMANDS else [(wanted, _COMMANDS[wanted])]:
        command = getattr(importlib.import_module(f"deepinfra.cli.{module}"), module)
        if isinstance(command, typer.Typer):
            made.add_typer(command, name=name)
        else:
            made.command(name)(command)
    return made


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.obj["debug"] = debug


def main() -> None:
    """Run the command line and exit: 0, 1 with one sentence for what went wrong, 2 for wrong usage."""
    state: dict[str, bool] = {}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where not every character can be shown, an answer goes on
    try:
        application(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))(obj=state)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        sentence = sentence_for(error)
        if sentence is None or state.get("debug"):
            raise
        typer.echo(f"deepinfra: {sentence}", err=True)
        sys.exit(1)


def __getattr__(name: str) -> typer.Typer:
    if name == "app":
        return application()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
