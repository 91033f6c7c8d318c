"""Answers as models write them, and as a client reads them: for tests of parsers and constraints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfra.core.events import Event, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolEnd, ToolStart

__all__ = ("WRITERS", "Answer", "Bytes", "Called", "answer_of")


@dataclass(slots=True)
class Called:
    """A call as a client sees it; `ended` is false for one that was cut."""

    name: str
    arguments: str = ""
    id: str = ""
    ended: bool = False


@dataclass(slots=True)
class Answer:
    """An answer's events, folded."""

    text: str = ""
    reasoning: str = ""
    calls: list[Called] = field(default_factory=list)


def answer_of(events: Iterable[Event]) -> Answer:
    """Fold events, and check that calls begin before they go on, are numbered from 0 and come one at a time."""
    answer, under_way = Answer(), None
    for event in events:
        if isinstance(event, TextDelta):
            answer.text += event.text
        elif isinstance(event, ReasoningDelta):
            answer.reasoning += event.text
        elif isinstance(event, ToolStart):
            assert event.name
            assert event.index == len(answer.calls)
            answer.calls.append(Called(event.name, id=event.id))
            under_way = event.index
        elif isinstance(event, ToolArgumentsDelta):
            assert event.index == under_way
            assert event.arguments
            answer.calls[event.index].arguments += event.arguments
        elif isinstance(event, ToolEnd):
            assert event.index == under_way
            answer.calls[event.index].ended = True
            assert isinstance(json.loads(answer.calls[event.index].arguments), dict)
            under_way = None
    return answer


class Bytes:
    """A vocabulary of the 256 bytes and of control tokens, which have no bytes.

    Attributes:
        control: Spelling and id of the control tokens.
    """

    def __init__(self, markers: Sequence[str] = ()) -> None:
        self.control = {marker: 256 + index for index, marker in enumerate(markers)}
        spelled = "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))
        self._split = re.compile(f"({spelled})" if spelled else "(?!)()")

    def token_bytes(self, token: int) -> bytes:
        """Bytes of an id."""
        return bytes((token,)) if token < 256 else b""

    def encode(self, text: str) -> list[int]:
        """Ids of text, markers in it as control tokens."""
        ids: list[int] = []
        for part in self._split.split(text):
            ids += [self.control[part]] if part in self.control else part.encode()
        return ids


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {_dump(name)}, "arguments": {_dump(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _objects(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    return [f'{{"name": {_dump(name)}, "arguments": {_dump(arguments)}}}' for name, arguments in calls]


def _invoked(block: str, invoke: str, parameter: str, typed: bool) -> Callable[..., str]:
    def write(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        text = f"\n\n<{block}>\n"
        for name, arguments in calls:
            text += f'<{invoke} name="{name}">\n'
            for key, value in arguments.items():
                kind = f' string="{_dump(isinstance(value, str))}"' if typed else ""
                said = value if isinstance(value, str) else _dump(value)
                text += f'<{parameter} name="{key}"{kind}>{said}</{parameter}>\n'
            text += f"</{invoke}>\n"
        return text + f"</{block}>"

    return write


def _xml(tag: str, line: str) -> Callable[..., str]:
    def write(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        blocks = []
        for name, arguments in calls:
            text = f"<{tag}>\n<function={name}>\n"
            for key, value in arguments.items():
                said = value if isinstance(value, str) else _dump(value)
                text += f"<parameter={key}>{line}{said}{line}</parameter>\n"
            blocks.append(f"{text}</function>\n</{tag}>")
        return "\n".join(blocks)

    return write


def _glm(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    text = ""
    for name, arguments in calls:
        text += f"\n<tool_call>{name}\n"
        for key, value in arguments.items():
            said = value if isinstance(value, str) else _dump(value)
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{said}</arg_value>\n"
        text += "</tool_call>"
    return text


def _hy3(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    text = "<tool_calls>\n"
    for name, arguments in calls:
        text += f"<tool_call>{name}<tool_sep>\n"
        for key, value in arguments.items():
            said = value if isinstance(value, str) else _dump(value)
            text += f"<arg_key>{key}</arg_key>\n<arg_value>\0{said}\0</arg_value>\n"
        text += "</tool_call>\n"
    parts = f"{text}</tool_calls>".split("\0")
    return "".join(part if at % 2 else part.replace(">", ":opensource>") for at, part in enumerate(parts))


def _atem(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    block = _invoked("atem:function_calls", "atem:invoke", "atem:parameter", False)
    return "<|eom|><|start|>assistant".join(f" to={call[0]}<|message|>{block([call]).lstrip()}" for call in calls)


def _gemma(value: Any) -> str:
    """A value as Gemma 4 writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        bare = re.compile(r"[A-Za-z0-9_]+")
        return "{" + ",".join(f"{k if bare.fullmatch(k) else _gemma(k)}:{_gemma(v)}" for k, v in value.items()) + "}"
    return f"[{','.join(map(_gemma, value))}]" if isinstance(value, list) else _dump(value)


def _r1(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_dump(arguments)}\n```<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        + "<｜tool▁calls▁end｜>"
    )


_D = "｜DSML｜"
WRITERS: Mapping[str, Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]] = {
    "hermes": _hermes,
    "minimax-m1": lambda calls: "<tool_calls>\n" + "\n".join(_objects(calls)) + "\n</tool_calls>",
    "mistral-list": lambda calls: f"[TOOL_CALLS][{', '.join(_objects(calls))}]",
    "nemotron": lambda calls: f"<TOOLCALL>[{', '.join(_objects(calls))}]</TOOLCALL>",
    "apriel": lambda calls: f"\n<tool_calls>[{', '.join(_objects(calls))}]</tool_calls>",
    "granite-3": lambda calls: f"<|tool_call|>[{', '.join(_objects(calls))}]",
    "command-r": lambda calls: (
        "<|START_ACTION|>[\n    "
        + ",\n    ".join(
            f'{{"tool_call_id": "{at}", "tool_name": {_dump(name)}, "parameters": {_dump(arguments)}}}'
            for at, (name, arguments) in enumerate(calls)
        )
        + "\n]<|END_ACTION|>"
    ),
    "llama3-json": lambda calls: "; ".join(
        f'{{"name": {_dump(name)}, "parameters": {_dump(arguments)}}}' for name, arguments in calls
    ),
    "dsml": _invoked(f"{_D}tool_calls", f"{_D}invoke", f"{_D}parameter", True),
    "dsml-4.1": _invoked(f"{_D} calls", f"{_D} invoke", f"{_D} parameter", True),
    "atem": _atem,
    "hy3": _hy3,
    "lfm2": lambda calls: (
        "<|tool_call_start|>["
        + ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        )
        + "]<|tool_call_end|>"
    ),
    "gemma-4": lambda calls: "".join(
        f"<|tool_call>call:{name}{_gemma(arguments)}<tool_call|>" for name, arguments in calls
    ),
    "apertus": lambda calls: (
        "<|tools_prefix|>["
        + ", ".join(f"{{{_dump(name)}: {_dump(arguments)}}}" for name, arguments in calls)
        + "]<|tools_suffix|>"
    ),
    "gigachat-3": lambda calls: "".join(
        f"<|message_sep|>\n\nfunction call<|role_sep|>\n{call}" for call in _objects(calls)
    ),
    "gigachat-3.1": lambda calls: "".join(f"<|function_call|>{call}" for call in _objects(calls)),
    "functionary-3.2": lambda calls: ">>>".join(f"{name}\n{_dump(arguments)}" for name, arguments in calls),
    "qwen-xml": _xml("tool_call", "\n"),
    "seed-oss": _xml("seed:tool_call", ""),
    "functionary": lambda calls: "".join(
        f"<function={name}>{_dump(arguments)}</function>" for name, arguments in calls
    ),
    "glm": _glm,
    "kimi": lambda calls: (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{_dump(arguments)}<|tool_call_end|>"
            for at, (name, arguments) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    ),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_dump(arguments)}" for name, arguments in calls),
    "mistral-ids": lambda calls: "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]call{at:05}[ARGS]{_dump(arguments)}" for at, (name, arguments) in enumerate(calls)
    ),
    "deepseek-r1": _r1,
    "deepseek-v3.1": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_dump(arguments)}<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "solar-open": lambda calls: (
        "<|tool_calls|>"
        + "".join(
            f"<|tool_call:begin|>call{at:06}<|tool_call:name|>{name}<|tool_call:args|>{_dump(arguments)}<|tool_call:end|>"
            for at, (name, arguments) in enumerate(calls)
        )
    ),
    "harmony": lambda calls: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_dump(arguments)}<|call|>"
        for name, arguments in calls
    ),
}
"""By family: calls, each a name and its arguments, as its models write them."""
