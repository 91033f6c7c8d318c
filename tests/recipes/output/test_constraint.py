from __future__ import annotations

import json
import random
from collections.abc import Sequence

import jsonschema
import pytest
from llguidance import LLMatcher

from deepinfra.core.conversation import Constraint, Conversation, Message, TextPart, ToolChoice, ToolDefinition
from deepinfra.engine.schemas import bounded_grammar
from deepinfra.errors import UnsupportedFieldError
from deepinfra.models import open_model
from deepinfra.recipes.encoding.loading import load_vocabulary
from deepinfra.recipes.output.constraint import compose
from deepinfra.recipes.output.families import FAMILIES
from deepinfra.recipes.output.family import ToolFamily, output_grammar
from deepinfra.recipes.output.parser import GrammarParser
from deepinfra.testing.answers import WRITERS, Answer, answer_of
from deepinfra.testing.deepseek import DeepSeekTextModel
from deepinfra.testing.walks import Walker, byte_walker

THINK = ("<think>", "</think>")
USER = Message(role="user", content=(TextPart("x"),))
WEATHER = ToolDefinition(
    name="get_weather",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "unit": {"type": "string", "enum": ["C", "degrees F"]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}/?$"},
            "short": {"type": "string", "maxLength": 3},
            "note": {"type": ["string", "null"]},
            "where": {"$ref": "#/$defs/place"},
            "fast": {"type": "boolean"},
        },
        "required": ["city", "days", "where"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
)
NOTHING = ToolDefinition(name="nothing", strict=True)
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)
CONSTRAINED = [name for name, family in FAMILIES.items() if family.calls is not None]


def phrases(family: ToolFamily) -> list[str]:
    markers = {edge.marker for state in family.states.values() for edge in state.edges}
    markers |= {state.notation.quote for state in family.states.values() if state.notation is not None}
    return sorted(
        {*markers, *(edge.marker for edge in family.entries), *THINK, family.opener, '"', '"}', "}", "\n"} - {"{"}
    )


def asked(mode: str, **more: object) -> Conversation:
    return Conversation(messages=(USER,), tools=(WEATHER, NOTHING), tool_choice=ToolChoice(mode=mode), **more)  # type: ignore[arg-type]


def read(
    vocabulary: Walker, family: ToolFamily | None, ids: Sequence[int], start: str, pair: tuple[str, str] | None
) -> Answer:
    grammar = output_grammar(vocabulary.control, None if family and not family.entries else pair, family)
    parser = GrammarParser(
        grammar,
        "header" if start == "text" and "header" in grammar.states else start,
        vocabulary.token_bytes,
        0,
        (WEATHER, NOTHING),
    )
    return answer_of([*parser.feed(ids), *parser.finish("stop")])


def check_calls(answer: Answer, conversation: Conversation) -> None:
    schemas = {tool.name: tool.parameters or {"additionalProperties": False} for tool in conversation.tools}
    for call in answer.calls:
        assert call.ended
        assert not conversation.tool_choice.names or call.name in conversation.tool_choice.names
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert conversation.tool_choice.parallel or len(answer.calls) <= 1
    if conversation.tool_choice.mode == "required":
        assert answer.calls
        assert answer.text == ""
    if conversation.constraint is not None and not answer.calls:
        jsonschema.validate(json.loads(answer.text), json.loads(conversation.constraint.source))


CASES: dict[str, tuple[Conversation, str, bool]] = {
    "required": (asked("required"), "text", False),
    "required, reasoning open": (asked("required"), "reasoning", True),
    "named, one call, reasoning may follow": (
        Conversation(
            messages=(USER,),
            tools=(WEATHER, NOTHING),
            tool_choice=ToolChoice(mode="required", names=("get_weather",), parallel=False),
        ),
        "text",
        True,
    ),
    "strict": (asked("auto"), "text", False),
    "strict, reasoning open": (asked("auto"), "reasoning", True),
    "one call": (
        Conversation(messages=(USER,), tools=(WEATHER, NOTHING), tool_choice=ToolChoice(parallel=False)),
        "text",
        False,
    ),
    "json or calls": (asked("auto", constraint=Constraint(kind="json_schema", source=SCHEMA)), "text", True),
}


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", CONSTRAINED)
def test_what_a_composed_grammar_allows_parses_back_into_valid_calls(family, case, tokens) -> None:
    conversation, start, thinks = CASES[case]
    vocabulary, syntax, draw = byte_walker(family, tokens), FAMILIES[family], random.Random(f"{family} {case}")
    pair = THINK if thinks and syntax.entries else None
    if start == "reasoning" and pair is None:
        start = "text"
    constraint = compose(conversation, control=vocabulary.control, start=start, reasoning=pair, family=syntax)
    assert constraint is not None
    for _ in range(2):
        ids = vocabulary.walk(constraint, draw, phrases(syntax))
        check_calls(read(vocabulary, syntax, ids, start, pair), conversation)


@pytest.mark.parametrize("family", CONSTRAINED)
def test_calls_as_models_write_them_are_what_a_demanded_call_is(family) -> None:
    vocabulary, syntax = byte_walker(family, True), FAMILIES[family]
    constraint = compose(asked("required"), control=vocabulary.control, family=syntax)
    assert constraint is not None
    arguments = {"city": 'Par"is\n日本', "days": 2, "unit": "degrees F", "note": "x", "where": {"x": 1.5}, "fast": True}
    text = WRITERS[family]([("get_weather", arguments), ("nothing", {})])
    if family in ("harmony", "gigachat-3", "gigachat-3.1"):  # one call, and the token behind it ends the answer
        text = WRITERS[family]([("get_weather", arguments)]).removesuffix("<|call|>")
    matcher = vocabulary.matcher(constraint)
    ids = vocabulary.marked(text)
    taken = matcher.try_consume_tokens(ids)
    assert (taken, matcher.is_accepting()) == (len(ids), True), text.encode()[taken:]


def test_inside_an_opened_block_the_opener_is_not_written_again() -> None:
    vocabulary = byte_walker("dsml", True)
    constraint = compose(asked("required"), control=vocabulary.control, start="tool", family=FAMILIES["dsml"])
    assert constraint is not None
    draw = random.Random(2)
    for _ in range(5):
        ids = vocabulary.walk(constraint, draw, phrases(FAMILIES["dsml"]))
        check_calls(read(vocabulary, FAMILIES["dsml"], ids, "tool", None), asked("required"))


def test_nothing_is_demanded_of_a_free_answer() -> None:
    free = ToolDefinition(name="f", parameters={"type": "object"})
    conversation = Conversation(messages=(USER,), tools=(free,))
    assert compose(conversation, control={}, reasoning=THINK, family=FAMILIES["hermes"]) is None
    assert compose(Conversation(messages=(USER,)), control={}, start="reasoning", reasoning=THINK) is None
    none = Conversation(messages=(USER,), tools=(WEATHER,), tool_choice=ToolChoice(mode="none"))
    assert compose(none, control={}, family=FAMILIES["hermes"]) is None


@pytest.mark.parametrize("kind", ["json", "json_schema", "regex", "grammar"])
def test_a_constraint_stays_as_it_is_where_nothing_stands_around_the_text(kind) -> None:
    wanted = Constraint(kind=kind, source=SCHEMA)
    conversation = Conversation(messages=(USER,), constraint=wanted)
    assert compose(conversation, control={}) is wanted
    assert compose(conversation, control={}, start="raw", reasoning=THINK) is wanted


@pytest.mark.parametrize(
    ("wanted", "text", "wrong"),
    [
        (Constraint(kind="json"), '{"a": [1, {"b": null}]}', '{"a":1}'),
        (Constraint(kind="json_schema", source=SCHEMA), '{"a": 1}', '{"a": "1"}'),
        (Constraint(kind="regex", source=r"(?i)a+/\d\n[/\]]"), "aA/1\n]", "aA/1\n["),
        (Constraint(kind="grammar", source='start: "a" x\nx: "b" | "c"'), "ac", "ad"),
    ],
)
@pytest.mark.parametrize("tokens", [False, True])
def test_an_answer_is_constrained_behind_its_reasoning(wanted, text, wrong, tokens) -> None:
    vocabulary = byte_walker("hermes", tokens)
    conversation = Conversation(messages=(USER,), constraint=wanted)
    opened = compose(conversation, control=vocabulary.control, start="reasoning", reasoning=THINK)
    may = compose(conversation, control=vocabulary.control, reasoning=THINK)
    assert opened is not None
    assert may is not None
    for constraint, before in (
        (opened, "so {\n</think>"),
        (opened, "</think>\n\n"),
        (may, ""),
        (may, "<think>\nso\n</think>\n"),
    ):
        for said, valid in ((text, True), (wrong, False)):
            matcher, ids = vocabulary.matcher(constraint), vocabulary.marked(before + said)
            taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert taken == valid, (before, said)


def test_strict_calls_leave_the_text_free_until_a_block_is_opened() -> None:
    for tokens in (False, True):
        vocabulary = byte_walker("hermes", tokens)
        constraint = compose(asked("auto"), control=vocabulary.control, family=FAMILIES["hermes"])
        assert constraint is not None
        for text, valid in (
            ("any <tool text { here", True),
            ('first\n<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>', True),
            ('first\n<tool_call>\n{"name": "other', False),
            ('<tool_call>\n{"name": "get_weather", "arguments": {"days": 1', False),
        ):
            matcher, ids = vocabulary.matcher(constraint), vocabulary.marked(text)
            assert (matcher.try_consume_tokens(ids) == len(ids)) == valid, text


def test_a_tool_that_is_not_strict_may_get_any_object_unless_a_call_is_demanded() -> None:
    loose = ToolDefinition(name="loose", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
    vocabulary = byte_walker("hermes", False)
    for choice, text, valid in (
        (ToolChoice(), '{"b": {"c": []}}', True),
        (ToolChoice(mode="required"), '{"b": {"c": []}}', False),
        (ToolChoice(mode="required"), '{"a": 1}', True),
        (ToolChoice(mode="required"), "{}", True),
    ):
        conversation = Conversation(messages=(USER,), tools=(loose, NOTHING), tool_choice=choice)
        constraint = compose(conversation, control={}, family=FAMILIES["hermes"])
        assert constraint is not None
        ids = vocabulary.marked(f'<tool_call>\n{{"name": "loose", "arguments": {text}}}\n</tool_call>')
        assert (vocabulary.matcher(constraint).try_consume_tokens(ids) == len(ids)) == valid


def test_what_no_grammar_can_enforce_is_left_out_of_a_tool_that_is_not_strict() -> None:
    parameters = {
        "$schema": "x",
        "type": "object",
        "properties": {
            "a": {
                "type": "array",
                "uniqueItems": True,
                "items": {"type": "string", "format": "odd", "pattern": "(?=x)y"},
            },
            "b": {"type": "string", "pattern": "^[ab]+$", "not": {"const": "ab"}},
            "c": {"type": "object", "minProperties": 3, "format": {}},
        },
        "required": ["a"],
        "if": {"required": ["b"]},
    }
    vocabulary = byte_walker("hermes", False)
    for strict in (False, True):
        tool = ToolDefinition(name="f", parameters=parameters, strict=strict)
        conversation = Conversation(messages=(USER,), tools=(tool,), tool_choice=ToolChoice(mode="required"))
        constraint = compose(conversation, control={}, family=FAMILIES["hermes"])
        assert constraint is not None
        grammar = LLMatcher.grammar_from_lark(constraint.source)
        assert LLMatcher(vocabulary.library, grammar, log_level=0).is_error() == strict
        if not strict:
            ids = vocabulary.marked('<tool_call>\n{"name": "f", "arguments": {"a": ["x", "x"], "b": "')
            matcher = vocabulary.matcher(constraint)
            assert matcher.try_consume_tokens(ids) == len(ids)
            assert matcher.validate_tokens(list(b"abc")) == 2


@pytest.mark.parametrize("family", ["dsml", "qwen-xml", "glm", "lfm2", "gemma-4"])
def test_a_schema_without_properties_allows_any_parameters(family) -> None:
    open_tool = ToolDefinition(name="f", parameters={"type": "object"})
    vocabulary = byte_walker(family, True)
    conversation = Conversation(messages=(USER,), tools=(open_tool,), tool_choice=ToolChoice(mode="required"))
    constraint = compose(conversation, control=vocabulary.control, family=FAMILIES[family])
    assert constraint is not None
    ids = vocabulary.marked(WRITERS[family]([("f", {"any": "thing", "n": [1]})]))
    matcher = vocabulary.matcher(constraint)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


SHAPES = {
    "arrays": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        [1, 2, 3],
        [[1], [1, 2, 3, 4], ["a", "b"]],
    ),
    "one item": ({"type": "array", "maxItems": 1}, [None], [[1, 2]]),
    "no items": ({"type": "array", "maxItems": 0}, [], [[1]]),
    "anything": ({}, {"a": [1.5, "x", True, None, {"b": {}}], "c-d": []}, []),
    "choices": ({"enum": ["a b", 1, None, [True]]}, [True], ["a", [False]]),
    "any of": ({"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string"}]}, 5, [6, True]),
    "types": ({"type": ["boolean", "null"]}, None, [0, "x"]),
    "tree": ({"$ref": "#/$defs/t"}, {"v": 1, "kids": [{"v": 2, "kids": []}]}, [{"v": "x", "kids": []}, {"v": 1}]),
    "more": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
        {"a": 1, "b": None},
        [{"b": 1}],
    ),
    "not named": (
        {"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": True},
        {"b": 1},
        [{"a": 1}],
    ),
    "optional": (
        {
            "type": "object",
            "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
            "required": ["b"],
            "additionalProperties": False,
        },
        {"b": 2, "c": 3},
        [{"a": 1}, {"c": 3, "b": 2}, {"b": 2, "d": 1}],
    ),
    "no type": ({"properties": {"a": {"type": "integer"}}, "additionalProperties": False}, {"a": 1}, [{"a": "x"}]),
}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
    "required": ["v", "kids"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("family", ["lfm2", "gemma-4", "hermes"])
def test_every_notation_holds_values_to_their_schema(family, case) -> None:
    schema, valid, invalid = SHAPES[case]
    tool = ToolDefinition(
        name="f",
        strict=True,
        parameters={"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"t": TREE}},  # type: ignore[dict-item]
    )
    conversation = Conversation(messages=(USER,), tools=(tool,), tool_choice=ToolChoice(mode="required"))
    vocabulary = byte_walker(family, True)
    constraint = compose(conversation, control=vocabulary.control, family=FAMILIES[family])
    assert constraint is not None
    for value in (valid, *invalid):
        ids, matcher = vocabulary.marked(WRITERS[family]([("f", {"x": value})])), vocabulary.matcher(constraint)
        taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert taken == (value is valid), (value, constraint.source)


@pytest.mark.parametrize("family", ["lfm2", "gemma-4"])
def test_a_large_schema_stays_a_small_grammar_in_every_notation(family) -> None:
    deep: dict[str, object] = {"type": "string"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"], "additionalProperties": False}
    part = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}, "b": {}}}
    wide = {"type": "object", "properties": {f"p{index}": part for index in range(60)}}
    vocabulary = byte_walker(family, True)
    for parameters in (deep, wide, {"type": "object"}):
        tools = (*(ToolDefinition(name=f"f{index}", parameters=parameters) for index in range(3)), NOTHING)  # type: ignore[arg-type]
        conversation = Conversation(messages=(USER,), tools=tools, tool_choice=ToolChoice(mode="required"))
        constraint = compose(conversation, control=vocabulary.control, family=FAMILIES[family])
        assert constraint is not None
        assert len(constraint.source) < 40_000
        vocabulary.matcher(Constraint(kind="grammar", source=bounded_grammar(constraint.source)))


@pytest.mark.parametrize("word", ["allOf", "prefixItems", "patternProperties", "minProperties"])
def test_what_a_notation_cannot_be_held_to_is_refused_of_a_strict_tool_and_left_free_else(word) -> None:
    schema = {
        "type": "object",
        word: {"p": {}} if word == "patternProperties" else 1 if word == "minProperties" else [{}],
    }
    for strict in (False, True):
        tool = ToolDefinition(name="f", strict=strict, parameters={"type": "object", "properties": {"x": schema}})  # type: ignore[dict-item]
        conversation = Conversation(messages=(USER,), tools=(tool,), tool_choice=ToolChoice(mode="required"))
        vocabulary = byte_walker("gemma-4", True)
        if strict:
            with pytest.raises(UnsupportedFieldError, match=rf"'{word}' of the strict tool 'f'"):
                compose(conversation, control=vocabulary.control, family=FAMILIES["gemma-4"])
            continue
        constraint = compose(conversation, control=vocabulary.control, family=FAMILIES["gemma-4"])
        assert constraint is not None
        ids = vocabulary.marked(WRITERS["gemma-4"]([("f", {"x": {"any": [1]}})]))
        assert vocabulary.matcher(constraint).try_consume_tokens(ids) == len(ids)


def test_a_quote_in_a_parameters_name_is_spelled_as_it_is_read() -> None:
    tool = ToolDefinition(name="f", parameters={"type": "object", "properties": {'k" a': {"type": "string"}}})
    conversation = Conversation(messages=(USER,), tools=(tool,), tool_choice=ToolChoice(mode="required"))
    vocabulary = byte_walker("dsml", True)
    constraint = compose(conversation, control=vocabulary.control, family=FAMILIES["dsml"])
    assert constraint is not None
    text = WRITERS["dsml"]([("f", {"k&quot; a": "v"})])
    assert vocabulary.matcher(constraint).try_consume_tokens(vocabulary.marked(text)) == len(vocabulary.marked(text))


def test_json_has_no_white_space_that_need_not_end() -> None:
    vocabulary = byte_walker("hermes", False)
    constraint = compose(asked("required"), control={}, family=FAMILIES["hermes"])
    assert constraint is not None
    matcher = vocabulary.matcher(constraint)
    assert matcher.consume_tokens(vocabulary.marked('<tool_call>\n{"name": "get_weather", "arguments": {'))
    assert matcher.validate_tokens(list(b" ")) == 0
    assert matcher.validate_tokens(list(b"\n")) == 0


def test_calls_of_a_family_that_cannot_be_constrained_are_refused_by_name() -> None:
    plain = ToolFamily(name="plain")
    with pytest.raises(UnsupportedFieldError, match=r"tool_choice.*'plain'"):
        compose(asked("required"), control={}, family=plain)


def test_a_schema_that_is_no_json_is_refused() -> None:
    for source in ("{", "[]"):
        wanted = Conversation(messages=(USER,), constraint=Constraint(kind="json_schema", source=source))
        with pytest.raises(UnsupportedFieldError, match="no JSON Schema"):
            compose(wanted, control={}, reasoning=THINK)


@pytest.fixture(scope="module")
def smollm2() -> Walker:
    built = load_vocabulary(open_model("smollm2"), (), 0)
    return Walker(built.tokenizer.vocab_size, built.control, built.tokenizer.encode, built.tokenizer.token_bytes)


@pytest.fixture(scope="module")
def deepseek() -> Walker:
    built = load_vocabulary(
        DeepSeekTextModel(), ("<think>", "</think>", "｜DSML｜", "<｜User｜>", "<｜Assistant｜>"), 0
    )
    return Walker(built.tokenizer.vocab_size, built.control, built.tokenizer.encode, built.tokenizer.token_bytes)


@pytest.mark.parametrize("case", CASES)
def test_smollm2_is_held_to_hermes(smollm2, case) -> None:
    conversation, start, thinks = CASES[case]
    pair, draw = THINK if thinks else None, random.Random(case)
    constraint = compose(conversation, control=smollm2.control, start=start, reasoning=pair, family=FAMILIES["hermes"])
    assert constraint is not None
    for _ in range(2):
        ids = smollm2.walk(constraint, draw, phrases(FAMILIES["hermes"]))
        check_calls(read(smollm2, FAMILIES["hermes"], ids, start, pair), conversation)


@pytest.mark.parametrize("case", CASES)
def test_deepseek_is_held_to_dsml(deepseek, case) -> None:
    conversation, start, thinks = CASES[case]
    pair, draw = THINK if thinks else None, random.Random(case)
    constraint = compose(conversation, control=deepseek.control, start=start, reasoning=pair, family=FAMILIES["dsml"])
    assert constraint is not None
    for _ in range(2):
        ids = deepseek.walk(constraint, draw, phrases(FAMILIES["dsml"]))
        check_calls(read(deepseek, FAMILIES["dsml"], ids, start, pair), conversation)
