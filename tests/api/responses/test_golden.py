"""Requests of the reference's Responses protocol become the conversations that the reference rendered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
