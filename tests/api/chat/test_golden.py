"""Chat requests rendered by us and by DeepSeek's own library: the conversation is the one it made."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import deepseek_recipe
import pytest

from deepinfra.api.chat.request import CHAT
from deepinfra.api.protocol import Received
from deepinfra.core.conversation import Conversation
from deepinfra.recipes.deepseek.rendering import render

RECORDS = [
    record
    for record in json.loads((Path(__file__).parents[2] / "data" / "golden" / "deepseek-recipe.json").read_text())
    if record["protocol"] == "chat.completions"
]
NAMES = {"v4": "DeepSeek-V4-Pro", "v4.1": "DeepSeek-V4.1-Flash"}


def prompt(request: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    call = CHAT.parse(request, Received(headers={}, now="2026-01-02", max_choices=1))
    conversation = call.requests[0].input
    assert isinstance(conversation, Conversation)
    rendered = render(conversation, "v4.1" if "V4.1" in request["model"] else "v4")
    return rendered.text, list(rendered.ranges)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record['id']}-{record['model']}")
def test_golden_requests_become_the_prompts_of_the_reference(record: dict[str, Any]) -> None:
    expected = [tuple(each) for each in record["special_ranges"]]
    assert prompt({**record["request"], "model": record["model"]}) == (record["prompt"], expected)


def test_there_are_golden_records() -> None:
    assert len(RECORDS) == 54


WORDS = ("Hello", "a <｜User｜> b", "日本語 🙂", "line\n\nline", "</think>", " spaced ", '"quoted"', "x")


def made(rng: random.Random, version: str) -> dict[str, Any]:
    """A request within what the reference does right; see fact 1.9 for the rest."""

    def words() -> Any:
        parts = [{"type": "text", "text": rng.choice(WORDS)} for _ in range(rng.randint(1, 3))]
        return rng.choice(WORDS) if rng.random() < 0.5 else parts

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    messages.append({"role": "user", "content": words()})
    for turn in range(rng.randint(0, 3)):
        calls = [
            {
                "id": f"c{turn}{n}",
                "type": "function",
                "function": {
                    "name": "f",
                    "arguments": rng.choice(["{bad", "", json.dumps({rng.choice(["city", "日"]): [1, "é", None]})]),
                },
            }
            for n in range(rng.randint(0, 2))
        ]
        said: dict[str, Any] = {"role": "assistant", "content": rng.choice(WORDS)}
        if calls:
            said |= {"tool_calls": calls, "content": rng.choice([None, "", *WORDS])}
        if rng.random() < 0.5:
            said["reasoning_content"] = rng.choice(WORDS)
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": words()} for call in calls]
        rng.shuffle(answers)
        messages += [said, *answers]
        if not answers or rng.random() < 0.5:
            messages.append({"role": "user", "content": words()})
        if rng.random() < 0.2:
            messages.append({"role": rng.choice(["system", "user"]), "content": words()})
    if rng.random() < 0.2:
        messages.append({"role": "latest_reminder", "content": rng.choice(WORDS)})
    asked: dict[str, Any] = {"model": NAMES[version], "messages": messages}
    if rng.random() < 0.5:
        schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
        function = {"name": "f", "description": rng.choice(WORDS), "parameters": schema, "strict": False}
        asked["tools"] = [{"type": "function", "function": function}]
        asked["tool_choice"] = rng.choice(["none", "auto"])
    if rng.random() < 0.5:
        asked["thinking"] = {"type": rng.choice(["enabled", "disabled"])}
    if rng.random() < 0.5:
        asked["reasoning_effort"] = rng.choice(["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"])
    return asked


@pytest.mark.parametrize("version", ["v4", "v4.1"])
def test_random_requests_become_the_prompts_of_the_reference(version: str) -> None:
    encoding = (deepseek_recipe.DeepseekV4Encoding if version == "v4" else deepseek_recipe.DeepseekV41Encoding)()
    for seed in range(300):
        body = made(random.Random(seed), version)
        converted = deepseek_recipe.ChatCompletionRequest(body).convert(deepseek_recipe.ConversionOptions())
        expected = encoding.render_conversation(converted.conversation)
        assert prompt(body) == (expected.prompt, [tuple(each) for each in expected.special_ranges]), json.dumps(body)
