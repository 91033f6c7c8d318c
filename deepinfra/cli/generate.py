"""`deepinfra generate`: one answer without a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.setup import OFFLINE, Config, Model, blueprint_for, fetch_models

if TYPE_CHECKING:
    from deepinfra.core.request import GenerateRequest
    from deepinfra.engine import Engine

__all__ = ("generate",)


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to ask.")],
    model: Model = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of the answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest token.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue PROMPT as it stands, without a chat template.")] = False,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, reasoning, reason, seed, model, usage.")
    ] = False,
) -> None:
    """Answer one prompt in this process and print the answer as it comes."""
    from deepinfra.core.conversation import Conversation, Message, TextPart
    from deepinfra.core.request import GenerateRequest, TextInput
    from deepinfra.core.sampling import SamplingParams

    conversation = Conversation(messages=(Message(role="user", content=(TextPart(prompt),)),))
    request = GenerateRequest(
        input=TextInput(prompt) if raw else conversation,
        sampling=SamplingParams(temperature=temperature),
        max_tokens=max_tokens,
        seed=seed,
    )
    blueprint = blueprint_for(config, {"model": model}, defaults=OFFLINE).without_stores()
    fetch_models(blueprint)
    anyio.run(_generate, blueprint.build(), request, as_json)


async def _generate(engine: Engine, request: GenerateRequest, as_json: bool) -> None:
    from deepinfra.cli.talk import answer, write

    async with engine:
        answered = await answer(engine, request, (lambda text: None) if as_json else write)
    if not as_json:
        write("\n")
        return
    usage = answered.usage
    document = {
        "text": answered.text,
        "reasoning": answered.reasoning,
        "reason": answered.reason,
        "seed": answered.seed,
        "model": engine.name,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached.total,
        },
    }
    write(json.dumps(document, ensure_ascii=False) + "\n")
