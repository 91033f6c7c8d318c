"""Messages requests rendered by us and by DeepSeek's own library: the conversation is the one it made."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import deepseek_recipe
import pytest

from deepinfra.api.messages.request import MESSAGES
from deepinfra.api.protocol import Received
from deepinfra.core.conversation import Conversation
from deepinfra.recipes.deepseek.rendering import render

RECORDS = [
    record
    for record in json.loads((Path(__file__).parents[2] / "data" / "golden" / "deepseek-recipe.json").read_text())
    if record["protocol"] == "messages"
]
NAMES = {"v4": "DeepSeek-V4-Pro", "v4.1": "DeepSeek-V4.1-Flash"}


def prompt(request: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    call = MESSAGES.parse(request, Received(headers={}, now="2026-01-02", max_choices=1))
    conversation = call.requests[0].input
    assert isinstance(conversation, Conversation)
    rendered = render(conversation, "v4.1" if "V4.1" in request["model"] else "v4")
    return rendered.text, list(rendered.ranges)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record['id']}-{record['model']}")
def test_golden_requests_become_the_prompts_of_the_reference(record: dict[str, Any]) -> None:
    expected = record["prompt"]
    if record["id"] == "messages_prefill":  # fact 1.9: it closes the turn that is to be continued and opens another
        expected = expected.removesuffix("<｜end▁of▁sentence｜><｜Assistant｜></think>")
        assert expected != record["prompt"]
    assert prompt(record["request"])[0] == expected


WORDS = ("Hello", "a <｜User｜> b", "日本語 🙂", "line\n\nline", "</think>", " spaced ", '"quoted"', "x")


def request(rng: random.Random, version: str) -> dict[str, Any]:
    """A request within what the reference does right; see fact 1.9 for the rest."""

    def words() -> Any:
        return rng.choice(WORDS) if rng.random() < 0.5 else [text() for _ in range(rng.randint(1, 3))]

    def text() -> dict[str, Any]:
        return {"type": "text", "text": rng.choice(WORDS)}

    messages: list[dict[str, Any]] = [{"role": "user", "content": words()}]
    for turn in range(rng.randint(0, 3)):
        said = [text() for _ in range(rng.randint(0, 2))]
        if rng.random() < 0.5:
            said.insert(0, {"type": "thinking", "thinking": rng.choice(WORDS), "signature": "s"})
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
    made: dict[str, Any] = {"model": NAMES[version], "max_tokens": 4000, "messages": messages}
    if rng.random() < 0.5:
        made["system"] = words()
    if rng.random() < 0.5:
        schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
        made["tools"] = [{"name": "f", "description": rng.choice(WORDS), "input_schema": schema}]
    if rng.random() < 0.7:
        made["thinking"] = rng.choice(
            [{"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}]
        )
    if rng.random() < 0.5:
        made["output_config"] = {"effort": rng.choice(["low", "medium", "high", "xhigh", "max"])}
    return made


@pytest.mark.parametrize("version", ["v4", "v4.1"])
def test_random_requests_become_the_prompts_of_the_reference(version: str) -> None:
    encoding = (deepseek_recipe.DeepseekV4Encoding if version == "v4" else deepseek_recipe.DeepseekV41Encoding)()
    for seed in range(200):
        body = request(random.Random(seed), version)
        converted = deepseek_recipe.MessagesRequest(body).convert(deepseek_recipe.ConversionOptions())
        expected = encoding.render_conversation(converted.conversation)
        assert prompt(body) == (expected.prompt, [tuple(each) for each in expected.special_ranges]), json.dumps(body)
