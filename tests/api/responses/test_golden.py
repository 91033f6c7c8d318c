"""Requests of the reference's Responses protocol become the conversations that the reference rendered."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_recipe
import pytest

from deepinfra.core.conversation import Conversation
from deepinfra.recipes.deepseek.rendering import render

RECORDS = [
    record
    for record in json.loads((Path(__file__).parents[2] / "data" / "golden" / "deepseek-recipe.json").read_text())
    if record["protocol"] == "responses"
]


def inlined(value: Any) -> Any:
    """The request with its images inside: this server fetches none."""
    text = json.dumps(value).replace("https://a/b.png", "data:image/png;base64,iVBORw0KGgo=")
    return json.loads(text)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record['id']}-{record['model']}")
def test_a_request_renders_to_the_references_prompt(record: dict[str, Any], talk: Callable[..., Conversation]) -> None:
    conversation = talk(**inlined(record["request"]))
    rendered = render(conversation, "v4.1" if "4.1" in record["model"] else "v4")
    assert rendered.text == record["prompt"]
    assert [list(each) for each in rendered.ranges] == record["special_ranges"]


def test_there_are_golden_records() -> None:
    assert len(RECORDS) == 6


WORDS = ("Hello", "a <｜User｜> b", "日本語 🙂", "line\n\nline", "</think>", " spaced ", '"quoted"', "x")
NAMES = {"v4": "DeepSeek-V4-Pro", "v4.1": "DeepSeek-V4.1-Flash"}


def made(rng: random.Random, version: str) -> dict[str, Any]:
    """A request within what the reference does right; see fact 1.9 for the rest."""

    def words(kind: str = "input_text") -> Any:
        parts = [{"type": kind, "text": rng.choice(WORDS)} for _ in range(rng.randint(1, 3))]
        return rng.choice(WORDS) if rng.random() < 0.5 else parts

    items: list[dict[str, Any]] = [{"role": "user", "content": words()}]
    for turn in range(rng.randint(0, 3)):
        if rng.random() < 0.5:
            thought = [{"type": "reasoning_text", "text": rng.choice(WORDS)}]
            items.append({"type": "reasoning", "id": f"rs_{turn}", "summary": [], "content": thought})
        calls = [
            {
                "type": "function_call",
                "call_id": f"c{turn}{n}",
                "name": "f",
                "arguments": json.dumps({rng.choice(["city", "日"]): rng.choice([1, "é", [None]])}),
            }
            for n in range(rng.randint(0, 2))
        ]
        if not calls or rng.random() < 0.5:
            text = words("output_text")
            items.append({"role": "assistant", "content": text, "id": f"msg_{turn}", "type": "message"})
            items[-1] |= {"status": "completed"}
        outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": words()} for call in calls]
        rng.shuffle(outputs)
        items += calls + outputs
        if not outputs or rng.random() < 0.5:
            items.append({"role": "user", "content": words()})
        if rng.random() < 0.2:
            items.append({"role": rng.choice(["system", "developer", "user"]), "content": words()})
    asked: dict[str, Any] = {"model": NAMES[version], "input": items}
    if rng.random() < 0.5:
        asked["instructions"] = rng.choice(WORDS)
    if rng.random() < 0.5:
        schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
        description = rng.choice(WORDS)
        asked["tools"] = [
            {"type": "function", "name": "f", "description": description, "parameters": schema, "strict": False}
        ]
    if rng.random() < 0.7:
        asked["reasoning"] = {"effort": rng.choice(["none", "low", "medium", "high", "xhigh", "max"])}
    return asked


@pytest.mark.parametrize("version", ["v4", "v4.1"])
def test_random_requests_become_the_references_prompts(version: Any, talk: Callable[..., Conversation]) -> None:
    encoding = (deepseek_recipe.DeepseekV4Encoding if version == "v4" else deepseek_recipe.DeepseekV41Encoding)()
    for seed in range(200):
        body = made(random.Random(seed), version)
        converted = deepseek_recipe.ResponsesRequest(body).convert(deepseek_recipe.ConversionOptions())
        expected = encoding.render_conversation(converted.conversation)
        rendered = render(talk(**body), version)
        assert rendered.text == expected.prompt, json.dumps(body)
        assert list(rendered.ranges) == [tuple(each) for each in expected.special_ranges]
