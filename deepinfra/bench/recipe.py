"""What a recipe costs beside plain tokenisation of the same text, in the same run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.core.conversation import Conversation, Message, TextPart
from deepinfra.interfaces import OutputParser, Recipe
from deepinfra.interfaces.given import Clock, SystemClock

__all__ = ("RecipeFigure", "RecipeReport", "RecipeRun", "run_recipe")

T = TypeVar("T")

_TURNS = 5
"""By which a round's chat grows."""

_WORDS = (
    *("the", "of", "weather", "in", "Paris", "a question about", "answer", "is", "because", "function", "value"),
    *(
        "def f(x):\n    return x",
        "http://a.b/?c=d",
        "12",
        "3.5",
        "naïve",
        "日本語",
        "🙂",
        "{'k': [1, 2]}",
        "<b>",
        "\n\n",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRun:
    """What to run.

    Attributes:
        chars: Characters of the chat.
        turn: Characters of each of its messages.
        repeat: Rounds; each has a chat of its own, so that nothing of it is in any cache.
        seed: Of the chats.
    """

    chars: int = 200_000
    turn: int = 1_000
    repeat: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFigure:
    """One thing that was measured, in milliseconds (`feed`: microseconds per token).

    Attributes:
        name: `first`: rendering and encoding a chat never seen before; `next`: the same chat, growing turn by turn;
            `feed`: parsing an answer token by token.
        ours: Median over the rounds.
        plain: Median of tokenising the same text with the model's own tokenizer; `None` for `feed`.
        ratio: `ours` over `plain`.
        values: Those of ours, in order: one per round, of `next` five.
    """

    name: str
    ours: float
    plain: float | None
    ratio: float | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `recipe`.
        model: Name of the model.
        recipe: Name of the recipe's class.
        run: What was run.
        figures: What was measured.
        cpu: What else the machine did meanwhile; with `noisy` the figures are not to be trusted.
    """

    kind: str
    model: str
    recipe: str
    run: RecipeRun
    figures: tuple[RecipeFigure, ...]
    cpu: CpuUse


def run_recipe(
    recipe: Recipe,
    encode: Callable[[str], object],
    run: RecipeRun,
    *,
    model: str = "",
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> RecipeReport:
    """Measure an entered recipe; blocks until it is done.

    Args:
        recipe: What to measure.
        encode: Plain tokenisation by the model's own tokenizer.
        run: What to run.
        model: The model's name.
        clock: Time.
        progress: Told what is measured next.
    """
    clock = clock or SystemClock()
    draw = random.Random(run.seed)
    watch, began = CpuWatch(), clock.now()
    values: dict[str, list[float]] = {name: [] for name in ("first", "first plain", "next", "next plain", "feed")}

    def timed(name: str, call: Callable[[], T], scale: float = 1e3) -> T:
        start = clock.now()
        made = call()
        values[name].append((clock.now() - start) * scale)
        return made

    recipe.render(Conversation(messages=(_message(draw, "user", 100),)))
    for index in range(run.repeat):
        progress(f"round {index + 1} of {run.repeat}")
        chat = _chat(draw, run)
        prompt = timed("first", partial(recipe.render, chat))
        timed("first plain", partial(encode, prompt.text))
        for _ in range(_TURNS):
            turn = (_message(draw, "assistant", 400), _message(draw, "user", 200))
            chat = replace(chat, messages=(*chat.messages, *turn))
            prompt = timed("next", partial(recipe.render, chat))
        timed("next plain", partial(encode, prompt.text))
        ids = recipe.tokenizer.encode(_words(draw, 10_000))
        timed("feed", partial(_feed, recipe.parser(prompt), ids), 1e6 / len(ids))
    return RecipeReport(
        kind="recipe",
        model=model,
        recipe=type(recipe).__name__,
        run=run,
        figures=tuple(_figure(name, values) for name in ("first", "next", "feed")),
        cpu=watch.stop(clock.now() - began),
    )


def _feed(parser: OutputParser, ids: list[int]) -> None:
    for token in ids:
        parser.feed((token,))


def _figure(name: str, values: dict[str, list[float]]) -> RecipeFigure:
    ours = statistics.median(values[name])
    other = values.get(f"{name} plain")
    plain = statistics.median(other) if other else None
    return RecipeFigure(
        name=name, ours=ours, plain=plain, ratio=ours / plain if plain else None, values=tuple(values[name])
    )


def _chat(draw: random.Random, run: RecipeRun) -> Conversation:
    """An odd number of turns, the last one the user's."""
    turns = max(1, run.chars // run.turn) | 1
    return Conversation(
        messages=tuple(_message(draw, "assistant" if at % 2 else "user", run.turn) for at in range(turns))
    )


def _message(draw: random.Random, role: str, chars: int) -> Message:
    return Message(role="assistant" if role == "assistant" else "user", content=(TextPart(_words(draw, chars)),))


def _words(draw: random.Random, chars: int) -> str:
    words: list[str] = []
    size = 0
    while size < chars:
        words.append(f"{draw.choice(_WORDS)}{draw.randrange(100)}" if draw.random() < 0.1 else draw.choice(_WORDS))
        size += len(words[-1]) + 1
    return " ".join(words)
