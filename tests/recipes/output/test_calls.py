from __future__ import annotations

import json

import pytest

from deepinfra.core.conversation import ToolDefinition
from deepinfra.recipes.output.calls import types_of
from deepinfra.recipes.output.families import FAMILIES
from deepinfra.recipes.output.family import output_grammar
from deepinfra.recipes.output.parser import GrammarParser
from deepinfra.testing.answers import Answer, Bytes, answer_of

D = "｜DSML｜"


def read(family: str, text: str, tools: tuple[ToolDefinition, ...] = (), reason: str = "stop") -> Answer:
    vocabulary = Bytes()
    parser = GrammarParser(
        output_grammar({}, ("<think>", "</think>"), FAMILIES[family]), "text", vocabulary.token_bytes, 0, tools
    )
    return answer_of([*parser.feed(vocabulary.encode(text)), *parser.finish(reason)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (
            '{"name": "f", "arguments": {"n": 12345678901234567890123, "e": 1e5}}',
            '{"n": 12345678901234567890123, "e": 1e5}',
        ),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"id": 7, "other": [{}], "name": "f", "arguments": {}}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": [1]}"}', '{"a": [1]}'),
        ('{"name": "f", "arguments": "Paris"}', '{"arguments": "Paris"}'),
        ('{"name": "f", "arguments": [1, 2]}', '{"arguments": [1, 2]}'),
        ('{"name": "f", "arguments": 5}', '{"arguments": 5}'),
        ('{"name": "f", "arguments": {"a": "x\ny"}}', '{"a": "x\\ny"}'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),  # a brace is missing
        ('\n{ "name" :"f" ,\n "arguments":\n{ "a":1 } }\n', '{ "a":1 }'),
    ],
)
def test_a_calls_object_is_read_as_models_spell_it(written, arguments) -> None:
    answer = read("hermes", f"<tool_call>{written}</tool_call>")
    assert [(call.name, call.arguments, call.ended) for call in answer.calls] == [("f", arguments, True)]
    assert answer.text in ("", "</tool_call>")


@pytest.mark.parametrize(
    "written",
    [
        "",
        "hello",
        "[]",
        '{"nam": "f"}',
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        "{name: f}",
        "{",
    ],
)
def test_what_is_no_call_comes_out_as_text(written) -> None:
    text = f"so: <tool_call>{written}</tool_call>"
    answer = read("hermes", text)
    assert (answer.text, answer.calls) == (text, [])


def test_a_call_whose_arguments_are_no_json_does_not_end_and_the_next_is_parsed() -> None:
    answer = read(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    )
    assert [(call.name, call.ended) for call in answer.calls] == [("f", False), ("g", True)]
    assert answer.calls[0].arguments + answer.text == '{"a": oops}}</tool_call>'


def test_arguments_that_stop_before_a_token_do_not_end_and_the_block_goes_on() -> None:
    vocabulary = Bytes(("<|tool_call_end|>", "<|tool_call_begin|>"))
    grammar = output_grammar(vocabulary.control, None, FAMILIES["kimi"])
    text = "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for name, arguments in (("f", '{"a": 1'), ("g", ""), ("h", '{"b": 2}'))
    )
    parser = GrammarParser(grammar, "text", vocabulary.token_bytes)
    answer = answer_of([*parser.feed(vocabulary.encode(text)), *parser.finish("stop")])
    assert [(call.name, call.arguments, call.ended) for call in answer.calls] == [
        ("f", '{"a": 1', False),
        ("g", "{}", True),
        ("h", '{"b": 2}', True),
    ]
    assert answer.text == ""


def test_a_parameter_that_says_it_is_json_and_is_none_becomes_a_string() -> None:
    answer = read(
        "dsml",
        f'<{D}tool_calls>\n<{D}invoke name="f">\n'
        + "".join(
            f'<{D}parameter name="{key}" string="false">{value}</{D}parameter>\n'
            for key, value in (
                ("a", "not json"),
                ("b", "1e5"),
                ("c", " [1, 2]\n"),
                ("d", "NaN"),
                ("e", ""),
                ("f", "True"),
            )
        )
        + f"</{D}invoke>\n</{D}tool_calls>",
    )
    assert answer.calls[0].arguments == ('{"a": "not json", "b": 1e5, "c": [1, 2], "d": "NaN", "e": "", "f": "True"}')


def test_an_invoke_that_the_block_closes_is_complete() -> None:
    answer = read(
        "dsml",
        f'<{D}tool_calls><{D}invoke name="f"><{D}parameter name="a" string="true">x</{D}parameter></{D}tool_calls>',
    )
    assert [(call.arguments, call.ended) for call in answer.calls] == [('{"a": "x"}', True)]


TYPED = ToolDefinition(
    name="f",
    parameters={
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "n": {"type": "number"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "m": {"type": ["string", "null"]},
            "u": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "k": {"type": ["string", "number"]},
            "r": {"$ref": "#/$defs/r"},
            "e": {"enum": ["1", "2"]},
            "c": {"const": 5},
            "x": {},
        },
        "$defs": {"r": {"type": "array"}},
    },
)


@pytest.mark.parametrize(
    ("key", "written", "said"),
    [
        ("s", "5", '"5"'),
        ("s", "true", '"true"'),
        ("s", '"q"', '"\\"q\\""'),
        ("s", "", '""'),
        ("i", "5", "5"),
        ("i", "12345678901234567890123", "12345678901234567890123"),
        ("i", "five", '"five"'),
        ("n", "5", "5"),
        ("b", "True", "true"),
        ("b", "false", "false"),
        ("o", '{"a": 1}', '{"a": 1}'),
        ("o", "None", "null"),
        ("m", "null", "null"),
        ("m", "None", "null"),
        ("m", "5", '"5"'),
        ("m", "text", '"text"'),
        ("u", "5", "5"),
        ("u", "5.5", '"5.5"'),
        ("u", "x", '"x"'),
        ("k", "5", "5"),
        ("k", "x", '"x"'),
        ("r", "[1]", "[1]"),
        ("e", "1", '"1"'),
        ("c", "5", "5"),
        ("x", "5", "5"),
        ("x", "hello", '"hello"'),
        ("x", '"q"', '"\\"q\\""'),
        ("undeclared", "[1]", "[1]"),
        ("undeclared", "True", '"True"'),
    ],
)
def test_a_value_without_a_type_is_what_the_schema_says(key, written, said) -> None:
    for family, text in (
        (
            "qwen-xml",
            f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>",
        ),
        ("qwen-xml", f"<function=f><parameter={key}>{written}</parameter></function>"),
        ("glm", f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"),
    ):
        answer = read(family, text, (TYPED,))
        assert [call.arguments for call in answer.calls] == [f'{{"{key}": {said}}}']


def test_types_of_a_parameter_are_found_through_references_and_choices() -> None:
    recursive = ToolDefinition(
        name="g", parameters={"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    )
    assert types_of((recursive,), "g", "a") == frozenset()
    assert types_of((TYPED,), "f", "u") == {"string", "integer"}
    assert types_of((TYPED,), "f", "r") == {"array"}
    assert types_of((TYPED,), "other", "r") == frozenset()


def test_only_one_line_end_at_each_side_of_a_value_is_scaffolding() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=s>\n\n x \n\n</parameter>\n</function>\n</tool_call>"
    assert json.loads(read("qwen-xml", text, (TYPED,)).calls[0].arguments) == {"s": "\n x \n"}


def test_an_answer_that_is_json_is_streamed_though_it_could_have_been_a_call() -> None:
    vocabulary, tools = Bytes(), (TYPED,)
    for text in ('{"answer": "long"}', '{"name": "Bob", "age": 3}', '{"name": "f", "age": 3}'):
        assert read("llama3-json", text, tools).text == text
    parser = GrammarParser(output_grammar({}, None, FAMILIES["llama3-json"]), "text", vocabulary.token_bytes, 0, tools)
    assert answer_of(parser.feed(list(b'{"answer": "lon'))).text == '{"answer": "lon'
    parser = GrammarParser(output_grammar({}, None, FAMILIES["llama3-json"]), "text", vocabulary.token_bytes, 0, tools)
    assert len(answer_of(parser.feed(list(b'{"name": "' + b"x" * 2000))).text) > 1900


def test_white_space_between_text_and_blocks_belongs_to_neither() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    answer = read("hermes", f"<think>why</think>\n\nLet me. \n\n{call}\n\n{call}\n")
    assert (answer.reasoning, answer.text, len(answer.calls)) == ("why", "Let me.", 2)
    answer = read("hermes", f"\n\n{call}\nDone.\n")
    assert (answer.text, len(answer.calls)) == ("Done.\n", 1)


def test_an_answer_cut_inside_a_second_block_leaks_no_scaffolding() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    for family, text in (("hermes", call[:-4]), ("kimi", kimi), ("kimi", f"{kimi}<|tool_call_begin|>functions.g")):
        answer = read(family, text, reason="length")
        assert (answer.text, len(answer.calls)) == ("", 1)


def test_a_call_that_was_only_beginning_where_a_limit_cut_is_no_text() -> None:
    for family, text in (
        ("hermes", '<tool_call>\n{"name'),
        ("dsml", f'<{D}tool_calls>\n<{D}invoke name="f'),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.g"),
    ):
        assert read(family, f"Hi.{text}", reason="length").text == "Hi."
        assert read(family, f"Hi.{text}", reason="stop").text == f"Hi.{text}"
    assert read("llama3-json", '{"name', reason="length").text == '{"name'


def test_arguments_that_were_not_begun_are_empty_if_the_model_stopped_there() -> None:
    assert [(c.arguments, c.ended) for c in read("mistral", "[TOOL_CALLS]f[ARGS]").calls] == [("{}", True)]
    assert [(c.arguments, c.ended) for c in read("mistral", "[TOOL_CALLS]f[ARGS]", reason="length").calls] == [
        ("", False)
    ]


def test_a_prompt_may_end_inside_an_opened_block() -> None:
    vocabulary = Bytes((D,))
    parser = GrammarParser(output_grammar(vocabulary.control, None, FAMILIES["dsml"]), "tool", vocabulary.token_bytes)
    text = f'<{D}invoke name="f">\n</{D}invoke>\n</{D}tool_calls>'
    answer = answer_of([*parser.feed(vocabulary.encode(text)), *parser.finish("stop")])
    assert (answer.text, [call.arguments for call in answer.calls]) == ("", ["{}"])


def test_what_stands_between_parameters_and_is_none_is_dropped() -> None:
    parameter = f'<{D}parameter name="a" string="true">x</{D}parameter>'
    text = f'<{D}tool_calls>\n<{D}invoke name="f">\nwell, {parameter} so <{D}para {D}</{D}invoke>\n</{D}tool_calls>'
    answer = read("dsml", text)
    assert (answer.text, [(call.arguments, call.ended) for call in answer.calls]) == ("", [('{"a": "x"}', True)])


def test_a_block_that_breaks_behind_a_call_goes_on_as_text() -> None:
    call = f'<{D}invoke name="f">\n</{D}invoke>\n'
    answer = read("dsml", f"<{D}tool_calls>\n{call}and then\n</{D}tool_calls>")
    assert (answer.text, len(answer.calls)) == (f"and then\n</{D}tool_calls>", 1)
    broken = f'<{D}invoke name="{"x" * 600}'
    answer = read("dsml", f"<{D}tool_calls>\n{call} \n{broken}")
    assert (answer.text, len(answer.calls)) == (broken, 1)


def test_a_header_that_does_not_end_is_no_header_and_is_not_held_for_ever() -> None:
    parser = GrammarParser(output_grammar({}, None, FAMILIES["qwen-xml"]), "text", Bytes().token_bytes)
    text = "the tag <function=" + "is written thus " * 40
    shown = answer_of(parser.feed(list(text.encode()))).text
    assert text.startswith(shown)
    assert len(shown) > 600


def test_a_bare_call_may_follow_reasoning_but_not_text() -> None:
    call = '{"name": "f", "parameters": {}}'
    answer = read("llama3-json", f"<think>why</think>\n\n{call}", (TYPED,))
    assert (answer.reasoning, answer.text, len(answer.calls)) == ("why", "", 1)
    answer = read("llama3-json", f"Like {call}", (TYPED,))
    assert (answer.text, answer.calls) == (f"Like {call}", [])


@pytest.mark.parametrize(("family", "space"), [("dsml", ""), ("dsml-4.1", " ")])
def test_a_quote_in_a_parameters_name_is_read_as_the_history_writes_it(family, space) -> None:
    tags = f"{D}{space}"
    block = "calls" if space else "tool_calls"
    written = f'<{tags}{block}>\n<{tags}invoke name="f">\n<{tags}parameter name="k&quot; a" string="true">v'
    closing = f"</{tags}parameter>\n</{tags}invoke>\n</{tags}{block}>"
    assert [json.loads(call.arguments) for call in read(family, written + closing).calls] == [{'k" a': "v"}]
