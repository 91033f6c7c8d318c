"""`deepinfra verify-invariance`: the same prompts alone and in batches."""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.progress import shown_count
from deepinfra.cli.setup import OFFLINE, Config, blueprint_for, fetch_models

if TYPE_CHECKING:
    from deepinfra.bench.invariance import Divergence, InvarianceReport, InvarianceRun, ModeReport
    from deepinfra.config import Blueprint
    from deepinfra.interfaces.executor import Executor

__all__ = ("verify_invariance",)

_BLOCK_SIZE = 16
_MOST_TOKENS = 512
"""Of a prompt with its answer, in blocks that are set aside."""


def verify_invariance(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Catalogue name (smollm2), path of a model, or hub id.")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=2, max=200, help="Most prompts searched for a divergence of the ordinary mode.")
    ] = 200,
    least: Annotated[int, typer.Option(min=1, help="The invariant mode is held to at least so many prompts.")] = 32,
    batch: Annotated[int, typer.Option(min=2, max=64, help="Prompts at a time.")] = 8,
    new: Annotated[int, typer.Option(min=1, max=256, help="Tokens to generate for each prompt.")] = 48,
    seed: Annotated[int, typer.Option(help="Chooses the prompts.")] = 0,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/reference/bench.md names its fields.")
    ] = False,
) -> None:
    """Show that the batch-invariant mode answers alone as in a batch, to the bit, and where the ordinary one does not.

    Asks the same prompts both ways at temperature 0, in both modes. Shows the token at which the ordinary mode,
    computed by torch, first gives another text. Exits 0 if the batch-invariant mode never differs in any token or
    log-probability; else 1.
    """
    from deepinfra.bench.invariance import InvarianceRun
    from deepinfra.errors import ConfigError

    run = InvarianceRun(prompts=prompts, least=min(least, prompts), batch=min(batch, prompts), new=new, seed=seed)
    ordinary = _blueprint(config, model, run, {"kernels": "torch", "weights": "auto", "batch_invariant": False})
    fetch_models(ordinary)
    invariant: Blueprint | str
    try:
        invariant = _blueprint(config, model, run, {"batch_invariant": True})
        _executor(invariant)
    except ConfigError as error:
        invariant = str(error)
    with shown_count() as show:
        report = anyio.run(_verify, ordinary, invariant, run, show)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), ensure_ascii=False))
    else:
        _print(report)
    if not report.kept:
        raise typer.Exit(1)


def _blueprint(config: Path | None, model: str | None, run: InvarianceRun, options: dict[str, object]) -> Blueprint:
    blocks = (run.batch + 1) * -(-_MOST_TOKENS // _BLOCK_SIZE)
    room = {"num_blocks": blocks, "block_size": _BLOCK_SIZE, "max_seqs": run.batch}
    keywords: dict[str, object] = {"model": model, "pool": {"executor": {"process": False, **room, **options}}}
    return blueprint_for(config, keywords, defaults=OFFLINE)


def _executor(blueprint: Blueprint) -> Executor:
    from deepinfra.errors import ConfigError

    if blueprint.pool is None:
        raise ConfigError("verify-invariance runs one pool; this configuration splits prefill and decode")
    return blueprint.pool.build().executor


async def _verify(
    ordinary: Blueprint, invariant: Blueprint | str, run: InvarianceRun, show: Callable[[str, int, int, str], None]
) -> InvarianceReport:
    from deepinfra.bench.invariance import Question, questions, run_invariance
    from deepinfra.core.conversation import Conversation, Message, TextPart

    recipe = ordinary.recipe.build()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(recipe)
        asked = [
            Question(text, recipe.render(Conversation(messages=(Message(role="user", content=(TextPart(text),)),))).ids)
            for text in questions(run.seed, run.prompts)
        ]
        show("loading", 0, 2, "the ordinary mode")
        one = await stack.enter_async_context(_executor(ordinary))
        show("loading", 1, 2, "the invariant mode")
        other = invariant if isinstance(invariant, str) else await stack.enter_async_context(_executor(invariant))
        show("loading", 2, 2, "done")
        return await run_invariance(one, other, recipe.tokenizer, asked, run, progress=show)


# -- words ----------------------------------------------------------------------------------------


def _print(report: InvarianceReport) -> None:
    typer.echo(f"{report.model}: each prompt alone, then in a batch of {report.run.batch}, at temperature 0")
    for mode in (report.ordinary, report.invariant):
        typer.echo()
        typer.echo(_summary(mode))
        if mode.first is not None:
            typer.echo(_shown(mode.first, min(120, shutil.get_terminal_size((100, 24)).columns)))
    typer.echo()
    if report.kept:
        typer.echo("The batch-invariant mode never differed, to the bit.")
    elif report.invariant.refused:
        typer.echo("Batch invariance cannot be verified: there is no such mode for this model here.")
    else:
        typer.echo("The batch-invariant mode DIFFERED: that is a bug of deepinfra.")


def _summary(mode: ModeReport) -> str:
    if mode.refused:
        return f"{mode.name}: {mode.refused}"
    how = ", ".join(
        mode.about[name].partition(":")[0] for name in ("kernels", "weights", "dtype") if name in mode.about
    )
    found = f"{mode.texts} gave another text, {mode.logprobs} other log-probabilities"
    if mode.first is None:
        found += "; another text: none found"
    return f"{mode.name} ({how}): of {mode.prompts} prompts {found}"


def _shown(first: Divergence, width: int) -> str:
    """Both texts side by side, with brackets around the token at which they part."""
    half = (width - 3) // 2
    columns = []
    for token, rest in (first.alone, first.batched):
        marked = f"{first.common}⟦{token}⟧{rest}"
        columns.append([line for part in marked.splitlines() for line in textwrap.wrap(part, half) or [""]])
    lines = [
        f"prompt {first.prompt}: {first.question}",
        f"they part at token {first.at}: alone, its log-probability was {first.apart:.2g} above the next one's",
        f"{'alone':{half}} | in the batch",
        *(f"{left:{half}} | {right}" for left, right in zip_longest(*columns, fillvalue="")),
    ]
    return "\n".join(lines)
