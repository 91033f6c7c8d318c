"""Cases that went wrong in public, by their number in the list of facts; each test's name is what is right."""

from __future__ import annotations

import itertools
import json

import pytest

from deepinfra.core.events import ReasoningDelta, TextDelta, ToolArgumentsDelta
from deepinfra.engine.stops import StopFilter
from deepinfra.models import open_model
from deepinfra.recipes.encoding.loading import load_vocabulary
from deepinfra.recipes.output.families import FAMILIES
from deepinfra.recipes.output.family import output_grammar
from deepinfra.recipes.output.parser import GrammarParser
from deepinfra.testing.answers import WRITERS, Bytes, answer_of
from deepinfra.testing.deepseek import DeepSeekTextModel

DSML = "｜DSML｜"
PARAMETER = f'<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="s" string="true">'
END = f"</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>"


def test_fact_11_arguments_survive_every_two_way_split(each) -> None:
    ids = each.ids(WRITERS[each.name]([("f", {"s": "a b", "x": [1, {"y": 2}]})]))
    for cut in range(len(ids) + 1):
        answer = answer_of(each.events(ids, [cut]))
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
            ("f", {"s": "a b", "x": [1, {"y": 2}]})
        ]


def test_fact_12_no_piece_of_a_closing_tag_leaks_into_a_value(each) -> None:
    for value in ("ls 2>&1", "2 <", "a </", f"</{DSML[:4]}", "<", "a\n<b></b>", "</ parameter>"):
        parser, said = each.parser(), ""
        whole = json.dumps({"s": value}, ensure_ascii=False)
        for token in each.ids(WRITERS[each.name]([("f", {"s": value})])):
            for event in parser.feed([token]):
                said += event.arguments if isinstance(event, ToolArgumentsDelta) else ""
            assert whole.startswith(said)
        parser.finish("stop")
        assert said == whole


def test_fact_13_a_long_string_argument_is_streamed_as_it_comes(each) -> None:
    value = 'line "quoted"\n\ttab \\ back 日本 🙂 ' * 40
    ids = each.ids(WRITERS[each.name]([("f", {"s": value})]))
    parser = each.parser()
    pieces: list[str] = []
    for at, token in enumerate(ids):
        pieces += [event.arguments for event in parser.feed([token]) if isinstance(event, ToolArgumentsDelta)]
        said = len("".join(pieces).encode())
        if 250 < at < len(value.encode()):  # what is held back is a beginning of a marker at most
            assert said > at - 250
    assert max(map(len, pieces)) < 40
    assert json.loads("".join(pieces)) == {"s": value}


def test_fact_13_escapes_are_whole_wherever_the_stream_is_cut(reader) -> None:
    for tokens in (False, True):
        dsml = reader("dsml", tokens)
        for cut in range(8):
            value = 'x"\\\n\u0001é🙂'
            ids = dsml.ids(PARAMETER + value + END)
            at = len(dsml.ids(PARAMETER)) + cut
            events = dsml.events(ids, [at])
            for event in events:
                if isinstance(event, ToolArgumentsDelta) and event.arguments not in ('{"s": ', '"', "}"):
                    json.loads(f'"{event.arguments}"')
            assert json.loads(answer_of(events).calls[0].arguments) == {"s": value}


def test_fact_14_answers_share_no_parser_and_no_decoder(reader) -> None:
    hermes = reader("hermes", True)
    texts = (WRITERS["hermes"]([("f", {"s": "é🙂"})]), "<think>é</think>日本", WRITERS["hermes"]([("g", {"s": "日"})]))
    parsers = [hermes.parser(choice) for choice in range(3)]
    events: list[list] = [[], [], []]
    for row in itertools.zip_longest(*(hermes.ids(text) for text in texts)):
        for choice, token in enumerate(row):
            events[choice] += [] if token is None else parsers[choice].feed([token])
    for choice, parser in enumerate(parsers):
        events[choice] += parser.finish("stop")
        assert all(event.choice == choice for event in events[choice])
    assert [answer_of(each).calls[:1] and answer_of(each).calls[0].arguments for each in events] == [
        '{"s": "é🙂"}',
        [],
        '{"s": "日"}',
    ]
    assert (answer_of(events[1]).reasoning, answer_of(events[1]).text) == ("é", "日本")


def test_fact_15_tool_syntax_inside_reasoning_is_no_call(each) -> None:
    if each.whole:
        opening, closing = each.family.reasoning or ("", "")
        drafted = f"{opening}I could write to=functions.f {{}}{closing}" if opening else ""
        answer = answer_of(each.events(each.ids(drafted + WRITERS[each.name]([("f", {"s": "a"})]))))
        assert answer.reasoning == ("I could write to=functions.f {}" if opening else "")
        assert [call.name for call in answer.calls] == ["f"]
        return
    call = WRITERS[each.name]([("f", {"s": "a"})])
    answer = answer_of(each.events(each.ids(f"I could{call} maybe</think>no"), start="reasoning"))
    assert answer.calls == []
    assert answer.text == "no"
    assert answer.reasoning.startswith("I could")


def test_fact_16_where_an_answer_begins_is_read_from_the_prompt() -> None:
    vocabulary = Bytes(("<think>", "</think>"))
    grammar = output_grammar(vocabulary.control, ("<think>", "</think>"))
    for start, reasoning, text in (("reasoning", "secret", "answer"), ("text", "", "secretanswer")):
        parser = GrammarParser(grammar, start, vocabulary.token_bytes)
        events = [*parser.feed(vocabulary.encode("secret</think>answer")), *parser.finish("stop")]
        assert answer_of(events).reasoning == reasoning
        assert answer_of(events).text == text  # the marker that closes nothing is dropped


def _stopped(pieces: list[str], stops: list[str], start: str = "text") -> tuple[list[str], str | None]:
    parser = GrammarParser(output_grammar({}, ("<think>", "</think>")), start, lambda token: bytes((token,)))
    stop, shown = StopFilter(stops), []
    for piece in pieces:
        events = stop.feed(parser.feed(list(piece.encode())))
        shown.append("".join(event.text for event in events if isinstance(event, TextDelta | ReasoningDelta)))
    events = [*stop.feed(parser.finish("stop")), *stop.flush()]
    shown.append("".join(event.text for event in events if isinstance(event, TextDelta | ReasoningDelta)))
    return shown, stop.stopped


def test_fact_17_every_possible_beginning_of_a_stop_string_is_held_back() -> None:
    assert _stopped(["ABC", "DEF", "G", "HI", "J"], ["DEFGHIJ"]) == (["ABC", "", "", "", "", ""], "DEFGHIJ")
    assert _stopped(["ABC", "DEF", "G", "HI", "K"], ["DEFGHIJ"]) == (["ABC", "", "", "", "DEFGHIK", ""], None)
    assert _stopped(["ABC", "DEF"], ["DEFGHIJ"]) == (["ABC", "", "DEF"], None)
    assert _stopped(["abcE", "N", "X E", "ND tail"], ["END"]) == (["abc", "", "ENX ", "", ""], "END")
    assert _stopped(["xa", "b", "cd"], ["abc", "b"]) == (["x", "a", "", ""], "b")


def test_fact_18_a_stop_string_is_matched_in_answer_text_only(each) -> None:
    call = WRITERS[each.name]([("f", {"s": "END"})])
    answer = answer_of(each.events(each.ids(call), stops=["END", "f", "s"]))
    assert [json.loads(called.arguments) for called in answer.calls] == [{"s": "END"}]
    assert _stopped(["an END of", "</think>", "the END of"], ["END"], "reasoning")[1] == "END"
    assert "".join(_stopped(["an END of", "</think>", "the END of"], ["END"], "reasoning")[0]) == "an END ofthe "


@pytest.mark.parametrize("model", ["smollm2", "deepseek"])
def test_fact_19_no_syllable_is_lost_token_by_token(model) -> None:
    source = open_model("smollm2") if model == "smollm2" else DeepSeekTextModel()
    tokenizer = load_vocabulary(source, (), 0).tokenizer
    text = "안녕하세요, 만나서 반갑습니다. 뷁똠방각하 쀍 🤷🏽‍♀️ 日本語のテキスト और हिन्दी " * 20
    parser = GrammarParser(output_grammar({}, None, FAMILIES["hermes"]), "text", tokenizer.token_bytes)
    said = "".join(event.text for token in tokenizer.encode(text) for event in parser.feed([token]))
    said += "".join(event.text for event in parser.finish("stop"))
    assert said == text
