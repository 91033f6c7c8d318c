"""A conversation as gpt-oss reads it: one message after another, control tokens apart from what people wrote.

`<|start|>header<|message|>content<|end|>`. Headers (role, recipient, channel) are plain text to the tokenizer, so every
name that goes into one is checked first.

Source: openai-harmony, `src/encoding.rs`, whose prompts these equal; and its guide's rules for what is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepinfra.core.conversation import Conversation, MediaPart, Message, ToolCall, ToolDefinition
from deepinfra.errors import RequestError, TemplateError, UnsupportedFieldError
from deepinfra.recipes.harmony.typescript import namespace
from deepinfra.recipes.output.constraint import offered

__all__ = ("CALL", "EFFORTS", "END", "MARKERS", "RETURN", "START", "Rendered", "Voice", "render")

START, MESSAGE, END = "<|start|>", "<|message|>", "<|end|>"
CHANNEL, CONSTRAIN, CALL, RETURN = "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"
MARKERS = (START, MESSAGE, END, CHANNEL, CONSTRAIN, CALL, RETURN)
"""Every control token of the format."""

EFFORTS: Mapping[str, str] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "ultra": "high",
    "max": "high",
}
"""The three efforts the model knows, by what a request may ask for."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_ROLES = ("system", "developer", "user", "assistant", "tool", "reminder")
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_CALLS_GO = "\nCalls to these tools must go to the commentary channel: 'functions'."


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """What a prompt says when the conversation does not.

    Attributes:
        identity: First line of the system message.
        knowledge_cutoff: Month up to which the model knows the world; empty leaves the line out.
        date: Said instead of the conversation's own; with neither the line is left out.
        effort: One of `EFFORTS`.
    """

    identity: str
    knowledge_cutoff: str
    date: str | None
    effort: str


@dataclass(slots=True)
class Rendered:
    """A prompt's text, where its control tokens are, in which state the answer begins, and what it may call."""

    parts: list[str] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0
    start: str = "header"
    tools: tuple[ToolDefinition, ...] = ()

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.parts)

    def write(self, text: str) -> None:
        """Add what must not become a control token."""
        self.parts.append(text)
        self.length += len(text)

    def mark(self, *tokens: str) -> None:
        """Add control tokens."""
        for token in tokens:
            self.ranges.append((self.length, self.length + len(token)))
            self.write(token)

    def message(self, header: str, content: str, channel: str | None = None, end: str | None = END) -> None:
        """Add a message; `end=None` leaves it open."""
        self.mark(START)
        self.write(header)
        if channel is not None:
            self.mark(CHANNEL)
            self.write(channel)
        self.mark(MESSAGE)
        self.write(content)
        if end is not None:
            self.mark(end)


def _tools(conversation: Conversation) -> tuple[ToolDefinition, ...]:
    """The tools that may be called, and so are shown."""
    choice = conversation.tool_choice
    for index, tool in enumerate(conversation.tools):
        _check_name(tool.name, f"tools[{index}].name")
    known = {tool.name for tool in conversation.tools}
    for name in choice.names:
        if name not in known:
            raise RequestError(f"there is no tool {name!r}", "tool_choice")
    if choice.mode == "required" and not conversation.tools:
        raise RequestError("a tool call is required, but there are no tools", "tool_choice")
    return offered(conversation)


def render(conversation: Conversation, voice: Voice) -> Rendered:
    """The prompt, up to where the model goes on.

    Raises:
        RequestError: A role, name or order that cannot be rendered.
        TemplateError: A tool result that no call asked for.
        UnsupportedFieldError: Media, or an option that has no effect here.
    """
    tools = _tools(conversation)
    for name in conversation.template_options or {}:
        if name != "model_identity":
            raise UnsupportedFieldError(f"template_options.{name}", "is not read by gpt-oss's prompt")
    messages = [_checked(message, index, conversation.messages) for index, message in enumerate(conversation.messages)]
    leading = next(
        (i for i, message in enumerate(messages) if message.role not in ("system", "developer")), len(messages)
    )
    prompt = Rendered(tools=tools)
    prompt.message("system", _system(conversation, voice, tools))
    instructions = "\n\n".join(text for message in messages[:leading] if (text := message.text))
    developer = _developer(instructions, tools, conversation)
    if developer:
        prompt.message("developer", developer)
    _history(prompt, messages, leading)
    if not (messages and messages[-1].prefix):
        prompt.mark(START)
        prompt.write("assistant")
        if conversation.effort == "none" and not tools:
            prompt.mark(CHANNEL)
            prompt.write("final")
            prompt.mark(MESSAGE)
            prompt.start = "text"
    return prompt


def _system(conversation: Conversation, voice: Voice, tools: Sequence[ToolDefinition]) -> str:
    effort = voice.effort if conversation.effort is None else conversation.effort
    if effort not in EFFORTS:
        raise RequestError(f"there is no reasoning effort {effort!r}; known: {', '.join(EFFORTS)}", "reasoning_effort")
    identity = (conversation.template_options or {}).get("model_identity", voice.identity)
    if not isinstance(identity, str):
        raise RequestError("model_identity is a text", "template_options.model_identity")
    now = voice.date if voice.date is not None else conversation.now
    lines = [identity] if identity else []
    lines += [f"Knowledge cutoff: {voice.knowledge_cutoff}"] if voice.knowledge_cutoff else []
    lines += [f"Current date: {now[:10]}"] if now else []
    sections = ["\n".join(lines)] if lines else []
    sections += [f"Reasoning: {EFFORTS[effort]}", _CHANNELS + (_CALLS_GO if tools else "")]
    return "\n\n".join(sections)


def _developer(instructions: str, tools: Sequence[ToolDefinition], conversation: Conversation) -> str:
    sections = [f"# Instructions\n\n{instructions}"] if instructions else []
    sections += [namespace(tools)] if tools else []
    constraint = conversation.constraint
    if constraint is not None and constraint.kind in ("json", "json_schema"):
        schema = '{"type":"object"}' if constraint.kind == "json" else _compact(constraint.source)
        sections.append(f"# Response Formats\n\n## response\n\n{schema}")
    return "\n\n".join(sections)


def _compact(source: str) -> str:
    """JSON in the form the model was shown: on one line, without spaces between tokens."""
    try:
        return json.dumps(json.loads(source), ensure_ascii=False, separators=(",", ":"))
    except ValueError as error:
        raise RequestError(f"the schema is not JSON: {error}", "response_format") from None


def _history(prompt: Rendered, messages: Sequence[Message], leading: int) -> None:
    # Reasoning is shown again only until the answer it led to: within the tool loop that is still going on.
    answered = max((i for i, message in enumerate(messages) if _answers(message)), default=-1)
    calls: dict[str, ToolCall] = {}
    index = leading
    while index < len(messages):
        message = messages[index]
        if message.role in ("system", "developer", "reminder"):
            prompt.message("developer", f"# Instructions\n\n{message.text}")
        elif message.role == "user":
            prompt.message("user", message.text)
        elif message.role == "assistant":
            calls = {**calls, **{call.id: call for call in message.tool_calls}}
            _assistant(prompt, message, reasoning=index > answered)
        else:
            end = next((i for i in range(index, len(messages)) if messages[i].role != "tool"), len(messages))
            _results(prompt, messages, range(index, end), calls)
            index = end - 1
        index += 1


def _answers(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls and not message.prefix


def _assistant(prompt: Rendered, message: Message, *, reasoning: bool) -> None:
    open_ = message.prefix
    if message.reasoning is not None and (reasoning or open_):
        alone = open_ and not message.text
        prompt.message("assistant", message.reasoning, "analysis", None if alone else END)
        if alone:
            prompt.start = "reasoning"
            return
    if message.tool_calls:
        if message.text:
            prompt.message("assistant", message.text, "commentary")
        for call in message.tool_calls:
            prompt.mark(START)
            prompt.write(f"assistant to=functions.{call.name}")
            prompt.mark(CHANNEL)
            prompt.write("commentary ")
            prompt.mark(CONSTRAIN)
            prompt.write("json")
            prompt.mark(MESSAGE)
            prompt.write(call.arguments or "{}")
            prompt.mark(CALL)
    else:
        prompt.message("assistant", message.text, "final", None if open_ else END)
        if open_:
            prompt.start = "text"


def _results(prompt: Rendered, messages: Sequence[Message], span: range, calls: Mapping[str, ToolCall]) -> None:
    """Results of one step, in the order of its calls: the model tells them apart by name and order only."""
    order = {call: index for index, call in enumerate(calls)}
    for index in sorted(span, key=lambda i: order.get(messages[i].tool_call_id or "", -1)):
        message = messages[index]
        call = calls.get(message.tool_call_id or "")
        name = call.name if call is not None else message.name
        if name is None:
            raise TemplateError(
                f"the result answers no call: there is no tool call {message.tool_call_id!r} before it",
                f"messages[{index}].tool_call_id",
            )
        text = f"Error: {message.text}" if message.is_error else message.text
        prompt.message(f"functions.{name} to=assistant", text, "commentary")


def _checked(message: Message, index: int, messages: Sequence[Message]) -> Message:
    where = f"messages[{index}]"
    if message.role not in _ROLES:
        raise RequestError(f"there is no role {message.role!r}", f"{where}.role")
    if any(isinstance(part, MediaPart) for part in message.content):
        raise UnsupportedFieldError(f"{where}.content", "has media, which gpt-oss does not take")
    if message.prefix and (message.role != "assistant" or index != len(messages) - 1):
        raise RequestError("only the last assistant message can be a prefix", f"{where}.prefix")
    if message.prefix and message.tool_calls:
        raise UnsupportedFieldError(f"{where}.tool_calls", "cannot be continued")
    if message.role == "tool" and message.name is not None:
        _check_name(message.name, f"{where}.name")
    for number, call in enumerate(message.tool_calls):
        _check_name(call.name, f"{where}.tool_calls[{number}].function.name")
    return message


def _check_name(name: str, param: str) -> None:
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{name[:200]!r} is no name of a tool: 1 to 128 letters, digits, '_', '-' and '.' (it stands in a header, "
            "where other characters could change what the message means)",
            param,
        )
