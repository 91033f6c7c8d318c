"""What a chat template protects, what it cannot, and what is done in its stead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from deepinfra.core.report import RecipeReport
from deepinfra.errors import RequestError
from deepinfra.recipes.chat_template.rendering import Rendered, Renderer
from deepinfra.recipes.chat_template.selftest import NOW
from deepinfra.recipes.chat_template.traits import SHAPES, Traits
from deepinfra.recipes.encoding.loading import Vocabulary
from deepinfra.recipes.output.family import ToolFamily

__all__ = ("describe", "fences_of", "without_fallback")

_SHAPED = re.compile(r"</?[A-Za-z_][^<>\s]*>|\[/?[A-Z][A-Z_]*\]|<\|[^<>\s]+\|>")
_COMMANDS = re.compile(r"(?<![<\w])/(?:no_think|nothink|think)\b|detailed thinking o(?:n|ff)\b")
_NATIVE = {"harmony": "harmony", "dsml": "deepseek", "mistral": "mistral"}
_LONGEST = 40
_FALLBACK_FENCES = ("<tools>", "<tool_call>", "<tool_response>")


def describe(
    renderer: Renderer | None,
    traits: Traits,
    vocabulary: Vocabulary,
    reasoning: tuple[str, str] | None,
    family: ToolFamily,
) -> RecipeReport:
    """The report of a recipe that passed its self-test."""
    control = tuple(sorted(vocabulary.control.items(), key=lambda item: item[1]))
    if renderer is None:
        quirks: tuple[str, ...] = ("The model has no chat template: it completes text only.",)
        return RecipeReport(recipe="ChatTemplate", control=control, quirks=quirks)
    prompts: dict[str, Rendered] = {}
    for name, shape in SHAPES.items():
        try:
            prompts[name] = renderer.render(replace(shape, now=NOW))
        except RequestError:
            continue
    return RecipeReport(
        recipe="ChatTemplate",
        control=control,
        fences=tuple(dict.fromkeys(_fences(prompts, traits))),
        quirks=tuple(_quirks(traits, vocabulary, prompts, reasoning, family)),
        fallbacks=tuple(_fallbacks(traits)),
        reasoning=reasoning,
        tools=family.name,
    )


def without_fallback(report: RecipeReport, traits: Traits) -> RecipeReport:
    """The report of a recipe that refuses tools where the template ignores them."""
    if traits.tools != "fallback":
        return report
    fences = tuple(fence for fence in report.fences if fence not in _FALLBACK_FENCES)
    fallbacks = tuple(line for line in report.fallbacks if not line.startswith("Tools: "))
    return replace(report, tools=None, fences=fences, fallbacks=fallbacks)


def _fences(prompts: dict[str, Rendered], traits: Traits) -> Iterator[str]:
    for name, rendered in prompts.items():
        yield from fences_of(rendered, bool(SHAPES[name].tools))
    if traits.tools == "fallback":
        yield from _FALLBACK_FENCES


def fences_of(rendered: Rendered, tools: bool) -> Iterator[str]:
    """Plain text of the template beside what users wrote: what looks like a marker, and what alone divides two texts.

    With `tools`, JSON's own punctuation stands between texts; then only what looks like a marker counts.
    """
    text, trust = rendered.text, rendered.trust
    ends = [end for _, end in rendered.ranges]
    starts = [start for start, _ in rendered.ranges]
    runs = [match.span() for match in re.finditer(rb"\x01+", trust)]
    for start, end in runs:
        first = next((at for at in starts if start <= at < end), None)
        if start > 0:
            yield from _marker_like(text[start : end if first is None else first].strip().split("\n")[0])
        if end < len(text):
            last = max((at for at in ends if start < at <= end), default=start)
            yield from _marker_like(text[last:end].strip().split("\n")[-1])
        alone = first is None and start > 0 and end < len(text) and not tools
        if alone and any(map(str.isalnum, text[start:end])):
            yield text[start:end].strip()[:_LONGEST]


def _marker_like(line: str) -> list[str]:
    return _SHAPED.findall(line)


def _quirks(
    traits: Traits,
    vocabulary: Vocabulary,
    prompts: dict[str, Rendered],
    reasoning: tuple[str, str] | None,
    family: ToolFamily,
) -> Iterator[str]:
    if traits.system == "none":
        yield "It takes no system message: a conversation that has one is refused in the template's words."
    if traits.content_parts:
        yield "It wants content as a list of parts."
    if not traits.object_arguments:
        yield "It wants the arguments of earlier calls as JSON text."
    if traits.short_ids:
        yield "It wants ids of calls that are nine letters and digits: other ids are mapped to such, always the same."
    if reasoning is not None and "reasoning" in prompts and "12 + 30 = 42" not in prompts["reasoning"].text:
        yield "It does not show the reasoning of earlier turns."
    if {"strftime_now", "date_string"} & traits.names:
        yield "It prints the date: prompts change from day to day unless the option `date` pins it."
    commands = sorted(set(_COMMANDS.findall("\0".join(traits.literals))))
    if commands:
        yield f"It obeys what a user types: {', '.join(commands)}."
    bare = prompts.get("user")
    if bare is not None and _own_text(bare) > _LONGEST:
        yield "It writes a system text of its own where the conversation has none."
    native = next((recipe for part, recipe in _NATIVE.items() if part in family.name), None)
    if native is not None:
        yield f"It has a recipe of its own, {native!r}, which knows more of the model than its template says."
    if not vocabulary.encoder.caches:
        yield "Text is encoded anew at every turn: in this tokenizer it depends on the text before it."


def _own_text(rendered: Rendered) -> int:
    """Characters before what the user wrote, control tokens left out."""
    before = max(0, rendered.trust.find(0))
    return before - sum(end - start for start, end in rendered.ranges if end <= before)


def _fallbacks(traits: Traits) -> Iterator[str]:
    if traits.tools == "fallback":
        why = "does not show them" if traits.known else "teaches a syntax of calls that is not known here"
        yield (
            f"Tools: the template {why}; they are shown in the system text, and calls and results of earlier turns in "
            "the text of their messages."
        )
    elif traits.calls == "text":
        yield "Calls of earlier turns: the template drops them; they are written into the answer's text."
    if not traits.every_call and traits.tools == "template":
        yield "Several calls in one turn: the template shows only the first; they become turns with one call each."
    if traits.system == "first":
        yield "Later system messages: the template takes none; their text is added to the first."
    if not traits.reads("developer"):
        yield "Role developer: becomes system."
