"""Messages requests rendered by us and by DeepSeek's own library: the conversation is the one it made."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("version", ["v4", "v4.1"])
def test_random_requests_become_the_prompts_of_the_reference(version: str, random_request: Any) -> None:
    encoding = (deepseek_recipe.DeepseekV4Encoding if version == "v4" else deepseek_recipe.DeepseekV41Encoding)()
    for seed in range(200):
        body = random_request(seed, NAMES[version])
        converted = deepseek_recipe.MessagesRequest(body).convert(deepseek_recipe.ConversionOptions())
        expected = encoding.render_conversation(converted.conversation)
        assert prompt(body) == (expected.prompt, [tuple(each) for each in expected.special_ranges]), json.dumps(body)
