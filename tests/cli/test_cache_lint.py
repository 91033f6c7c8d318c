"""The prefix linter: hand-made logs in which one field is known to break the prefix."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepinfra.cli import app
from deepinfra.cli.cache.changes import changes, kind_of_text
from deepinfra.cli.cache.prefixes import Asked, Lint, lint
from deepinfra.cli.prompts import inputs_of, prompt_of
from deepinfra.recipes import ChatTemplate
from deepinfra.testing.textmodel import TrainedTextModel
from deepinfra.testing.tiny import TinyRecipe

TEMPLATE = Path(__file__).parents[1] / "data" / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja"
RULES = " ".join(f"Rule number {index} is to be kind to the user." for index in range(12))
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
ANSWER = {"role": "assistant", "content": "It is fine, as it always is in Paris in the spring."}
Body = dict[str, Any]


@cache
def recipe() -> ChatTemplate:
    markers = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>")
    return ChatTemplate(TrainedTextModel(TEMPLATE.read_text(), markers))


def linted(*bodies: Mapping[str, Any], session: str = "s") -> Lint:
    def render(asked: Asked, body: Mapping[str, Any]) -> Sequence[int]:
        return prompt_of(recipe(), inputs_of(body, None)[0]).ids

    requests = [Asked(number, body, session=session) for number, body in enumerate(bodies, 1)]
    return lint(requests, render, lambda text: len(recipe().tokenizer.encode(text)), block_size=16)


def chat(system: str, *messages: Mapping[str, Any], **fields: Any) -> Body:
    return {"messages": [{"role": "system", "content": system}, *(messages or (QUESTION,))], **fields}


def tool(name: str, description: str = "Looks something up for the user", properties: Body | None = None) -> Body:
    cities = {"city": {"type": "string"}, "day": {"type": "string"}}
    schema = {"type": "object", "properties": properties or cities}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def one(report: Lint) -> tuple[str, str]:
    """The only finding."""
    (finding,) = report.findings
    assert finding.line == report.requests
    assert finding.earlier == report.requests - 1
    assert finding.advice
    return finding.field, finding.kind


@pytest.mark.parametrize(
    ("held", "asked", "kind"),
    [
        ("It is 2026-11-29T12:03:11Z.", "It is 2026-11-29T12:04:59Z.", "timestamp"),
        ("It is Sunday, November 29.", "It is Monday, November 30.", "timestamp"),
        ("The time is 9:59 PM.", "The time is 10:00 PM.", "timestamp"),
        ("now=1764412800", "now=1764412923", "timestamp"),
        (
            "Request 7d444840-9dc0-11d1-b245-5ffdce74fad2.",
            "Request 1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed.",
            "id",
        ),
        ("Trace req_8f3kd92kx0a1.", "Trace req_1m5pq77zb4c9.", "id"),
        ("You have 12 credits left.", "You have 11 credits left.", "number"),
        ("Be kind. Be brief.", "Be kind.  Be brief.", "whitespace"),
        ("You speak French.", "You speak German.", "text"),
    ],
)
def test_a_system_prompt_that_changes_is_named_with_its_kind(held: str, asked: str, kind: str) -> None:
    report = linted(chat(f"{held} {RULES}"), chat(f"{asked} {RULES}"))
    assert one(report) == ("messages[0].content", kind)
    rules = len(recipe().tokenizer.encode(RULES))
    assert rules - 8 <= report.lost_tokens <= rules + 60  # and the question behind them


def test_what_changed_itself_is_no_cost() -> None:
    held, asked = (f"You know this: {word * 100} {RULES}" for word in ("cats ", "dogs "))
    report = linted(chat(held), chat(asked))
    assert report.findings[0].tokens <= len(recipe().tokenizer.encode(RULES)) + 60


@pytest.mark.parametrize(
    "asked",
    [
        chat(RULES, {"role": "user", "content": "Quite another question, about the weather in Rome"}),
        chat(RULES, QUESTION, ANSWER, {"role": "user", "content": "And tomorrow?"}),
        {"messages": [{"role": "user", "content": "Nothing in common with anything at all"}]},
        chat(RULES),
        chat(RULES, temperature=0.2, seed=7, user="somebody", max_tokens=9),
    ],
    ids=["question", "next turn", "stranger", "repeated", "sampling"],
)
def test_what_must_differ_is_no_finding(asked: Body) -> None:
    assert linted(chat(RULES, temperature=1), asked).findings == []


def test_tools_in_another_order_are_named() -> None:
    tools = [tool("look_up"), tool("book"), tool("cancel")]
    report = linted(chat(RULES, tools=tools), chat(RULES, tools=[tools[1], tools[0], tools[2]]))
    assert one(report) == ("tools", "reordered")
    assert "book" in report.findings[0].asked


def test_a_tools_schema_with_its_keys_in_another_order_is_named() -> None:
    held, asked = ({key: {"type": "string"} for key in keys} for keys in (("city", "day"), ("day", "city")))
    report = linted(
        chat(RULES, tools=[tool("book", properties=held)]), chat(RULES, tools=[tool("book", properties=asked)])
    )
    assert one(report) == ("tools[0].function.parameters.properties", "key order")


def test_a_tool_that_was_added_is_named() -> None:
    report = linted(chat(RULES, tools=[tool("book")]), chat(RULES, tools=[tool("first"), tool("book")]))
    assert one(report) == ("tools", "list changed")
    assert "first" in report.findings[0].asked


def test_a_tools_description_that_changes_is_named() -> None:
    tools = [[tool("book", f"Books. Open until {time}."), tool("cancel")] for time in ("10:00", "11:00")]
    report = linted(chat(RULES, tools=tools[0]), chat(RULES, tools=tools[1]))
    assert one(report) == ("tools[0].function.description", "timestamp")


def test_a_history_whose_beginning_was_dropped_is_named() -> None:
    turns = [{"role": role, "content": f"Turn {n}: {RULES[:200]}"} for n in range(6) for role in ("user", "assistant")]
    report = linted(chat("Be kind.", *turns, QUESTION), chat("Be kind.", *turns[2:], QUESTION))
    assert one(report) == ("messages[1]", "history cut")


def test_a_message_put_in_before_the_history_is_named() -> None:
    new = {"role": "user", "content": "By the way"}
    turns = [{"role": role, "content": f"Turn {n}: {RULES[:200]}"} for n in range(3) for role in ("user", "assistant")]
    report = linted(chat("Be kind.", *turns, QUESTION), chat("Be kind.", new, *turns, QUESTION))
    assert one(report) == ("messages[1]", "history inserted")


def test_several_fields_that_break_one_prefix_are_all_named() -> None:
    tools = [tool("look_up"), tool("book"), tool("cancel")]
    bodies = [
        chat(f"It is {time}. {RULES}", QUESTION, ANSWER, QUESTION, tools=listed)
        for time, listed in (("10:00", tools), ("10:01", tools[::-1]))
    ]
    found = {(finding.field, finding.kind) for finding in linted(*bodies).findings}
    assert found == {("messages[0].content", "timestamp"), ("tools", "reordered")}


def test_findings_are_summed_by_field_and_sorted_by_cost() -> None:
    short = [
        {"messages": [{"role": "user", "content": f"{n} bottles. {RULES[:150]}"}, ANSWER, QUESTION]} for n in (9, 8)
    ]
    long = [chat(f"It is 10:{minute}. {RULES}") for minute in (10, 11, 12)]
    report = linted(*long, *short, session="")
    assert [(finding.kind, finding.requests) for finding in report.findings] == [("timestamp", 2), ("number", 1)]
    assert report.lost_tokens == sum(finding.tokens for finding in report.findings)


def test_without_sessions_the_most_similar_request_is_compared() -> None:
    names = ("Ann likes rain", "Bob sells old cars", "Cyd has three cats", "Dan never sleeps", "Eve reads the papers")
    chats = [[{"role": "user", "content": f"Listen: {name}"}] for name in names]
    bodies = [chat(f"It is 10:{n}{turn}. {RULES}", *chats[n]) for turn in range(2) for n in range(5)]
    report = linted(*bodies, session="")
    whole = len(prompt_of(recipe(), inputs_of(bodies[0], None)[0]).ids)
    assert [finding.field for finding in report.findings] == ["messages[0].content"]
    assert report.findings[0].tokens > 5 * (whole - 40)


def test_tenants_share_nothing() -> None:
    requests = [Asked(n, chat(f"It is 10:{n}0. {RULES}"), tenant=f"t{n}") for n in range(2)]
    render = lambda asked, body: prompt_of(recipe(), inputs_of(body, None)[0]).ids  # noqa: E731
    report = lint(requests, render, len)
    assert report.shared_tokens == 0
    assert report.findings == []


RESPONSES = [{"instructions": f"It is 10:0{n}. {RULES}", "input": "What now?"} for n in range(2)]
MESSAGES = [{"system": f"It is 10:0{n}. {RULES}", "messages": [QUESTION], "max_tokens": 5} for n in range(2)]
COMPLETIONS = [{"prompt": f"It is 10:0{n}. {RULES}"} for n in range(2)]


@pytest.mark.parametrize(
    ("bodies", "field"),
    [(RESPONSES, "instructions"), (MESSAGES, "system"), (COMPLETIONS, "prompt")],
    ids=["responses", "messages", "completions"],
)
def test_fields_are_named_as_each_api_names_them(bodies: list[Body], field: str) -> None:
    assert one(linted(*bodies)) == (field, "timestamp")


def test_a_line_that_cannot_be_rendered_is_left_out() -> None:
    report = linted(chat(RULES), {"messages": []}, chat(RULES))
    assert report.requests == 2
    assert [line for line, _ in report.failed] == [2]


def test_undoing_a_change_leaves_the_rest_as_it_was() -> None:
    held, asked = chat("one", user="a"), chat("two", user="b")
    undone = {change.field: change.undone for change in changes(held, asked)}
    assert undone["messages[0].content"] == {**asked, "messages": held["messages"]}
    assert undone["user"] == {**asked, "user": "a"}


def test_arguments_whose_keys_moved_are_the_same_json() -> None:
    assert kind_of_text('{"a": 1, "b": 2}', '{"b": 2, "a": 1}')[0] == "key order"


def a_thousand() -> list[Asked]:
    """Two hundred chats in turn; the system prompt says the time."""
    draw = random.Random(4)
    histories: list[list[Body]] = [[] for _ in range(200)]
    requests = []
    for number in range(1000):
        history = histories[number % 200]
        history.append({"role": "user", "content": f"{number}: " + "".join(draw.choices("abcdefgh ", k=40))})
        now = f"2026-11-29T12:{number // 60:02}:{number % 60:02}Z"
        requests.append(Asked(number, chat(f"{now} {RULES[:300]}", *history), session=f"s{number % 200}"))
        history.append({"role": "assistant", "content": "".join(draw.choices("abcdefgh ", k=60))})
    return requests


def test_a_thousand_requests_take_a_few_renderings_each() -> None:
    tiny, calls = TinyRecipe(), 0

    def render(asked: Asked, body: Mapping[str, Any]) -> Sequence[int]:
        nonlocal calls
        calls += 1
        return prompt_of(tiny, inputs_of(body, None)[0]).ids

    report = lint(a_thousand(), render, len)
    assert report.requests == 1000
    assert report.findings[0].field == "messages[0].content"
    assert report.findings[0].requests >= 800
    assert calls < 5000


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)

    def invoke(lines: Sequence[object], *options: str) -> Any:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (tmp_path / "log.jsonl").write_text(text)
        return CliRunner().invoke(app, ["cache", "lint", "log.jsonl", "--model", str(smollm2_path), *options], obj={})

    return invoke


def test_the_command_reads_bodies_wrapped_bodies_and_says_what_it_left_out(run: Callable[..., Any]) -> None:
    done = run(
        [
            {**chat(f"It is 10:00. {RULES}"), "session": "s", "tenant": "t"},
            "",
            "no JSON",
            {"body": chat(f"It is 10:01. {RULES}"), "url": "/v1/chat/completions", "session": "s", "tenant": "t"},
        ],
        "--json",
    )
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["requests"] == 2
    (finding,) = report["findings"]
    assert (finding["field"], finding["kind"]) == ("messages[0].content", "timestamp")
    assert (finding["line"], finding["earlier"], finding["asked"], finding["held"]) == (4, 1, "10:01", "10:00")
    assert "line 3 was left out" in done.stderr


def test_a_log_without_a_request_exits_1(run: Callable[..., Any]) -> None:
    assert run(["", "no JSON", "[]"]).exit_code == 1
