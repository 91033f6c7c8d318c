"""A real model under constraints: whatever it would rather say, its answers are valid and end."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import jsonschema
import pytest

from deepinfra.core.conversation import Constraint, Conversation, Message, TextPart
from deepinfra.core.events import Finished, TextDelta
from deepinfra.core.request import FinishReason, GenerateRequest, TextInput
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine, Pool
from deepinfra.executors.torch import TorchExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed
from deepinfra.speculators import Ngram
from deepinfra.testing.schemas import random_schema

pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""The model is what is new here and what takes long; both backends are under the law of `test_whole_engine.py`."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer's text, how it ended, and how many tokens it has."""

    text: str
    reason: FinishReason
    tokens: int


async def answer(engine: Engine, request: GenerateRequest) -> Answered:
    async with engine.generate(request) as stream:
        events = [event async for event in stream]
    last = events[-1]
    assert isinstance(last, Finished), last
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return Answered(text, last.reason, last.usage.completion_tokens)


async def answers(
    path: Path, requests: Sequence[GenerateRequest], *, drafts: bool = True
) -> tuple[list[Answered], int]:
    """Ask SmolLM2 all at once; the answers, and how many drafts were accepted."""
    executor = TorchExecutor(str(path), dtype="float32", num_blocks=600)
    pool = Pool(Bucketed(), executor, speculator=Ngram() if drafts else None)
    given: dict[int, Answered] = {}

    async def one(index: int, request: GenerateRequest) -> None:
        given[index] = await answer(engine, request)

    async with Engine(ChatTemplate(str(path)), pool) as engine:
        async with anyio.create_task_group() as tasks:
            for index, request in enumerate(requests):
                tasks.start_soon(one, index, request)
        accepted = pool.stats().drafts_accepted
    return [given[index] for index in range(len(requests))], accepted


def said(text: str) -> Conversation:
    return Conversation(messages=(Message(role="user", content=(TextPart(text),)),))


async def check_random_schemas(path: Path, count: int, depth: int = 3) -> None:
    """Half at temperature 0 and half at 1, with as many tokens as the schema's longest value may take."""
    schemas = [random_schema(random.Random(seed), depth) for seed in range(count)]
    requests = [
        GenerateRequest(
            input=said(f"Describe {', '.join(bounded.schema['properties'])} in JSON."),
            constraint=Constraint(kind="json_schema", source=json.dumps(bounded.schema)),
            max_tokens=bounded.nbytes + 1,
            sampling=SamplingParams(temperature=float(seed % 2)),
            seed=seed,
        )
        for seed, bounded in enumerate(schemas)
    ]
    given, accepted = await answers(path, requests)
    checker = jsonschema.FormatChecker()
    for bounded, each in zip(schemas, given, strict=True):
        assert each.reason == "stop", each
        jsonschema.Draft202012Validator(bounded.schema, format_checker=checker).validate(json.loads(each.text))
    assert accepted > 0


async def test_random_schemas_are_answered_validly_and_to_the_end(smollm2_path: Path) -> None:
    await check_random_schemas(smollm2_path, 6, depth=1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_200_of_200_random_schemas_are_answered_validly_and_to_the_end(smollm2_path: Path) -> None:
    await check_random_schemas(smollm2_path, 200)


async def test_an_answer_cut_short_says_so_and_drafts_change_no_constrained_text(smollm2_path: Path) -> None:
    schema = json.dumps({"type": "array", "items": {"enum": ["apple", "pear"]}, "minItems": 6, "maxItems": 6})
    requests = [
        GenerateRequest(
            input=said("List some fruit."),
            constraint=Constraint(kind="json_schema", source=schema),
            max_tokens=limit,
            sampling=SamplingParams(temperature=temperature),
            seed=5,
        )
        for limit in (7, 40)
        for temperature in (0.0, 1.0)
    ]
    drafted, accepted = await answers(smollm2_path, requests)
    plain, none = await answers(smollm2_path, requests, drafts=False)
    assert drafted == plain
    assert accepted > none == 0
    assert [each.reason for each in drafted] == ["length", "length", "stop", "stop"]
    for cut, whole in zip(drafted[:2], drafted[2:], strict=True):
        assert cut.tokens == 7
        assert whole.text.startswith(cut.text)
        assert len(json.loads(whole.text)) == 6


async def test_no_bias_gets_past_a_constraint(smollm2_path: Path) -> None:
    recipe = ChatTemplate(str(smollm2_path))
    (wanted,) = recipe.tokenizer.encode(" the")
    bias = tuple((token, 100.0) for token in (wanted, *recipe.tokenizer.eos_ids))
    request = GenerateRequest(
        input=TextInput("Once upon a time"),
        constraint=Constraint(kind="regex", source="[0-9]{3}-[0-9]{3}"),
        max_tokens=20,
        sampling=SamplingParams(temperature=1.0, logit_bias=bias),
        seed=1,
    )
    ((given,), _) = await answers(smollm2_path, [request])
    assert given.reason == "stop"
    assert [len(part) for part in given.text.split("-")] == [3, 3]
    assert given.text.replace("-", "").isdigit()
