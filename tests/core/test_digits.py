"""Numbers as they were written."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.digits import Digits, json_text, read_float

FLOATS = st.floats(allow_nan=False, allow_infinity=False).map(repr)
SPELLINGS = st.one_of(
    FLOATS,
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(lambda value: f"{value:.3f}"),
    st.builds(
        "{}{}e{}{}".format, st.sampled_from(["", "-"]), st.integers(0, 99), st.sampled_from("+-"), st.integers(0, 99)
    ),
)


def trees(spellings: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | spellings.map(Digits),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    )


FORMS = st.fixed_dictionaries(
    {},
    optional={
        "indent": st.sampled_from([None, 0, 1, 4]),
        "separators": st.sampled_from([None, (",", ":"), (" , ", " : ")]),
        "sort_keys": st.booleans(),
        "ensure_ascii": st.booleans(),
    },
)


@given(SPELLINGS)
def test_a_number_is_the_float_it_says_and_is_written_as_it_was(text: str) -> None:
    number = read_float(text)
    assert number == float(text)
    assert str(number) == repr(number) == text
    assert json_text(number) == text
    assert (type(number) is float) == (repr(float(text)) == text)


@given(trees(FLOATS), FORMS)
def test_json_is_what_the_standard_library_writes(tree: Any, form: dict[str, Any]) -> None:
    assert json_text(tree, **form) == json.dumps(tree, **{"ensure_ascii": False, **form})


@given(trees(SPELLINGS), FORMS)
def test_every_number_is_written_as_it_was(tree: Any, form: dict[str, Any]) -> None:
    assert json.loads(json_text(tree, **form), parse_float=str) == _spelled(tree)


def _spelled(tree: Any) -> Any:
    """A tree with its numbers' texts."""
    if isinstance(tree, Digits):
        return tree.text
    if isinstance(tree, dict):
        return {key: _spelled(value) for key, value in tree.items()}
    return [_spelled(value) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("text", ["1e999", "-1e999"])
def test_what_no_float_holds_is_written_all_the_same(text: str) -> None:
    assert math.isinf(read_float(text))
    assert json_text({"a": read_float(text)}) == f'{{"a": {text}}}'


def test_keys_that_are_no_strings_are_written_as_json_does() -> None:
    value = {2: Digits("0.10"), None: 1, True: {}, 1.5: []}
    assert json_text(value) == '{"2": 0.10, "null": 1, "true": {}, "1.5": []}'


def test_a_copy_keeps_the_text() -> None:
    number = Digits("12.50")
    for copied in (copy.copy(number), copy.deepcopy([number])[0], pickle.loads(pickle.dumps(number))):
        assert (copied, str(copied)) == (12.5, "12.50")
