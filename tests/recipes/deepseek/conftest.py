"""DeepSeek's tokenizer, recipes that tests share, and the golden records as our protocols read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from deepinfra.api.chat.request import CHAT
from deepinfra.api.messages.request import MESSAGES
from deepinfra.api.protocol import Received, WireProtocol
from deepinfra.api.responses.request import Responses
from deepinfra.api.responses.store import ResponseStore
from deepinfra.core.conversation import Conversation
from deepinfra.recipes.deepseek.recipe import DeepSeek
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.deepseek import DeepSeekTextModel

RECORDS = json.loads((Path(__file__).parents[2] / "data" / "golden" / "deepseek-recipe.json").read_text())


@cache
def _model(version: str) -> DeepSeekTextModel:
    return DeepSeekTextModel(("<｜System｜>",) if version == "v4.1" else ())


@cache
def _recipe(version: Any) -> DeepSeek:
    return DeepSeek(_model(version), version=version)


@cache
def _naive(version: str) -> tokenizers.Tokenizer:
    return _model(version).tokenizer()


@pytest.fixture(params=["v4", "v4.1"])
def version(request: pytest.FixtureRequest) -> str:
    """Both versions of the format."""
    wanted: str = request.param
    return wanted


@pytest.fixture
def recipe(version: str) -> DeepSeek:
    """A recipe of that version, built once; V4.1's has V4's tokenizer with the token that it lacks."""
    return _recipe(version)


@pytest.fixture(scope="session")
def shared() -> Callable[[str], DeepSeek]:
    """The same recipes by version."""
    return _recipe


@pytest.fixture
def naive(version: str) -> Callable[[str], list[int]]:
    """Ids of a prompt as every other stack makes them: markers in it become control tokens, whoever wrote them."""
    return lambda text: _naive(version).encode(text, add_special_tokens=False).ids


@pytest.fixture
def golden() -> Callable[[str, str], dict[str, Any]]:
    """A golden record by name and version."""
    by_name = {(record["id"], "v4.1" if "4.1" in record["model"] else "v4"): record for record in RECORDS}
    return lambda name, version: by_name[name, version]


@pytest.fixture
def conversation_of() -> Callable[[Mapping[str, Any]], Conversation]:
    """What our protocols make of a golden record's request."""
    received = Received(headers={}, now="2026-01-02", max_choices=1)
    protocols: dict[str, WireProtocol] = {
        "chat.completions": CHAT,
        "messages": MESSAGES,
        "responses": Responses(ResponseStore(ManualClock()), ManualClock()),
    }

    def conversation(record: Mapping[str, Any]) -> Conversation:
        text = json.dumps(record["request"]).replace("https://a/b.png", "data:image/png;base64,iVBORw0KGgo=")
        text = text.replace(', "detail": "low"', "")  # images are inside requests here, and of one size
        call = protocols[record["protocol"]].parse(json.loads(text), received)
        made = call.requests[0].input
        assert isinstance(made, Conversation)
        return made

    return conversation


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per golden record."""
    if "record" in metafunc.fixturenames:
        names = [f"{'v4.1' if '4.1' in record['model'] else 'v4'}-{record['id']}" for record in RECORDS]
        metafunc.parametrize("record", RECORDS, ids=names)
