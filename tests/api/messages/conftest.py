"""Served models that say what they are told to, and random requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from anthropic import Anthropic


class Model:
    """A recipe over recorded answers, served.

    Attributes:
        recorded: See `deepinfra.testing.recorded`.
        client: Asks it.
    """

    def __init__(self, speaker: Any, client: Anthropic) -> None:
        self.recorded, self.client, self._speaker = speaker.record, client, speaker

    def says(self, *texts: str) -> tuple[int, ...]:
        """What it will answer, markers as the control tokens they are; the first answer's ids."""
        ids: tuple[int, ...] = self._speaker.says(*texts)[0]
        return ids

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """What it was asked since then."""
        prompts: list[tuple[int, ...]] = self._speaker.prompts
        return prompts


@pytest.fixture(scope="session")
def model_of(speaker_of: Callable[[Any], Any]) -> Iterator[Callable[[Any], Model]]:
    """`model_of(family)`: one of `FAMILIES` behind a server, named `m`; each is started once."""
    with ExitStack() as stack:

        @cache
        def model_of(family: Any) -> Model:
            speaker = speaker_of(family)
            client = Anthropic(base_url=speaker.url, api_key="none", max_retries=0, timeout=30)
            return Model(speaker, stack.enter_context(client))

        yield model_of


@pytest.fixture
def model(model_of: Callable[[Any], Model]) -> Model:
    """DeepSeek V4's."""
    return model_of("dsml")


_WORDS = ("Hello", "a <｜User｜> b", "日本語 🙂", "line\n\nline", "</think>", " spaced ", '"quoted"', "x")


def _request(rng: random.Random, model: str) -> dict[str, Any]:
    """A request within what the reference does right; see fact 1.9 for the rest."""

    def words() -> Any:
        return rng.choice(_WORDS) if rng.random() < 0.5 else [text() for _ in range(rng.randint(1, 3))]

    def text() -> dict[str, Any]:
        return {"type": "text", "text": rng.choice(_WORDS)}

    messages: list[dict[str, Any]] = [{"role": "user", "content": words()}]
    for turn in range(rng.randint(0, 3)):
        said = [text() for _ in range(rng.randint(0, 2))]
        if rng.random() < 0.5:
            said.insert(0, {"type": "thinking", "thinking": rng.choice(_WORDS), "signature": "s"})
        calls = [
            {
                "type": "tool_use",
                "id": f"t{turn}{n}",
                "name": "f",
                "input": {rng.choice(["city", "日"]): rng.choice([1, "é", [None]])},
            }
            for n in range(rng.randint(0, 2))
        ]
        if not calls and not any(block["type"] == "text" for block in said):
            said.append(text())
        messages.append({"role": "assistant", "content": said + calls})
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": words()} for call in calls]
        rng.shuffle(results)
        more = [text() for _ in range(rng.randint(0 if results else 1, 2))]
        messages.append({"role": "user", "content": results + more})
        if rng.random() < 0.2:
            messages.append({"role": "user", "content": words()})
    made: dict[str, Any] = {"model": model, "max_tokens": 4000, "messages": messages}
    if rng.random() < 0.5:
        made["system"] = words()
    if rng.random() < 0.5:
        schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
        made["tools"] = [{"name": "f", "description": rng.choice(_WORDS), "input_schema": schema}]
    if rng.random() < 0.7:
        made["thinking"] = rng.choice(
            [{"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}]
        )
    if rng.random() < 0.5:
        made["output_config"] = {"effort": rng.choice(["low", "medium", "high", "xhigh", "max"])}
    return made


@pytest.fixture
def random_request() -> Callable[[int, str], dict[str, Any]]:
    """`random_request(seed, model)`: a body that DeepSeek's own library takes and understands right."""
    return lambda seed, model: _request(random.Random(seed), model)
