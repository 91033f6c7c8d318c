from __future__ import annotations

from collections.abc import Callable

from deepinfra.recipes import ChatTemplate
from deepinfra.testing.textmodel import TrainedTextModel


def trained(template: str) -> ChatTemplate:
    return ChatTemplate(TrainedTextModel(template, ("<s>", "</s>", "<|user|>")))


def test_plain_text_that_divides_what_people_said_is_reported() -> None:
    alpaca = "{% for m in messages %}{{ '\n\n### ' + m.role + ':\n' + m.content }}{% endfor %}\n\n### assistant:\n"
    assert trained(alpaca).report().fences[:3] == ("### user:", "### assistant:", "<tools>")
    inst = "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]</s>' }}{% endfor %}"
    assert set(trained(inst).report().fences) >= {"[INST]", "[/INST]"}
    assert trained("{% for m in messages %}{{ '<|user|>' + m.content + '</s>' }}{% endfor %}").report().fences == (
        *("<tools>", "<tool_call>", "<tool_response>"),
    )


def test_a_report_names_what_is_peculiar(recipe: Callable[[str], ChatTemplate]) -> None:
    def quirks(name: str) -> str:
        return "\n".join(recipe(name).report().quirks)

    assert "obeys what a user types: /no_think, /think." in quirks("NVIDIA-Nemotron-Nano-v2")
    assert "obeys" not in quirks("Qwen-QwQ-32B")
    assert "nine letters and digits" in quirks("mistralai-Mistral-Nemo-Instruct-2407")
    assert "does not show the reasoning" in quirks("deepseek-ai-DeepSeek-V3.1")
    assert "prints the date" in quirks("openai-gpt-oss-120b")
    assert "a recipe of its own, 'harmony'" in quirks("openai-gpt-oss-120b")
    assert "takes no system message" in quirks("google-gemma-2-2b-it")
    assert "system text of its own" in quirks("Qwen-Qwen2.5-7B-Instruct")
    assert recipe("google-gemma-2-2b-it").report().injectable == ()
    fallbacks = recipe("MiniMax-M3").report().fallbacks
    assert any("teaches a syntax of calls that is not known here" in line for line in fallbacks)
