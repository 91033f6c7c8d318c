"""Tool syntaxes by family, and which of them a template writes."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfra.recipes.output.families.dsml import ATEM, DSML, DSML_41
from deepinfra.recipes.output.families.functionary import FUNCTIONARY, FUNCTIONARY_32
from deepinfra.recipes.output.families.gigachat import GIGACHAT_3, GIGACHAT_31
from deepinfra.recipes.output.families.glm import GLM, HY3
from deepinfra.recipes.output.families.harmony import HARMONY
from deepinfra.recipes.output.families.hermes import HERMES, MINIMAX_M1
from deepinfra.recipes.output.families.json_list import APERTUS, APRIEL, COMMAND_R, GRANITE_3, MISTRAL_LIST, NEMOTRON
from deepinfra.recipes.output.families.literals import GEMMA_4, LFM2
from deepinfra.recipes.output.families.llama3_json import LLAMA3_JSON
from deepinfra.recipes.output.families.qwen_xml import QWEN_XML, SEED_OSS
from deepinfra.recipes.output.families.tokens import (
    DEEPSEEK_R1,
    DEEPSEEK_V31,
    KIMI,
    MISTRAL,
    MISTRAL_IDS,
    SOLAR_OPEN,
)
from deepinfra.recipes.output.family import ToolFamily

__all__ = ("FAMILIES", "family_of")

_WRITTEN: tuple[tuple[ToolFamily, tuple[str, ...]], ...] = (
    (ATEM, ("<atem:invoke name=",)),
    (HARMONY, ("<|channel|>", "functions.")),
    (DSML_41, ("｜DSML｜", " calls>", " invoke name=")),
    (DSML, ("｜DSML｜", "tool_calls>", "invoke name=")),
    (GEMMA_4, ("<|tool_call>call:",)),
    (LFM2, ("<|tool_call_start|>",)),
    (LFM2, ("<|tool_list_start|>",)),
    (APERTUS, ("<|tools_prefix|>",)),
    (GIGACHAT_31, ("<|function_call|>", "<|role_sep|>")),
    (GIGACHAT_3, ("function call", "<|role_sep|>")),
    (HY3, ("<tool_calls:opensource>",)),
    (HY3, ("':opensource'", "<tool_sep{}>")),
    (FUNCTIONARY_32, (">>>all\n", ">>>${recipient}")),
    (KIMI, ("<|tool_calls_section_begin|>",)),
    (SOLAR_OPEN, ("<|tool_call:begin|>",)),
    (DEEPSEEK_R1, ("<｜tool▁calls▁begin｜>", "```json")),
    (DEEPSEEK_V31, ("<｜tool▁calls▁begin｜>",)),
    (MISTRAL_IDS, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL_LIST, ("[TOOL_CALLS]",)),
    (COMMAND_R, ("<|START_ACTION|>", "tool_name")),
    (NEMOTRON, ("<TOOLCALL>",)),
    (SEED_OSS, ("<seed:tool_call>", "<function=")),
    (QWEN_XML, ("<tool_call>", "<function=", "<parameter=")),
    (FUNCTIONARY, ("<function=", "</function>")),
    (GLM, ("<tool_call>", "<arg_key>", "<arg_value>")),
    (APRIEL, ("<tool_calls>[",)),
    (MINIMAX_M1, ("<tool_calls>\n{", '"name"', '"arguments"')),
    (HERMES, ("<tool_call>", '"name"', '"arguments"')),
    (GRANITE_3, ("<|tool_call|>", "JSON list")),
    (LLAMA3_JSON, ('"name":', '"parameters":')),
)
"""Families with what a template or a vocabulary that has them shows, the more particular first."""

FAMILIES: Mapping[str, ToolFamily] = {family.name: family for family, _ in _WRITTEN}
"""Every family by name."""


def family_of(template: str, control: Mapping[str, int]) -> ToolFamily | None:
    """The family whose syntax a chat template writes, if it is one of ours.

    Args:
        template: Its source.
        control: Spelling and id of the model's control tokens; some templates build a marker from pieces.
    """
    shown = template.replace("\\n", "\n").replace('\\"', '"') + "\0" + "\0".join(control)
    return next((family for family, marks in _WRITTEN if all(mark in shown for mark in marks)), None)
