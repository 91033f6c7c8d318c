"""The same text from other arrangements of parts: split pools, drafts, several engines in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Server, Start
    from tests.conftest import Outside

pytestmark = pytest.mark.timeout(400)

EXECUTOR = '{ use = "torch", dtype = "float32", threads = 1, num_blocks = 256, process = true, weights = "dense" }'

SPLIT = f"""
[[prefill]]
executor = {EXECUTOR}

[[decode]]
executor = {EXECUTOR}
"""

DRAFTING = f"""
[pool]
executor = {EXECUTOR}
speculator = {{ use = "ngram" }}
"""

FRUIT = "apple, pear, plum, cherry, " * 6

BODIES: list[dict[str, Any]] = [
    {"messages": "Why do leaves fall?", "max_tokens": 12},
    {"messages": "Go on: " + FRUIT, "max_tokens": 20, "temperature": 0.9, "seed": 9},
    {"messages": "Invent a name.", "max_tokens": 8, "temperature": 1.0, "seed": 4, "n": 2, "logprobs": True},
]


def answers(server: Server, **fields: Any) -> list[Any]:
    """Every body's answers: text, tokens and why they ended."""
    return [
        [
            (choice.message.content, choice.finish_reason, tokens(choice.logprobs))
            for choice in server.chat(**body, **fields).choices
        ]
        for body in BODIES
    ]


def tokens(logprobs: Any) -> list[str]:
    return [entry.token for entry in logprobs.content] if logprobs else []


def test_split_pools_from_a_file_give_the_text_of_one_pool(start: Start, outside: Outside, server: Server) -> None:
    with start(outside, SPLIT) as split:
        assert len(split.children()) == 2
        assert answers(split) == answers(server)
        split.free()
        assert split.metric("steps_total", pool="prefill-0") < split.metric("steps_total", pool="decode-0")
        assert split.stop() == 0


APP = """
import deepinfra

app = deepinfra.asgi({
    "plain": deepinfra.from_toml("plain.toml"),
    "drafting": deepinfra.from_toml("deepinfra.toml"),
})
"""


@pytest.fixture(scope="module")
def two(start: Start, make_outside: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One process that serves the model under two names: `plain`, and `drafting` with a speculator."""
    outside = make_outside(tmp_path_factory.mktemp("two"))
    (outside.folder / "app.py").write_text(APP)
    (outside.folder / "plain.toml").write_text(f'[pool]\nexecutor = {EXECUTOR}\nstore = {{ use = "none" }}\n')
    with start(outside, DRAFTING, command=("uvicorn", "app:app", "--port", "0"), model="plain") as two:
        yield two
        assert two.stop() in (0, -15)


def test_drafts_change_no_text_and_repetition_is_drafted(two: Server) -> None:
    assert answers(two, model="drafting") == answers(two, model="plain")
    asked: dict[str, Any] = {"prompt": FRUIT, "max_tokens": 32}
    for sampled in ({"temperature": 0}, {"temperature": 0.9, "seed": 2}):
        plain, drafted = (two.client.completions.create(model=m, **asked, **sampled) for m in ("plain", "drafting"))
        assert plain.choices[0].text == drafted.choices[0].text
    # Thirty-two tokens of a repetition, twice, in well under 64 steps.
    assert two.metric("drafts_accepted_total", model="drafting") >= 24
    assert two.metric("drafts_verified_total", model="plain") == 0
    two.free()


def test_two_engines_of_one_process_share_nothing(two: Server) -> None:
    assert sorted(model.id for model in two.client.models.list()) == ["drafting", "plain"]
    question = "Which two engines run here, and do they know what each other heard?"
    first = two.chat(question, model="plain", max_tokens=4)
    before = two.metric("generated_tokens_total", model="plain")
    other = two.chat(question, model="drafting", max_tokens=4)
    again = two.chat(question, model="plain", max_tokens=4)
    assert first.usage.prompt_tokens_details.cached_tokens == other.usage.prompt_tokens_details.cached_tokens < 32
    assert again.usage.prompt_tokens_details.cached_tokens >= 32
    assert two.metric("generated_tokens_total", model="plain") == before + 4
    two.free()
