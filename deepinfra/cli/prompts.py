"""Requests in any of the APIs' words, and the prompts that a configured recipe makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

import anyio
import typer

from deepinfra.cli.setup import OFFLINE, blueprint_for, fetch_models

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from deepinfra.core.conversation import JsonValue
    from deepinfra.core.request import GenerateRequest, Prompt, PromptInput
    from deepinfra.interfaces import Recipe

__all__ = ("Api", "ApiOption", "RecipeName", "api_of", "inputs_of", "prompt_of", "requests_of", "with_recipe")

T = TypeVar("T")

Api: TypeAlias = Literal["chat", "completions", "responses", "messages"]
_KEYS: tuple[tuple[str, Api], ...] = (("input", "responses"), ("prompt", "completions"), ("system", "messages"))

RecipeName = Annotated[
    str | None, typer.Option("--recipe", metavar="NAME", help="Recipe; default: the configuration's.")
]
ApiOption = Annotated[Api | None, typer.Option("--api", help="The API the request is for; default: by its fields.")]


def with_recipe(use: Callable[[Recipe], T], config: Path | None, model: str | None, name: str | None) -> T:
    """What `use` makes of the configured recipe, entered."""
    keywords: dict[str, object] = {"model": model, "recipe": None if name is None else {"use": name}}
    blueprint = blueprint_for(config, keywords, defaults=OFFLINE)
    fetch_models(blueprint)
    built = blueprint.recipe.build()

    async def entered() -> T:
        async with built:
            return use(built)

    return anyio.run(entered)


def inputs_of(raw: Mapping[str, JsonValue], api: Api | None) -> list[PromptInput]:
    """The prompts of a request's body; see `requests_of`."""
    return [request.input for request in requests_of(raw, api)]


def api_of(raw: Mapping[str, JsonValue]) -> Api:
    """The API that a body looks like a request for."""
    return next((api for key, api in _KEYS if key in raw), "chat")


def requests_of(raw: Mapping[str, JsonValue], api: Api | None) -> list[GenerateRequest]:
    """What a request's body asks for; a model's name, which says nothing here, may be left out.

    Raises:
        RequestError: Names the field that is wrong.
    """
    from datetime import UTC, datetime

    from deepinfra.api.chat.request import CHAT
    from deepinfra.api.completions.request import COMPLETIONS
    from deepinfra.api.messages.request import MESSAGES
    from deepinfra.api.protocol import Received, WireProtocol
    from deepinfra.api.responses.request import Responses
    from deepinfra.api.responses.store import ResponseStore
    from deepinfra.interfaces.given import SystemClock

    name = api or api_of(raw)
    clock = SystemClock()
    protocols: dict[Api, WireProtocol] = {
        "chat": CHAT,
        "completions": COMPLETIONS,
        "messages": MESSAGES,
        "responses": Responses(ResponseStore(clock), clock),
    }
    body: dict[str, JsonValue] = {"model": "-", **({"max_tokens": 1} if name == "messages" else {}), **raw}
    received = Received(headers={}, now=datetime.fromtimestamp(clock.wall(), UTC).date().isoformat(), max_choices=1024)
    return list(protocols[name].parse(body, received).requests)


def prompt_of(built: Recipe, asked: PromptInput) -> Prompt:
    """What a recipe makes of it, as the engine lets it."""
    from deepinfra.core.conversation import Conversation
    from deepinfra.core.request import Prompt, TextInput

    if isinstance(asked, Conversation):
        return built.render(asked)
    if isinstance(asked, TextInput):
        return built.text(asked)
    return asked if isinstance(asked, Prompt) else Prompt(ids=asked)
