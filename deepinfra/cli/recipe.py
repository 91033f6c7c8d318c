"""`deepinfra recipe`: what a model is given for a request, and what its recipe protects."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import anyio
import typer

from deepinfra.cli.setup import OFFLINE, Config, Model, blueprint_for, fetch_models

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepinfra.core.conversation import JsonValue
    from deepinfra.core.report import RecipeReport
    from deepinfra.core.request import Prompt, PromptInput
    from deepinfra.interfaces import Recipe

__all__ = ("recipe",)

T = TypeVar("T")

recipe = typer.Typer(no_args_is_help=True, help="See the prompt a request becomes, and what a recipe protects.")

RecipeName = Annotated[
    str | None, typer.Option("--recipe", metavar="NAME", help="Recipe; default: the configuration's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Api = Literal["chat", "completions", "responses", "messages"]
_KEYS: tuple[tuple[str, Api], ...] = (("input", "responses"), ("prompt", "completions"), ("system", "messages"))


@recipe.command("render")
def render(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A request's JSON body; - reads standard input.")],
    model: Model = None,
    recipe_name: RecipeName = None,
    api: Annotated[Api | None, typer.Option(help="The API the request is for; default: by its fields.")] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Print the prompt that a request becomes: its text, where its control tokens stand, and its ids."""
    from deepinfra.api.body import parse_object

    raw = parse_object(sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes())
    inputs = _inputs(raw, api)

    def prompts(built: Recipe) -> list[Prompt]:
        return [_prompt(built, asked) for asked in inputs]

    for prompt in _with_recipe(prompts, config, model, recipe_name):
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

    report = _with_recipe(lambda built: built.report(), config, model, recipe_name)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), ensure_ascii=False))
    else:
        _print_report(report)
    if report.injectable:
        raise typer.Exit(1)


def _with_recipe(use: Callable[[Recipe], T], config: Path | None, model: str | None, name: str | None) -> T:
    """What `use` makes of the configured recipe, entered."""
    keywords: dict[str, object] = {"model": model, "recipe": None if name is None else {"use": name}}
    blueprint = blueprint_for(config, keywords, defaults=OFFLINE)
    fetch_models(blueprint)
    built = blueprint.recipe.build()

    async def entered() -> T:
        async with built:
            return use(built)

    return anyio.run(entered)


def _inputs(raw: dict[str, JsonValue], api: Api | None) -> list[PromptInput]:
    """The prompts of a request's body; a model's name, which says nothing here, may be left out."""
    from datetime import UTC, datetime

    from deepinfra.api.chat.request import CHAT
    from deepinfra.api.completions.request import COMPLETIONS
    from deepinfra.api.messages.request import MESSAGES
    from deepinfra.api.protocol import Received, WireProtocol
    from deepinfra.api.responses.request import Responses
    from deepinfra.api.responses.store import ResponseStore
    from deepinfra.interfaces.given import SystemClock

    guess: Api = next((known for key, known in _KEYS if key in raw), "chat")
    name = api or guess
    clock = SystemClock()
    protocols: dict[Api, WireProtocol] = {
        "chat": CHAT,
        "completions": COMPLETIONS,
        "messages": MESSAGES,
        "responses": Responses(ResponseStore(clock), clock),
    }
    body: dict[str, JsonValue] = {"model": "-", **({"max_tokens": 1} if name == "messages" else {}), **raw}
    received = Received(headers={}, now=datetime.fromtimestamp(clock.wall(), UTC).date().isoformat(), max_choices=1024)
    return [request.input for request in protocols[name].parse(body, received).requests]


def _prompt(built: Recipe, asked: PromptInput) -> Prompt:
    from deepinfra.core.conversation import Conversation
    from deepinfra.core.request import Prompt, TextInput

    if isinstance(asked, Conversation):
        return built.render(asked)
    if isinstance(asked, TextInput):
        return built.text(asked)
    return Prompt(ids=asked)


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
