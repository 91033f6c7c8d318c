from __future__ import annotations

from typing import Any

import pytest

from deepinfra.api.completions.request import COMPLETIONS
from deepinfra.api.protocol import Received
from deepinfra.core.request import GenerateRequest, TextInput


def parse(prompt: Any, **fields: Any) -> tuple[GenerateRequest, ...]:
    received = Received(headers={}, now="2026-11-29", max_choices=8)
    return COMPLETIONS.parse({"model": "toy", "prompt": prompt, **fields}, received).requests


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("a", [TextInput("a")]),
        ("", [TextInput("")]),
        ([1, 2], [(1, 2)]),
        (["a", "b"], [TextInput("a"), TextInput("b")]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_a_prompt_has_four_shapes(prompt: Any, inputs: list[Any]) -> None:
    assert [request.input for request in parse(prompt)] == inputs


def test_sixteen_tokens_are_the_default_of_this_protocol() -> None:
    assert [request.max_tokens for request in parse(["a", "b"])] == [16, 16]


def test_best_of_may_repeat_n() -> None:
    (request,) = parse("a", n=2, best_of=2)
    assert request.n == 2


def test_logprobs_are_a_number_here() -> None:
    assert parse("a", logprobs=0)[0].sampling.logprobs == 0
    assert parse("a", logprobs=5)[0].sampling.logprobs == 5
    assert parse("a")[0].sampling.logprobs is None
