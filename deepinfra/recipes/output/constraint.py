"""What a whole answer must match: reasoning, markers and calls around what the request demands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepinfra.core.conversation import Constraint, Conversation, JsonValue, ToolDefinition
from deepinfra.errors import UnsupportedFieldError
from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.lark import ANY, Rules
from deepinfra.recipes.output.schemas import arguments_schema

__all__ = ("compose", "offered")

_OPEN: Mapping[str, JsonValue] = {"type": "object"}
_LINES = "\n{1,2}"


def offered(conversation: Conversation) -> tuple[ToolDefinition, ...]:
    """The tools that the answer may call."""
    choice = conversation.tool_choice
    if choice.mode == "none":
        return ()
    return tuple(tool for tool in conversation.tools if not choice.names or tool.name in choice.names)


def compose(
    conversation: Conversation,
    *,
    control: Mapping[str, int],
    start: str = "text",
    reasoning: tuple[str, str] | None = None,
    family: ToolFamily | None = None,
) -> Constraint | None:
    """The constraint of a prompt, or none if the conversation demands nothing.

    It demands something by its `constraint`, by a tool choice that is not free (required, named, a subset, one call at
    most), or by a strict tool; then a call's arguments are valid against their schema. Under a constraint of the text
    an answer is that text or calls. Reasoning stays free.

    Args:
        conversation: What was asked.
        control: Spelling and id of the model's control tokens.
        start: `Prompt.start`.
        reasoning: Opening and closing marker, if reasoning is under way or may follow.
        family: The tool syntax, if tools can be called.

    Raises:
        UnsupportedFieldError: Calls are demanded of a family that cannot be constrained.
    """
    wanted, choice = conversation.constraint, conversation.tool_choice
    tools = offered(conversation) if family is not None else ()
    forced = bool(tools) and choice.mode == "required"
    shaped = bool(tools) and (
        forced or not choice.parallel or len(tools) < len(conversation.tools) or any(tool.strict for tool in tools)
    )
    if start == "raw" or not (wanted or shaped):
        return wanted
    if not tools and start == "text" and reasoning is None and not (family and family.prefix):
        return wanted
    rules = Rules(control)
    answers: list[str] = []
    if tools:
        assert family is not None
        answers.append(_calls(rules, family, tools, forced, choice.parallel, start, free=not forced and wanted is None))
    prefix = rules.literal(family.prefix) if family is not None else ""
    if start != "tool" and not forced:
        text = rules.pattern(family.text if family and tools else ANY) if wanted is None else _wanted(rules, wanted)
        answers.append(f"{prefix} {text}")
    answer = rules.either(answers)
    if reasoning is not None and start != "tool":
        opening, closing = reasoning
        opener = family.opener if family is not None else ""
        gap = "" if opener.startswith("\n") and wanted is None else f"({rules.pattern(_LINES)})?"
        thought = f"{rules.until(closing)} {gap}"
        answer = f"{thought} {answer}" if start == "reasoning" else f"({rules.literal(opening)} {thought})? {answer}"
    return Constraint(kind="grammar", source=rules.source(answer))


def _calls(
    rules: Rules,
    family: ToolFamily,
    tools: Sequence[ToolDefinition],
    exact: bool,
    many: bool,
    start: str,
    free: bool,
) -> str:
    """Calls from their opener on; `free` text may stand before it where it can be told from the calls."""
    if family.calls is None:
        raise UnsupportedFieldError("tool_choice", f"calls in the syntax {family.name!r} cannot be constrained")
    allowed = [
        Allowed(tool.name, arguments_schema(tool) if exact or tool.strict else _OPEN, tool.strict) for tool in tools
    ]
    calls = family.calls(rules, allowed, many)
    if start == "tool" or not family.opener:
        return calls
    if free and not family.prefix:
        return f"{rules.until(family.opener.lstrip())} {calls}"
    return f"{rules.literal(family.opener)} {calls}"


def _wanted(rules: Rules, wanted: Constraint) -> str:
    """What the answer's text must match."""
    if wanted.kind == "regex":
        return rules.pattern(wanted.source)
    if wanted.kind == "grammar":
        return rules.lark(wanted.source)
    return rules.json_text(wanted.source if wanted.kind == "json_schema" else '{"type": "object"}')
