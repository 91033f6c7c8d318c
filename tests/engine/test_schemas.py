"""What of a JSON Schema is given to the library, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfra.engine.nesting import schema_levels
from deepinfra.engine.schemas import bounded_grammar, bounded_schema
from deepinfra.errors import RequestError


def given(schema: Any) -> Any:
    kept = json.loads(bounded_schema(json.dumps(schema)))
    if isinstance(kept, dict):
        assert kept.pop("x-guidance")["whitespace_flexible"] is False
    return kept


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("if", {"required": ["a"]}),
        ("then", {}),
        ("else", {}),
        ("not", {}),
        ("contains", {}),
        ("minContains", 2),
        ("uniqueItems", True),
        ("propertyNames", {"maxLength": 3}),
        ("dependentRequired", {"a": ["b"]}),
        ("dependentSchemas", {}),
        ("dependencies", {}),
        ("unevaluatedProperties", False),
        ("unevaluatedItems", False),
        ("$dynamicRef", "#x"),
        ("$recursiveRef", "#"),
        ("nullable", True),
        ("maxLenght", 3),
        ("x-guidance", {"lenient": True}),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_named_with_its_place(keyword: str, value: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"items": {"anyOf": [{}, {keyword: value}]}}}}
    with pytest.raises(RequestError, match=r"'.*' \(at /properties/a/items/anyOf/1\) cannot be enforced") as refused:
        bounded_schema(json.dumps(schema))
    assert repr(keyword) in str(refused.value)
    assert refused.value.param == "constraint"


def test_annotations_and_keywords_that_demand_nothing_are_left_out() -> None:
    noise = {"title": "T", "description": "D", "default": 1, "x-order": 2, "uniqueItems": False, "readOnly": True}
    schema = {"type": "array", "items": {"type": "integer", **noise}, **noise}
    assert given(schema) == {"type": "array", "items": {"type": "integer"}}


def test_names_and_values_are_no_keywords() -> None:
    schema = {"properties": {"not": {"const": {"if": 1}}, "title": {"enum": [{"contains": 2}]}}, "required": ["not"]}
    assert given(schema) == schema


def test_a_whole_schema_may_be_a_truth_value() -> None:
    assert given(True) is True


@pytest.mark.parametrize("source", ["", "{", "[1]", "1", '"object"', '{"items": 3}', '{"anyOf": [null]}'])
def test_what_is_no_schema_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match="schema"):
        bounded_schema(source)


def test_a_schema_nested_too_deeply_is_refused() -> None:
    with pytest.raises(RequestError, match="schema"):
        bounded_schema('{"items": ' * 100_000 + "{}" + "}" * 100_000)


def nested(levels: int, inner: Any) -> Any:
    for _ in range(levels):
        inner = {"type": "array", "items": inner}
    return inner


@pytest.mark.parametrize(("schemas", "levels"), [(20_000, 0), (498, 4), (150, 8)])
def test_references_deeper_than_the_librarys_stack_can_follow_are_refused(schemas: int, levels: int) -> None:
    chain = {f"r{i}": nested(levels, {"$ref": f"#/$defs/r{i + 1}"}) for i in range(schemas)}
    with pytest.raises(RequestError, match="levels deep"):
        bounded_schema(json.dumps({"$defs": {**chain, f"r{schemas}": {}}, "$ref": "#/$defs/r0"}))


def test_many_schemas_that_are_not_deep_are_taken() -> None:
    flat: dict[str, Any] = {f"r{i}": nested(3, {"type": "string"}) for i in range(1000)}
    schema = {"$defs": flat, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in flat]}
    assert given(schema) == schema
    circle = {"$defs": {"a": nested(3, {"$ref": "#/$defs/a"})}, "$ref": "#/$defs/a"}
    assert given(circle) == circle


def test_a_reference_into_the_schema_itself_counts_as_deep_as_what_it_names() -> None:
    schema = {"prefixItems": [nested(400, {"type": "string"}), {"$ref": "#/prefixItems/0"}], "type": "array"}
    assert schema_levels(schema) == 402 + 401
    assert schema_levels({"$ref": "#"}) == 1
    assert schema_levels({"$ref": "#/nowhere/9"}) == 2


@pytest.mark.parametrize(
    "grammar",
    [
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20_000)) + '\nr20000: "a"',
        "start: r0\n" + "\n".join(f"r{i}: (((((r{i + 1}?)?)?)?)?)" for i in range(490)) + '\nr490: "a"',
        "start: r0\n" + "\n".join(f"r{i} \n: r{i + 1}" for i in range(20_000)) + '\nr20000: "a"',
        "start: a::0x0\na::_ : " + "(" * 700 + '"a"' + ")" * 700,
        "start: %lark {\nstart: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(700)) + '\nr700: "a"\n}',
        "start: " + "a " * 10 + "\n" + "\n".join(f"r{i}: r{700 - i}" for i in range(701)),
    ],
)
def test_rules_deeper_than_the_librarys_stack_can_follow_are_refused(grammar: str) -> None:
    with pytest.raises(RequestError, match="levels deep"):
        bounded_grammar(grammar)


def test_many_rules_that_are_not_deep_are_taken() -> None:
    words = "\n".join(f'r{i}: "(((: {i}" // ((({{' for i in range(3000))
    grammar = f"start: {' | '.join(f'r{i}' for i in range(3000))}\n{words}\n"
    assert bounded_grammar(grammar) == grammar


def test_patterns_that_one_value_must_match_all_at_once_are_few() -> None:
    patterns = [{"pattern": f".*{i}.*"} for i in range(20)]
    assert given({"anyOf": patterns}) == {"anyOf": patterns}
    beside = {f"d{i}": {"pattern": f".*{i}.*", "$ref": f"#/$defs/d{i + 1}"} for i in range(20)}
    for schema in ({"allOf": patterns}, {"properties": {"a": {"allOf": patterns}}}, {"$defs": {**beside, "d20": {}}}):
        with pytest.raises(RequestError, match="'pattern'"):
            bounded_schema(json.dumps(schema))


def test_a_count_that_a_repeated_key_could_feign_is_refused() -> None:
    assert given({"type": "object", "minProperties": 2, "required": ["a"]})["minProperties"] == 2
    with pytest.raises(RequestError, match="'minProperties'"):
        bounded_schema('{"type": "object", "minProperties": 3, "required": ["a"]}')


def test_schemas_inside_a_grammar_are_bounded_too() -> None:
    grammar = 'start: a b\na: %json {"type": "object", "title": "x"}\nb: "}" %json{"enum": ["%json {"]}\n'
    bounded = bounded_grammar(grammar)
    form = json.dumps(json.loads(bounded_schema("{}"))["x-guidance"])
    assert bounded == (
        f'start: a b\na: %json {{"type": "object", "x-guidance": {form}}}\n'
        f'b: "}}" %json{{"enum": ["%json {{"], "x-guidance": {form}}}\n'
    )
    with pytest.raises(RequestError, match="'not'"):
        bounded_grammar('start: %json {"not": {}}')
