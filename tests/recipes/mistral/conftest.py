"""Mistral's tokenizers: those that mistral-common ships, and later versions made of the last of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mistral_common
import pytest
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from deepinfra.recipes import Mistral

DATA = Path(mistral_common.__file__).parent / "data"
SHIPPED = {
    "v1": "tokenizer.model.v1",
    "v2": "mistral_instruct_tokenizer_240216.model.v2",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
    "v3-tekken": "tekken_240718.json",
}
MADE = {
    "v11": ("[ARGS]", "[CALL_ID]"),
    "v13": ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "v15": ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"),
}
VERSIONS = (*SHIPPED, *MADE)


@pytest.fixture(scope="session")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tokenizer's file of a version; later versions have a vocabulary of 20,000 tokens."""

    @cache
    def made(version: str) -> Path:
        if version in SHIPPED:
            return DATA / SHIPPED[version]
        definition: dict[str, Any] = json.loads((DATA / "tekken_240718.json").read_text())
        special = [dict(token) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
        special += [
            {"rank": len(special) + i, "token_str": text, "is_control": True} for i, text in enumerate(MADE[version])
        ]
        config = definition["config"] | {"version": version, "default_vocab_size": 21000}
        definition |= {"config": config, "special_tokens": special, "vocab": definition["vocab"][:20000]}
        if version == "v15":
            definition["model_settings_builder"] = {
                "reasoning_effort": {
                    "type": "enum",
                    "accepts_none": True,
                    "default": "none",
                    "values": ["none", "high"],
                },
                "json_schema": {"type": "json_schema", "accepts_none": False, "default": None},
            }
        folder = tmp_path_factory.mktemp(version)
        (folder / "tekken.json").write_text(json.dumps(definition))
        return folder / "tekken.json"

    return made


@pytest.fixture(scope="session")
def recipe_of(file_of: Callable[[str], Path]) -> Callable[[str], Mistral]:
    """A recipe of a version, built once."""
    return cache(lambda version: Mistral(file_of(version)))


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def recipe(version: str, recipe_of: Callable[[str], Mistral]) -> Mistral:
    return recipe_of(version)
