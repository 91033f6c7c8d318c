"""Three models' own syntaxes as they write them: answers to replay as token ids through their real recipes."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from deepinfra.interfaces import Recipe
from deepinfra.recipes import ChatTemplate, DeepSeek, Harmony
from deepinfra.testing.deepseek import DeepSeekTextModel
from deepinfra.testing.textmodel import TrainedTextModel

__all__ = ("BIG", "CITY", "FAMILIES", "Recorded", "recorded")

Family = Literal["dsml", "hermes", "harmony"]

FAMILIES: tuple[Family, ...] = ("dsml", "hermes", "harmony")

CITY = 'Paris "x" \\ 日本 🙂'
"""The argument `city` of the first call."""

BIG = "12345678901234567890123"
"""The argument `n` of the first call, which no float holds."""

_DSML = (
    "I should look.</think>Let me check.\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="get_weather">\n'
    f'<｜DSML｜parameter name="city" string="true">{CITY}</｜DSML｜parameter>\n'
    f'<｜DSML｜parameter name="n" string="false">{BIG}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>"
)
_HERMES = (
    "I should look.</think>Let me check.\n"
    f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": {json.dumps(CITY)}, "n": {BIG}}}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
_HARMONY = (
    "<|channel|>analysis<|message|>I should look.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Let me check.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f'{{"city": {json.dumps(CITY)}, "n": {BIG}}}<|end|>'
    "<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}<|call|>"
)
_HARMONY_MARKERS = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|constrain|>", "<|call|>")
_HERMES_MARKERS = ("<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")


class Recorded(NamedTuple):
    """A recipe and two answers of its model.

    Attributes:
        recipe: The recipe, over a tokenizer with the model's markers.
        files: What it was built from; `files.tokenizer()` makes control tokens of markers in text.
        eos: Ends an answer.
        calls: Reasoning `I should look.`, text `Let me check.`, calls of `get_weather` (`city`, `n`) and `get_time`.
        text: Reasoning `It is noon.`, text `Sunny.`.
    """

    recipe: Recipe
    files: Any
    eos: int
    calls: str
    text: str


def recorded(family: Family, template: str) -> Recorded:
    """One of `FAMILIES`; `template` is for `hermes`: a chat template that opens `<think>` and shows tools so."""
    if family == "dsml":
        return Recorded(DeepSeek(files := DeepSeekTextModel()), files, 1, _DSML, "It is noon.</think>Sunny.")
    if family == "harmony":
        small = TrainedTextModel(None, ("<|endoftext|>", "<|return|>", *_HARMONY_MARKERS))
        final = "<|channel|>analysis<|message|>It is noon.<|end|><|start|>assistant<|channel|>final<|message|>Sunny."
        return Recorded(Harmony(small), small, small.special_tokens().eos_id or 0, _HARMONY, final)
    small = TrainedTextModel(template, ("<|endoftext|>", "<|im_end|>", *_HERMES_MARKERS))
    return Recorded(
        ChatTemplate(small), small, small.special_tokens().eos_id or 0, _HERMES, "It is noon.</think>Sunny."
    )
