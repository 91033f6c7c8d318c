"""`deepinfra replay`: receipts computed again."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import anyio
import anyio.lowlevel
import typer

from deepinfra.cli.cache.folder import visible
from deepinfra.cli.progress import shown_count
from deepinfra.cli.recordings import Recording, recordings
from deepinfra.cli.setup import OFFLINE, Config, Model, blueprint_for, fetch_models

if TYPE_CHECKING:
    from deepinfra.engine import Engine
    from deepinfra.engine.receipts import Compared, Obstacle, Outcome

__all__ = ("replay",)

_WORDS = {
    "same": "the same",
    "differs": "different",
    "incomparable": "not comparable",
    "failed": "failed",
    "unreadable": "unreadable",
}
"""What is counted, by verdict; all but the first make the exit code 1."""

_SHOWN = 80
"""Characters of a fact that are shown: a fingerprint has 64."""

Done: TypeAlias = "tuple[str, Outcome | None, str]"
"""Where a receipt was, what became of it, and why it could not be read."""


def replay(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A receipt, a response with one, a recorded stream, or JSON lines of many; - reads standard input.",
        ),
    ],
    model: Model = None,
    config: Config = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=256, help="Receipts at a time; what was promised to be the same is so at any.")
    ] = 1,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compute also where weights, kernels or the machine are others.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with every outcome.")] = False,
) -> None:
    """Compute recorded answers again from their receipts, and say whether every token is the same.

    Exits 0 if every token is the same, else 1: if one differs, if a receipt was made by other weights, kernels or a
    machine of another kind, or if it was altered.
    """
    found = recordings(file)
    blueprint = blueprint_for(config, {"model": model}, defaults=OFFLINE).without_stores()
    fetch_models(blueprint)
    said: Callable[[str], None] = (lambda text: None) if as_json else typer.echo
    done = anyio.run(_replay_all, blueprint.build(), found, concurrency, anyway, said)
    counts = Counter("unreadable" if outcome is None else outcome.verdict for _, outcome, _ in done)
    if as_json:
        typer.echo(json.dumps({"receipts": list(map(_document, done)), "counts": counts}, ensure_ascii=False))
    else:
        typer.echo(_summary(done, counts))
    if counts["same"] < len(done):
        raise typer.Exit(1)


async def _replay_all(
    engine: Engine, found: Sequence[Recording], concurrency: int, anyway: bool, said: Callable[[str], None]
) -> list[Done]:
    """Every outcome in the file's order; each is said when it and those before it are there."""
    from deepinfra.engine.receipts import replay as replayed
    from deepinfra.errors import ReceiptError

    done: dict[int, Done] = {}
    work, told, same = iter(enumerate(found)), 0, 0

    async def one_by_one() -> None:
        nonlocal told, same
        for index, recording in work:
            await anyio.lowlevel.checkpoint()  # of unreadable ones nothing else waits, and Ctrl-C has to get through
            outcome: Outcome | None = None
            try:
                outcome = await replayed(engine, recording.receipt(), anyway=anyway)
            except ReceiptError as error:
                done[index] = (recording.where, None, str(error))
            else:
                done[index] = (recording.where, outcome, outcome.why)
            while told in done:
                said(visible(_sentence(done[told])))
                told += 1
            same += outcome is not None and outcome.verdict == "same"
            show("replayed", len(done), len(found), f"{same:,} the same")

    with shown_count() as show:
        async with engine, anyio.create_task_group() as tasks:
            for _ in range(min(concurrency, len(found))):
                tasks.start_soon(one_by_one)
    return [done[index] for index in range(len(found))]


# -- words ----------------------------------------------------------------------------------------


def _sentence(done: Done) -> str:
    where, outcome, why = done
    if outcome is None:
        return f"{where}: cannot be read: {why}"
    note = f" although {_differences(outcome.obstacles)}" if outcome.obstacles else ""
    match outcome.verdict:
        case "same":
            tokens = sum(each.tokens for each in outcome.answers)
            silent = any(each.logprobs is False for each in outcome.answers)
            return f"{where}: the same {_count(tokens, 'token')}{', other log-probabilities' if silent else ''}{note}"
        case "incomparable":
            return f"{where}: cannot be compared: {_differences(outcome.obstacles)}{_advice(outcome.obstacles)}"
        case "failed":
            return f"{where}: failed: {why}{note}"
    first = next(each for each in outcome.answers if each.at is not None or each.logprobs is False)
    return f"{where}: {_difference(first, outcome)}{note}{_promise(outcome)}"


def _difference(first: Compared, outcome: Outcome) -> str:
    many = len(outcome.answers) > 1
    which = f" of answer {first.choice} to prompt {first.request}" if many else ""
    if first.at is None:
        return f"the tokens are the same, the log-probabilities{which} are not"
    was, now = (
        "the end" if token is None else f"{token} {text!r}"
        for token, text in ((first.recorded, first.recorded_text), (first.replayed, first.replayed_text))
    )
    return f"differs at token {first.at}{which}, behind {first.before!r}: recorded {was}, here {now}"


def _differences(obstacles: Sequence[Obstacle]) -> str:
    return ", ".join(
        f"{each.name} differs (recorded {_short(each.recorded)}, here {_short(each.here)})" for each in obstacles
    )


def _short(fact: str) -> str:
    return repr(fact if len(fact) <= _SHOWN else fact[:_SHOWN] + "…")


def _advice(obstacles: Sequence[Obstacle]) -> str:
    names = {each.name for each in obstacles}
    if "weights" in names:
        return "; --model or --config choose other weights"
    return "" if "media" in names else "; --anyway computes it all the same"


def _promise(outcome: Outcome) -> str:
    if outcome.promised:
        return "; the same was promised: this is a fault of the server or of the machine"
    if outcome.obstacles:
        return ""
    return "; the same was not promised, as the server was not batch-invariant" + (
        "" if outcome.alike else " and was configured differently"
    )


def _summary(done: Sequence[Done], counts: Counter[str]) -> str:
    parts = ", ".join(f"{counts[verdict]:,} {word}" for verdict, word in _WORDS.items() if counts[verdict])
    unpromised = sum(
        outcome is not None and outcome.verdict == "same" and not outcome.promised and not outcome.obstacles
        for _, outcome, _ in done
    )
    note = f"; {unpromised:,} of those the same by no promise: batch_invariant = true makes one" if unpromised else ""
    return f"{_count(len(done), 'receipt')}: {parts}{note}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _document(done: Done) -> dict[str, object]:
    where, outcome, why = done
    if outcome is None:
        return {"where": where, "verdict": "unreadable", "why": why}
    told = dataclasses.asdict(outcome)
    return {"where": where, **told, "obstacles": [each._asdict() for each in outcome.obstacles]}
