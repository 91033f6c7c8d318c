"""`deepinfra recipe`: what a model is given for a request, and what its recipe protects."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfra.cli.prompts import ApiOption, RecipeName, inputs_of, prompt_of, with_recipe
from deepinfra.cli.setup import Config, Model

if TYPE_CHECKING:
    from deepinfra.core.report import RecipeReport
    from deepinfra.core.request import Prompt
    from deepinfra.interfaces import Recipe

__all__ = ("recipe",)

recipe = typer.Typer(no_args_is_help=True, help="See the prompt a request becomes, and what a recipe protects.")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@recipe.command("render")
def render(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A request's JSON body; - reads standard input.")],
    model: Model = None,
    recipe_name: RecipeName = None,
    api: ApiOption = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Print the prompt that a request becomes: its text, where its control tokens stand, and its ids."""
    from deepinfra.api.body import parse_object

    raw = parse_object(sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes())
    inputs = inputs_of(raw, api)

    def prompts(built: Recipe) -> list[Prompt]:
        return [prompt_of(built, asked) for asked in inputs]

    for prompt in with_recipe(prompts, config, model, recipe_name):
        if as_json:
            typer.echo(json.dumps(_document(prompt), ensure_ascii=False))
        else:
            _print_prompt(prompt)


@recipe.command("doctor")
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Catalogue name, path, or hub id; default: the configuration's."),
    ] = None,
    recipe_name: RecipeName = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Prove a model's recipe and print what it protects; exits 1 if what a user types can become a control token."""
    import dataclasses

    report = with_recipe(lambda built: built.report(), config, model, recipe_name)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), ensure_ascii=False))
    else:
        _print_report(report)
    if report.injectable:
        raise typer.Exit(1)


def _document(prompt: Prompt) -> dict[str, object]:
    constraint = prompt.constraint
    return {
        "text": prompt.text,
        "ids": prompt.ids,
        "control": prompt.control,
        "ranges": prompt.ranges,
        "start": prompt.start,
        "stop_ids": sorted(prompt.stop_ids),
        "breakpoints": prompt.breakpoints,
        "constraint": None if constraint is None else {"kind": constraint.kind, "source": constraint.source},
    }


def _print_prompt(prompt: Prompt) -> None:
    """The text as it is, its control tokens in colour on a terminal; then where they stand, then all ids."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if console.is_terminal:
        shown = Text(prompt.text)
        for start, end in prompt.ranges:
            shown.stylize("bold black on cyan", start, end)
        console.print(shown, soft_wrap=True)
    else:
        typer.echo(prompt.text)
    ids = [prompt.ids[position] for position in prompt.control]
    named = ids[len(ids) - len(prompt.ranges) :]  # a BOS that the tokenizer adds stands in no text
    typer.echo(f"\n{len(prompt.ids)} tokens, {len(ids)} of them control tokens; the answer begins as {prompt.start}")
    if prompt.ranges:
        typer.echo(f"{'from':>8} {'to':>8}  {'id':>7}  control token; the same characters elsewhere are text")
    for (start, end), token in zip(prompt.ranges, named, strict=False):
        typer.echo(f"{start:>8} {end:>8}  {token:>7}  {prompt.text[start:end]}")
    typer.echo(f"ids {' '.join(map(str, prompt.ids))}")
    if prompt.constraint is not None:
        typer.echo(f"the answer must match this {prompt.constraint.kind}:\n{prompt.constraint.source}")


def _print_report(report: RecipeReport) -> None:
    typer.echo(f"{report.recipe}")
    fields = ", ".join(report.injectable) or "none"
    typer.echo(f"fields in which a typed marker becomes a control token: {fields}")
    typer.echo(f"reasoning: {'not marked' if report.reasoning is None else ' … '.join(report.reasoning)}")
    typer.echo(f"tools: {'refused' if report.tools is None else f'in the syntax {report.tools!r}'}")
    for title, lines in (
        ("done in the template's stead", report.fallbacks),
        ("peculiar to this model", report.quirks),
        ("plain text that a user can type and no tokenizer can protect", report.fences),
        ("control tokens", tuple(f"{token:>7}  {text}" for text, token in report.control)),
    ):
        typer.echo(f"\n{title}:{'' if lines else ' none'}")
        for line in lines:
            typer.echo(f"  {line}")
