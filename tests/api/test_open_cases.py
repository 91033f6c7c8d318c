"""Mistakes that other servers were reported to make, each named by its number in the project's facts: here they are
asked over HTTP, of a real recipe over recorded ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from deepinfra.api.app import asgi
from deepinfra.engine import Engine, Pool
from deepinfra.interfaces import Recipe
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.client import Client
from deepinfra.testing.replay import ReplayExecutor
from deepinfra.testing.textmodel import TrainedTextModel
from deepinfra.testing.tiny import EOS, TinyRecipe

CHAT = "/v1/chat/completions"
TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
MARKERS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
USER: Any = {"role": "user", "content": "Weather?"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "日本 é", "parameters": parameters}}


def called(arguments: str, call: str = "call_1", **fields: Any) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    said = {"role": "assistant", "tool_calls": [{"id": call, "type": "function", "function": function}], **fields}
    return [USER, said, {"role": "tool", "tool_call_id": call, "content": "20 C"}]


class Model:
    """A recipe over recorded answers."""

    def __init__(self, recipe: Recipe, eos: int, vocab_size: int, answers: Sequence[Sequence[int]]) -> None:
        self.executor = ReplayExecutor(answers, eos=eos, vocab_size=vocab_size)
        self.recipe, self.answers = recipe, answers
        self.engine = Engine(recipe, Pool(Fcfs(), self.executor), name="m")

    @classmethod
    def templated(cls, template: str, markers: Sequence[str] = MARKERS, answers: Sequence[str] = ("ok",)) -> Model:
        files = TrainedTextModel((TEMPLATES / f"{template}.jinja").read_text(), markers)
        ids = [files.tokenizer().encode(text, add_special_tokens=False).ids for text in answers]
        eos = files.special_tokens().eos_id
        assert eos is not None
        return cls(ChatTemplate(files), eos, files.tokenizer().get_vocab_size(), ids)

    @classmethod
    def of_bytes(cls, *answers: str) -> Model:
        return cls(TinyRecipe(), EOS, 260, [tuple(text.encode()) for text in answers])

    async def ask(self, **fields: Any) -> Any:
        """The whole answer's only choice."""
        async with self.engine:
            status, answer = await Client(asgi(self.engine)).post(CHAT, {"model": "m", "messages": [USER], **fields})
        assert status == 200, answer
        return answer["choices"][0]

    async def stream(self, **fields: Any) -> list[Any]:
        """The deltas of a streamed answer."""
        body = {"model": "m", "messages": [USER], "stream": True, **fields}
        async with self.engine:
            async with Client(asgi(self.engine)).request("POST", CHAT, json=body) as response:
                assert await response.started() == 200
                events = [event async for event in response.events()]
        return [choice for event in events[:-1] for choice in event["choices"]]

    def asked(self, index: int = 0) -> str:
        """A prompt as the model saw it."""
        tokenizer = self.recipe.tokenizer
        return b"".join(map(tokenizer.token_bytes, self.executor.prompts[index])).decode()


class DeepSeekV4:
    """The same behind a socket, since its vocabulary takes seconds to build."""

    def __init__(self, client: OpenAI, speaker: Any) -> None:
        self._client, self.speaker = client, speaker

    def ask(self, **fields: Any) -> Any:
        """A whole answer."""
        answer = self._client.chat.completions.create(**{"model": "m", "messages": [USER], **fields})
        return answer.model_dump()

    def stream(self, **fields: Any) -> list[Any]:
        """The choices of a streamed answer's chunks."""
        asked: dict[str, Any] = {"model": "m", "messages": [USER], "stream": True, **fields}
        chunks = self._client.chat.completions.create(**asked)
        return [choice.model_dump(exclude_unset=True) for chunk in chunks for choice in chunk.choices]


@pytest.fixture
def deepseek(speaker_of: Callable[[Any], Any]) -> Iterator[DeepSeekV4]:
    speaker = speaker_of("dsml")
    with OpenAI(base_url=f"{speaker.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield DeepSeekV4(client, speaker)


# -- histories ------------------------------------------------------------------------------------


async def test_what_a_template_refuses_is_told_in_its_own_words() -> None:
    model = Model.templated("google-gemma-2-2b-it", ("<bos>", "<end_of_turn>", "<start_of_turn>"))
    body = {"model": "m", "messages": [{"role": "system", "content": "rule"}, USER]}
    async with model.engine:
        status, answer = await Client(asgi(model.engine)).post(CHAT, body)
    assert (status, answer["error"]["message"]) == (400, "System role not supported")
    assert answer["error"]["param"] == "messages"


@pytest.mark.parametrize("template", ["Qwen-QwQ-32B", "Qwen3-Coder", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"])
async def test_fact_5_arguments_reach_a_template_as_what_it_wants_once(template: str) -> None:
    model = Model.templated(template)
    await model.ask(messages=called('{"city": "Paris", "n": 12345678901234567890123}'), tools=[tool("get_weather")])
    asked = model.asked()
    assert '\\"city' not in asked
    assert asked.count("Paris") == 1
    assert "12345678901234567890123" in asked


@pytest.mark.parametrize("template", ["Qwen-QwQ-32B", "Qwen3-Coder"])
async def test_fact_5_arguments_that_are_no_json_crash_nothing_and_are_kept(template: str) -> None:
    model = Model.templated(template)
    await model.ask(messages=called("{bad"), tools=[tool("get_weather")])
    assert "{bad" in model.asked()


def test_fact_5_arguments_that_are_no_json_are_kept_in_deepseeks_prompt(deepseek: DeepSeekV4) -> None:
    deepseek.speaker.says("</think>ok")
    deepseek.ask(messages=called("{bad"), tools=[tool("get_weather")])
    assert "{bad" in deepseek.speaker.asked()


@pytest.mark.parametrize("template", ["Qwen-QwQ-32B", "Qwen3-Coder", "Qwen-Qwen2.5-7B-Instruct"])
@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": ""}], ids=str)
async def test_fact_6_an_empty_turn_of_the_assistant_is_not_the_word_none(
    template: str, fields: dict[str, Any]
) -> None:
    model = Model.templated(template)
    await model.ask(messages=called("{}", **fields), tools=[tool("get_weather")])
    assert "None" not in model.asked()
    assert "null" not in model.asked().partition("Weather?")[2]


@pytest.mark.parametrize("template", ["Qwen3.5-4B", "Qwen-QwQ-32B"])
async def test_fact_7_a_developer_and_a_later_system_message_raise_in_no_template(template: str) -> None:
    model = Model.templated(template)
    turns: Any = [
        {"role": "developer", "content": "first rule"},
        USER,
        {"role": "assistant", "content": "Sunny."},
        {"role": "system", "content": "later rule"},
        {"role": "user", "content": "And now?"},
    ]
    await model.ask(messages=turns)
    assert "first rule" in model.asked()
    assert "later rule" in model.asked()


SCHEMAS = {"zebra": {"type": "string", "description": "größe 日本"}, "apple": {"type": "integer"}, "mid": {}}


def in_order(asked: str) -> bool:
    assert "größe 日本" in asked
    assert "\\u" not in asked
    return -1 < asked.index('"zebra"') < asked.index('"apple"') < asked.index('"mid"')


async def test_fact_9_schemas_keep_their_order_and_their_characters() -> None:
    model = Model.templated("Qwen-QwQ-32B")
    await model.ask(tools=[tool("get_weather", **SCHEMAS)])
    assert in_order(model.asked())


def test_fact_9_schemas_keep_their_order_and_their_characters_in_deepseeks_prompt(deepseek: DeepSeekV4) -> None:
    deepseek.speaker.says("</think>ok")
    deepseek.ask(tools=[tool("get_weather", **SCHEMAS)])
    assert in_order(deepseek.speaker.asked())


def test_fact_9_the_same_tools_make_the_same_prompt_and_it_is_cached(deepseek: DeepSeekV4) -> None:
    deepseek.speaker.says("</think>ok", "</think>ok")
    tools = [tool("get_weather", **{name: {"type": "string"} for name in "qwertyuiop"})]
    first, second = deepseek.ask(tools=tools), deepseek.ask(tools=tools)
    assert deepseek.speaker.prompts[0] == deepseek.speaker.prompts[1]
    assert second["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > second["usage"]["prompt_tokens"] - 32


@pytest.mark.parametrize("template", ["unsloth-Apriel-1.5", "upstage-Solar-Open-100B"])
async def test_fact_10_an_id_that_a_template_prints_is_the_one_the_client_sent(template: str) -> None:
    known = json.loads((TEMPLATES / "markers.json").read_text())[template]
    markers = (known["bos"], known["eos"], *known["markers"])
    model = Model.templated(template, markers)
    await model.ask(messages=called("{}", "functions.get_weather:0"), tools=[tool("get_weather")])
    assert "functions.get_weather:0" in model.asked()


async def test_fact_10_an_id_that_the_model_wrote_comes_back_to_it_as_it_wrote_it() -> None:
    name = "Mistral-Small-3.2-24B-Instruct-2506"
    known = json.loads((TEMPLATES / "markers.json").read_text())[name]
    call = '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}'
    model = Model.templated(name, (known["bos"], known["eos"], *known["markers"]), (call, "ok"))
    tools = [tool("get_weather", city={"type": "string"})]
    async with model.engine:
        client = Client(asgi(model.engine))
        _, first = await client.post(CHAT, {"model": "m", "messages": [USER], "tools": tools})
        said = first["choices"][0]["message"]
        assert [made["id"] for made in said["tool_calls"]] == ["a1B2c3D4e"]
        result = {"role": "tool", "tool_call_id": "a1B2c3D4e", "content": "20 C"}
        status, last = await client.post(CHAT, {"model": "m", "messages": [USER, said, result], "tools": tools})
    assert status == 200, last
    before, after = model.executor.prompts
    assert after[: len(before) + len(model.answers[0])] == (*before, *model.answers[0])


# -- answers --------------------------------------------------------------------------------------


def test_fact_14_choices_share_no_parser(deepseek: DeepSeekV4) -> None:
    call = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    deepseek.speaker.says(f"a</think>{call}", "b</think>text", f"c</think>{call}")
    choices = deepseek.stream(n=3, tools=[tool("get_weather")])
    for index, reasoning, names in ((0, "a", ["get_weather"]), (1, "b", []), (2, "c", ["get_weather"])):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == reasoning
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["function"]["name"] for call in calls if "id" in call] == names


async def test_fact_17_no_part_of_a_stop_string_is_sent_before_it_is_disproved() -> None:
    text = "".join(choice["delta"].get("content", "") for choice in await Model.of_bytes("ABCDEFGHIJK").stream())
    assert text == "ABCDEFGHIJK"
    choices = await Model.of_bytes("ABCDEFGHIJK").stream(stop="DEFGHIJ")
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "ABC"
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("said", ["ABCDEFGHI", "ABCDEFGHIX", "ABCDEFDEFGHI", "DDDEFGHI DEFGHI"])
async def test_fact_17_what_only_began_like_a_stop_string_is_sent_in_the_end(said: str) -> None:
    choices = await Model.of_bytes(said).stream(stop=["DEFGHIJ", "XYZ"])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == said


def test_fact_18_a_stop_string_within_reasoning_ends_nothing(deepseek: DeepSeekV4) -> None:
    deepseek.speaker.says("I may END here.</think>No END, yes.")
    (choice,) = deepseek.ask(stop="END")["choices"]
    assert choice["message"]["reasoning_content"] == "I may END here."
    assert choice["message"]["content"] == "No "
    assert choice["finish_reason"] == "stop"


def test_fact_18_a_stop_string_within_a_call_ends_nothing(deepseek: DeepSeekV4) -> None:
    deepseek.speaker.says(
        'x</think><｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">END of the world</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    (choice,) = deepseek.ask(stop="END", tools=[tool("get_weather", city={})])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "END of the world"}


async def test_fact_19_no_syllable_is_lost_however_tokens_cut_it() -> None:
    text = "안녕하세요, 세계! 한국어 음절은 세 바이트입니다 🤷🏽‍♀️ " * 5
    choices = await Model.of_bytes(text).stream()
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text
