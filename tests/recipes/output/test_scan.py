from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepinfra.recipes.output.scan import JsonScan, escaped, is_json, quoted

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=12,
)
layouts = st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}])


def scanned(text: str, cuts: list[int]) -> tuple[str, int, JsonScan]:
    """What a value says, where it ended, and the scan; the stream ends behind the text."""
    scan, said, used = JsonScan(), "", 0
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in itertools.pairwise(bounds):
        piece = text[max(used, begin) : end]
        if scan.over or not piece:
            continue
        more, word = scan.feed(piece)
        used, said = max(used, begin) + more, said + word
    scan.end()
    return said, used, scan


@given(values, layouts, st.lists(st.integers(0, 200), max_size=5))
def test_a_value_ends_where_it_ends_however_it_is_cut(value, layout, cuts) -> None:
    text = json.dumps(value, **layout)
    said, used, scan = scanned(text + ' \n</tail>"', cuts)
    assert scan.done
    assert said == text
    assert used >= len(text)
    assert (text + ' \n</tail>"')[used:].lstrip() == '</tail>"'


@given(st.text(alphabet='{}[]",:\\/ntu01e-+.5alsr\n ', max_size=14))
@example('{"a":1,}')
@example("[1,]")
@example('"\\u12"')
@example("01")
@example("-")
@example("1e")
@example('{"a" 1}')
@example("[}")
def test_text_is_json_exactly_where_the_standard_library_says_so(text) -> None:
    try:
        json.loads(text)
        valid = True
    except ValueError:
        valid = False
    assert is_json(text) == valid


@pytest.mark.parametrize("text", ["NaN", "Infinity", "", " ", "nul", "{'a': 1}", "[" * 600 + "]" * 600])
def test_what_is_no_json_is_not_taken_for_it(text) -> None:
    assert not is_json(text)


@pytest.mark.parametrize("number", ["12345678901234567890123", "1e5", "-0.0", "1E+400", "0.10"])
def test_numbers_stay_as_they_are_written(number) -> None:
    said, _, scan = scanned(f'{{"n": {number}}}', [7, 9])
    assert (said, scan.done) == (f'{{"n": {number}}}', True)


def test_line_breaks_inside_strings_are_escaped() -> None:
    said, _, scan = scanned('{"a":\n"x\ny\tz"}', [])
    assert scan.done
    assert said == '{"a":\n"x\\ny\\tz"}'


@given(st.text())
def test_text_stands_in_a_json_string_piece_by_piece(text) -> None:
    assert json.loads(quoted(text)) == text
    assert json.loads('"' + "".join(escaped(char) for char in text) + '"') == text
