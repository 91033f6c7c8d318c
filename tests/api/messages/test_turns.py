"""From Anthropic's turns to a conversation."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.api.messages.request import MESSAGES
from deepinfra.api.messages.signature import sealed
from deepinfra.api.protocol import Received
from deepinfra.core.conversation import Conversation, MediaPart, Message, TextPart, ToolCall
from deepinfra.errors import RequestError


def turns(*messages: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    body = {"model": "toy", "max_tokens": 5000, "messages": list(messages), **fields}
    call = MESSAGES.parse(body, Received(headers={}, now="2026-01-02", max_choices=8))
    made = call.requests[0].input
    assert isinstance(made, Conversation)
    return made.messages


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if content and isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def thinking(said: str, signature: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": signature}


def call(name: str = "a", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "f", "input": arguments}


def result(name: str = "a", content: Any = "r", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": content, **fields}


def said(role: Any, content: str, **fields: Any) -> Message:
    return Message(role=role, content=(TextPart(content),) if content else (), **fields)


def test_a_string_is_one_block_of_text() -> None:
    assert turns(user("x")) == turns(user(text("x"))) == (said("user", "x"),)


def test_texts_of_a_turn_are_paragraphs() -> None:
    assert turns(user(text("a"), text(""), text("b"))) == (said("user", "a\n\nb"),)


def test_neighbouring_turns_of_one_role_are_one_turn() -> None:
    assert turns(user("a"), user("b"), assistant("c"), assistant(text("d")), user("e")) == (
        said("user", "a\n\nb"),
        said("assistant", "c\n\nd"),
        said("user", "e"),
    )


def test_the_system_prompt_comes_first_in_one_piece() -> None:
    assert turns(user("x"), system="s")[0] == said("system", "s")
    assert turns(user("x"), system=[text("s"), text("t")])[0] == said("system", "s\n\nt")


def test_a_system_turn_stays_where_it_is() -> None:
    messages = turns(user("a"), {"role": "system", "content": "s"}, user("b"))
    assert messages == (said("user", "a"), said("system", "s"), said("user", "b"))


def test_fact_8_claude_codes_billing_line_is_no_part_of_the_prompt() -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1.4; cch=1a2b3;"
    assert turns(user("x"), system=[text(billing), text("s")]) == turns(user("x"), system="s")
    assert turns(user("x"), system=f"{billing}\ns") == turns(user("x"), system="s")
    assert turns(user("x"), system=[text(billing)]) == turns(user("x"))
    assert turns(user(billing)) == (said("user", billing),)


def test_images_keep_their_place_and_bytes() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVq"}}
    part = MediaPart(data=b"hej", digest=hashlib.sha256(b"hej").digest(), media_type="image/png")
    assert turns(user(text("a"), image, text("b")))[0].content == (TextPart("a"), part, TextPart("b"))
    assert turns(user("x"), assistant(call()), user(result(content=[text("a"), image])))[2].content == (
        TextPart("a"),
        part,
    )


def test_a_documents_title_and_context_stand_before_its_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "source": source, "title": "T", "context": "C", "citations": {"enabled": False}}
    assert turns(user(document, text("q"))) == (said("user", "T\n\nC\n\nbody\n\nq"),)
    inside = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}
    assert turns(user(inside)) == (said("user", "a\n\nb"),)
    assert turns(user({"type": "document", "source": {"type": "content", "content": "c"}})) == (said("user", "c"),)


def test_thinking_goes_before_what_was_said() -> None:
    messages = turns(user("a"), assistant(thinking("t", "of somebody else"), text("x")), user("b"))
    assert messages[1] == said("assistant", "x", reasoning="t")


def test_thinking_that_was_not_shown_comes_back_in_its_signature() -> None:
    messages = turns(user("a"), assistant(thinking("", sealed("héllo", shown=False)), text("x")), user("b"))
    assert messages[1].reasoning == "héllo"
    assert turns(user("a"), assistant(thinking("", sealed("t", shown=True)), text("x")), user("b"))[1].reasoning is None


def test_a_damaged_signature_is_named() -> None:
    with pytest.raises(RequestError, match=r"messages\.1\.content\.0\.signature"):
        turns(user("a"), assistant(thinking("", "deepinfra:???"), text("x")), user("b"))


def test_redacted_thinking_is_dropped() -> None:
    redacted = {"type": "redacted_thinking", "data": "abc"}
    assert turns(user("a"), assistant(redacted, text("x")), user("b"))[1] == said("assistant", "x")


def test_calls_and_results_become_turns_of_their_own() -> None:
    messages = turns(
        user("a"),
        assistant(text("x"), call("1", city="Paris", n=1), call("2")),
        user(result("2", "two", is_error=True), result("1", [text("p"), text("q")]), text("and?")),
    )
    calls = (
        ToolCall(id="1", name="f", arguments='{"city": "Paris", "n": 1}'),
        ToolCall(id="2", name="f", arguments="{}"),
    )
    assert messages == (
        said("user", "a"),
        said("assistant", "x", tool_calls=calls),
        said("tool", "two", tool_call_id="2", is_error=True),
        said("tool", "p\n\nq", tool_call_id="1"),
        said("user", "and?"),
    )


def test_a_result_may_be_empty() -> None:
    for empty in ("", [], None):
        assert turns(user("a"), assistant(call()), user(result(content=empty)))[2].content == ()


def test_integers_of_any_size_keep_their_digits() -> None:
    huge = 12345678901234567890123
    assert turns(user("a"), assistant(call(n=huge)), user(result()))[1].tool_calls[0].arguments == f'{{"n": {huge}}}'


def test_an_empty_answer_of_ours_is_taken_back() -> None:
    assert turns(user("a"), assistant(), user("b"))[1] == said("assistant", "")


# -- prefill --------------------------------------------------------------------------------------


def test_a_last_assistant_turn_is_continued() -> None:
    assert turns(user("a"), assistant("The answer is ("))[-1] == said("assistant", "The answer is (", prefix=True)
    assert not any(message.prefix for message in turns(user("a"), assistant("x"), user("b")))


def test_a_prefill_cannot_end_with_whitespace() -> None:
    with pytest.raises(RequestError, match="final assistant content cannot end with trailing whitespace"):
        turns(user("a"), assistant("The "))


@pytest.mark.parametrize("mode", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}])
def test_a_prefill_is_refused_with_thinking(mode: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="'thinking' is enabled"):
        turns(user("a"), assistant("The"), thinking=mode)
    assert turns(user("a"), assistant("The"), thinking={"type": "disabled"})[-1].prefix


# -- pairs ----------------------------------------------------------------------------------------

UNANSWERED = "`tool_use` ids were found without `tool_result` blocks immediately after: "


@pytest.mark.parametrize(
    ("messages", "message", "param"),
    [
        ([user("a"), assistant(call())], f"messages.1: {UNANSWERED}a.", "messages.1"),
        ([user("a"), assistant(call()), user("b")], f"messages.1: {UNANSWERED}a.", "messages.1"),
        ([user("a"), assistant(call("1"), call("2")), user(result("1"))], f"messages.1: {UNANSWERED}2.", "messages.1"),
        (
            [user("a"), assistant(call()), {"role": "system", "content": "s"}, user(result())],
            f"messages.1: {UNANSWERED}a.",
            "messages.1",
        ),
        (
            [user(result())],
            "messages.0.content.0: unexpected `tool_use_id` found in `tool_result`",
            "messages.0.content.0",
        ),
        (
            [user("a"), assistant(call()), user(result(), result())],
            "messages.2.content.1: unexpected `tool_use_id`",
            "messages.2.content.1",
        ),
        (
            [user("a"), assistant(call()), user(text("b"), result())],
            "messages.2.content.1: `tool_result` blocks must come before",
            "messages.2.content.1",
        ),
        (
            [user("a"), assistant(call(), call()), user(result())],
            "messages.1.content.1: `tool_use` ids must be unique",
            "messages.1.content.1",
        ),
    ],
)
def test_calls_and_results_must_match(messages: list[dict[str, Any]], message: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        turns(*messages)
    assert message in str(caught.value)
    assert caught.value.param == param


def test_a_call_id_may_be_used_again_in_a_later_turn() -> None:
    assert len(turns(user("a"), assistant(call()), user(result()), assistant(call()), user(result()))) == 5


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_inputs_survive_as_they_are(arguments: dict[str, Any]) -> None:
    block = {**call(), "input": arguments}
    assert json.loads(turns(user("a"), assistant(block), user(result()))[1].tool_calls[0].arguments) == arguments
