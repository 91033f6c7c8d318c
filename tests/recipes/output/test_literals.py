from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.recipes.output.families import FAMILIES
from deepinfra.recipes.output.grammar import Notation
from deepinfra.recipes.output.literals import LiteralScan
from deepinfra.testing.answers import Answer, answer_of

PYTHON = FAMILIES["lfm2"].states["arguments"].notation
GEMMA = FAMILIES["gemma-4"].states["arguments"].notation
assert PYTHON is not None
assert GEMMA is not None


def read(text: str, notation: Notation, sizes: tuple[int, ...] = (1000,)) -> str | None:
    """The JSON said of arguments that come in pieces; `None` if they are none, or not complete."""
    scan, held, said, at = LiteralScan(notation), "", "", 0
    for index in range(len(text) + 1):
        size = sizes[index % len(sizes)]
        held, at = held + text[at : at + size], at + size
        used, more = scan.feed(held)
        held, said = held[used:], said + more
        if scan.over or at >= len(text):
            break
    return said if scan.done and held + text[at:] == "" else None


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (")", {}),
        (" )", {}),
        (
            "a=\"x\", b = 'y', n=-1, f=1.5e3, t=True, g=False, z=None)",
            {"a": "x", "b": "y", "n": -1, "f": 1500.0, "t": True, "g": False, "z": None},
        ),
        ("t=true, g=false, z=null)", {"t": True, "g": False, "z": None}),
        (
            "a=[1, 'two', [3, ], {}, ], o={'k': {\"l\": [None]}, })",
            {"a": [1, "two", [3], {}], "o": {"k": {"l": [None]}}},
        ),
        ("a=1,)", {"a": 1}),
        (
            r"""a='it\'s', b="say \"hi\"", c='\n\t\\ \x41\u00e9\U0001F642 \d \/')""",
            {"a": "it's", "b": 'say "hi"', "c": "\n\t\\ Aé🙂 \\d /"},
        ),
        ("a='it's so', b='x')", {"a": "it's so", "b": "x"}),
        ('q=\'{"k": "v"}\')', {"q": '{"k": "v"}'}),
        ("code='line 1\nline 2')", {"code": "line 1\nline 2"}),
        (r"s='\ud83d\ude42')", {"s": "🙂"}),
        (r"s='\x4')", {"s": "\\x4"}),
        ("n=123456789012345678901234567890)", {"n": 123456789012345678901234567890}),
        ("'x')", None),
        ("a=Oslo)", None),
        ("a=nan)", None),
        ("a=1 b=2)", None),
        ("a:1)", None),
        ("a=1]", None),
        ("a={1: 2})", {"a": {"1": 2}}),
        ("a=[1)", None),
        ("a=f(1))", None),
        ("a='x", None),
        (r"s='\Uffffffff')", None),
    ],
)
def test_arguments_of_a_python_call(written: str, arguments: object) -> None:
    for sizes in ((1000,), (1,), (3, 2)):
        said = read(written, PYTHON, sizes)
        assert (said if said is None else json.loads(said)) == arguments


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("}", {}),
        ('a:<|"|>x<|"|>,n:1,t:true}', {"a": "x", "n": 1, "t": True}),
        ('a:<|"|>say "hi", <|b> \\n {x}\n<|"|>}', {"a": 'say "hi", <|b> \\n {x}\n'}),
        ('o:{k:[<|"|>v<|"|>,{}],l:null},p:{<|"|>a b<|"|>:1}}', {"o": {"k": ["v", {}], "l": None}, "p": {"a b": 1}}),
        ('"a": "x", b: [1, 2]}', {"a": "x", "b": [1, 2]}),
        ("a:None,b:True}", {"a": None, "b": True}),
        ('a:<|"|>x}', None),
        ("a:x y}", None),
        ("a=1}", None),
    ],
)
def test_arguments_of_gemma(written: str, arguments: object) -> None:
    for sizes in ((1000,), (1,), (3, 2)):
        said = read(written, GEMMA, sizes)
        assert (said if said is None else json.loads(said)) == arguments


strings = st.text(alphabet="ab'\"\\\n\t {}[](),:=é🙂\x01\x7f", max_size=8)
values = st.recursive(
    st.one_of(strings, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(strings, inner, max_size=3)),
    max_leaves=6,
)


@given(
    arguments=st.dictionaries(st.from_regex("[a-z_][a-z0-9_]{0,5}", fullmatch=True), values, max_size=3),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_what_python_prints_is_read_back(arguments: dict[str, object], sizes: list[int]) -> None:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"
    said = read(written, PYTHON, tuple(sizes))
    assert said is not None
    assert json.loads(said) == arguments


@given(
    noise=st.lists(
        st.sampled_from(["a", "=", ":", "'", '"', "\\", "x4", "{", "}", "[", "]", ",", "1", '<|"|>', "<|", " "])
    )
)
def test_noise_says_the_same_however_it_is_cut_and_is_json_if_complete(noise: list[str]) -> None:
    text = "".join(noise)
    for notation in (PYTHON, GEMMA):
        whole = read(text, notation)
        assert read(text, notation, (1,)) == whole
        assert whole is None or isinstance(json.loads(whole), dict)


@pytest.mark.parametrize("tokens", [False, True])
def test_lfm2_calls_are_read_without_a_list_and_as_objects(reader: Callable[..., object], tokens: bool) -> None:
    lfm2 = reader("lfm2", tokens)

    def answer(text: str) -> Answer:
        return answer_of(lfm2.events(lfm2.ids(f"So.<|tool_call_start|>{text}<|tool_call_end|>")))  # type: ignore[attr-defined]

    for text, count in (
        ("f(s='x')", 1),
        ("[f(s='x') , f(s='x')]", 2),
        ('[{"name": "f", "arguments": {"s": "x"}}]', 1),
        ('{"name": "f", "arguments": {"s": "x"}}', 1),
    ):
        read_back = answer(text)
        assert read_back.text == "So."
        assert [(call.name, call.arguments, call.ended) for call in read_back.calls] == count * [
            ("f", '{"s": "x"}', True)
        ]


def test_a_call_whose_arguments_stop_being_literals_has_no_end(reader: Callable[..., object]) -> None:
    lfm2 = reader("lfm2", True)
    answer = answer_of(lfm2.events(lfm2.ids("<|tool_call_start|>[f(s='x', x=open('y'))]<|tool_call_end|>Done.")))  # type: ignore[attr-defined]
    assert [(call.name, call.arguments, call.ended) for call in answer.calls] == [("f", '{"s": "x", "x": ', False)]
    assert answer.text.endswith("Done.")
