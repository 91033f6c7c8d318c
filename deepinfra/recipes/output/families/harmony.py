"""How gpt-oss writes: messages with a header that says the channel and, for a call, the recipient.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{…}<|call|>`; the recipient may also stand before the channel. The prompt ends with `<|start|>assistant`, so
an answer begins inside a header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deepinfra.recipes.output.family import Allowed, ToolFamily
from deepinfra.recipes.output.grammar import Edge, State
from deepinfra.recipes.output.lark import Rules

__all__ = ("HARMONY", "HARMONY_REASONING")

HARMONY_REASONING = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
"""What stands before and after reasoning where an answer is constrained."""

_FUNCTION = r".*\bto=functions\.(?P<name>[^\s<]+)(?:\s.*)?"
_OTHER = r".*\bto=(?!(?:assistant|user|all)\b)(?P<name>[^\s<]+)(?:\s.*)?"
_ANALYSIS = r"\s*analysis\b.*"
_NOTHING = r"\s*(?:assistant)?\s*"

_OUT = (
    Edge(marker="<|end|>", to="between", quiet=True),
    Edge(marker="<|return|>", to="between", quiet=True),
    Edge(marker="<|call|>", to="between", quiet=True),
    Edge(marker="<|start|>", to="next", quiet=True),
)
_HEADER = State(
    channel="header",
    edges=(
        Edge(marker="<|channel|>", to="function", when=_FUNCTION),
        Edge(marker="<|channel|>", to="recipient", when=_OTHER),
        Edge(marker="<|channel|>", to="channel", quiet=True),
        Edge(marker="<|message|>", to="arguments", when=_FUNCTION),
        Edge(marker="<|message|>", to="arguments", when=_OTHER),
        Edge(marker="<|message|>", to="text", quiet=True),
        Edge(marker="<|start|>", to="next", when=_NOTHING, quiet=True),
        Edge(marker="<|end|>", to="between", when=_NOTHING, quiet=True),
    ),
)


def _calls(rules: Rules, tools: Sequence[Allowed], many: bool) -> str:
    """One call, in either order of its header: the model stops behind it, whether it may call again or not."""
    one = []
    for tool in tools:
        headers = (
            f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>",
            f" to=functions.{tool.name}<|channel|>commentary <|constrain|>json<|message|>",
        )
        one += [f"{rules.literal(header)} {rules.json(tool.schema)}" for header in headers]
    return rules.either(one)


HARMONY = ToolFamily(
    name="harmony",
    calls=_calls,
    prefix="<|channel|>final<|message|>",
    reasoning=HARMONY_REASONING,
    states={
        "header": _HEADER,
        "next": replace(_HEADER, quiet=True),
        "channel": State(
            channel="header",
            edges=(
                Edge(marker="<|message|>", to="arguments", when=_FUNCTION),
                Edge(marker="<|message|>", to="reasoning", when=_ANALYSIS, quiet=True),
                Edge(marker="<|message|>", to="arguments", when=_OTHER),
                Edge(marker="<|message|>", to="text", quiet=True),
            ),
            quiet=True,
        ),
        "function": State(channel="header", edges=(Edge(marker="<|message|>", to="arguments"),), quiet=True),
        "recipient": State(
            channel="header",
            edges=(
                Edge(marker="<|message|>", to="reasoning", when=_ANALYSIS, quiet=True),
                Edge(marker="<|message|>", to="arguments"),
            ),
            quiet=True,
        ),
        "arguments": State(channel="arguments", edges=_OUT, after="between"),
        "text": State(channel="text", edges=_OUT),
        "reasoning": State(channel="reasoning", edges=_OUT),
        "between": State(
            channel="gap",
            edges=(
                Edge(marker="<|start|>", to="next", quiet=True),
                Edge(marker="<|channel|>", to="channel", quiet=True),
                Edge(marker="<|end|>", to="between", quiet=True),
            ),
            quiet=True,
        ),
    },
)
"""An answer begins in `header`; in `text` or `reasoning` where the prompt opened a message.

A message to a function is a call whatever its channel; analysis is reasoning; what is left, preambles in the commentary
channel included, is shown to the user.
"""
