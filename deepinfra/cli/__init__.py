"""The command line: one module per command, which imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from deepinfra import __version__
from deepinfra.cli import (
    bench,
    chat,
    check_plugin,
    doctor,
    explain,
    generate,
    plugins,
    profile,
    pull,
    recipe,
    replay,
    serve,
    top,
    verify_invariance,
)
from deepinfra.cli.cache import cache
from deepinfra.cli.failures import sentence_for
from deepinfra.cli.simulate import simulate

__all__ = ("app", "main")

app = typer.Typer(
    name="deepinfra",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The whole LLM serving stack: serve a model, talk to it, see how it is set up.",
)

app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("pull")(pull.pull)
app.command("explain")(explain.explain)
app.command("plugins")(plugins.plugins)
app.command("check-plugin")(check_plugin.check_plugin)
app.command("doctor")(doctor.doctor)
app.command("replay")(replay.replay)
app.command("verify-invariance")(verify_invariance.verify_invariance)
app.command("profile")(profile.profile)
app.command("top")(top.top)
app.add_typer(bench.bench, name="bench")
app.add_typer(cache, name="cache")
app.add_typer(recipe.recipe, name="recipe")
app.add_typer(simulate, name="simulate")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
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
    try:
        app(obj=state)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        sentence = sentence_for(error)
        if sentence is None or state.get("debug"):
            raise
        typer.echo(f"deepinfra: {sentence}", err=True)
        sys.exit(1)
