from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfra.recipes.chat_template.provenance import Marked, concat, safe, trust_of, trusted

# the template writes capitals, everybody else small letters, so that a mask can be checked against its text
ours = st.text("AB \n<|", max_size=8).map(trusted)
theirs = st.text("ab ", max_size=8).map(Marked)
texts = st.lists(ours | theirs, max_size=6).map(concat)

OPERATIONS = (
    lambda a, b: a + b,
    lambda a, b: str.__str__(a) + b,
    lambda a, b: a * 2,
    lambda a, b: a[1:],
    lambda a, b: a[::-1],
    lambda a, b: a[-1:],
    lambda a, b: a.strip(),
    lambda a, b: a.lstrip("Aa"),
    lambda a, b: a.rstrip("\n b"),
    lambda a, b: a.split(),
    lambda a, b: a.split(None, 1),
    lambda a, b: a.split("a"),
    lambda a, b: a.split("<|", 1),
    lambda a, b: a.rsplit("A", 1),
    lambda a, b: a.rsplit(None, 1),
    lambda a, b: a.splitlines(),
    lambda a, b: a.splitlines(True),
    lambda a, b: a.partition("A"),
    lambda a, b: a.rpartition("b"),
    lambda a, b: a.replace("a", b),
    lambda a, b: a.replace("A", b, 1),
    lambda a, b: a.replace("", b),
    lambda a, b: a.join([b, a, b]),
    lambda a, b: a.removeprefix("A"),
    lambda a, b: a.removesuffix("b"),
    lambda a, b: list(a),
    lambda a, b: a.zfill(9),
    lambda a, b: a.center(11),
    lambda a, b: (a.replace("%", "") + "%s-%%") % b,
)


@pytest.mark.parametrize("operation", OPERATIONS)
@settings(max_examples=50)
@given(a=texts, b=texts)
def test_an_operation_gives_the_text_of_str_and_never_trusts_a_foreign_character(operation, a, b) -> None:
    result = operation(a, b)
    assert result == operation(str.__str__(a), str.__str__(b))
    for text in [result] if isinstance(result, str) else result:
        trust = trust_of(text)
        assert len(trust) == len(text)
        assert not any(t and char in "ab" for char, t in zip(str.__str__(text), trust, strict=True))


@given(a=texts)
def test_case_changes_keep_the_mask_and_the_text(a) -> None:
    for method in ("lower", "upper", "title", "capitalize"):
        changed = getattr(a, method)()
        assert changed == getattr(str, method)(a)
        assert trust_of(changed) == trust_of(a)


def test_a_case_change_that_grows_loses_trust() -> None:
    assert trust_of(trusted("ß<|").upper()) == b"\0\0\0\0"


def test_a_safe_string_escapes_what_it_is_added_to() -> None:
    from markupsafe import Markup

    joined = trusted("<|a|>") + safe(Marked("<b>")) + trusted("&")
    assert str(joined) == str("<|a|>" + Markup("<b>") + "&")


def test_adding_something_else_than_text_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        trusted("a") + 1
    with pytest.raises(TypeError):
        trusted("%s") % ("a", "b")
    with pytest.raises(TypeError):
        trusted("%s%s") % ("a",)
