"""The words of the two formats: control tokens, tags and the sentences that the models were trained on.

Source: the prompt text is DeepSeek's, as observed from deepseek-recipe 0.2.0 (MIT).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = (
    "ASSISTANT",
    "BOS",
    "DIALECTS",
    "DSML",
    "EOS",
    "FORMAT",
    "OWN",
    "REMINDER",
    "THINK",
    "THINK_END",
    "USER",
    "Dialect",
    "Version",
)

Version: TypeAlias = Literal["v4", "v4.1"]

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
REMINDER: Final = "<｜latest_reminder｜>"
THINK: Final = "<think>"
THINK_END: Final = "</think>"
DSML: Final = "｜DSML｜"
OWN: Final = re.compile(f"({THINK}|{THINK_END}|{DSML})")
"""Control tokens that occur inside the format's own sentences."""

FORMAT: Final = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

_HIGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_MAX = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
    "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
    "underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
_SCALE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

_TOOLS = """\


## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<{calls}>" block like the following:

<{calls}>
<{invoke} name="$TOOL_NAME">
<{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{parameter}>
...
</{invoke}>
<{invoke} name="$TOOL_NAME2">
...
</{invoke}>
</{calls}>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), \
you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What differs between the versions.

    Attributes:
        calls: Name of the tag around a turn's calls.
        invoke: Name of the tag of one call.
        parameter: Name of the tag of one argument.
        system: Control token of a system turn; without one, system messages stand at the beginning.
        image: Control token in an image's place; without one the model cannot see it and is told so.
        efforts: What the prompt begins with, by effort.
        json: What asks for any JSON object.
    """

    calls: str
    invoke: str
    parameter: str
    system: str | None
    image: str | None
    efforts: Mapping[str, str]
    json: str

    @property
    def control(self) -> tuple[str, ...]:
        """Every control token that a prompt may hold."""
        own = (BOS, EOS, USER, ASSISTANT, REMINDER, THINK, THINK_END, DSML)
        return (*own, *(token for token in (self.system, self.image) if token is not None))

    @property
    def tools(self) -> str:
        """The sentences before the tools' schemas."""
        return _TOOLS.format(calls=DSML + self.calls, invoke=DSML + self.invoke, parameter=DSML + self.parameter)


DIALECTS: Final[Mapping[Version, Dialect]] = {
    "v4": Dialect(
        calls="tool_calls",
        invoke="invoke",
        parameter="parameter",
        system=None,
        image=None,
        efforts={"low": "", "high": _HIGH, "max": _MAX},
        json="\n\nYou are a helpful assistant designed to output JSON.\n## Response Format:\n\n"
        "Reply with JSON object ONLY.",
    ),
    "v4.1": Dialect(
        calls=" calls",
        invoke=" invoke",
        parameter=" parameter",
        system="<｜System｜>",
        image="<｜image｜>",
        efforts={"low": _SCALE.format(50), "high": _SCALE.format(75), "max": _SCALE.format(100)},
        json=FORMAT + '{"type": "json_object"}',
    ),
}
