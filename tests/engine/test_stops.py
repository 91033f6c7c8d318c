from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.events import Event, TextDelta, TokenLogprobs, ToolStart
from deepinfra.engine.stops import StopFilter


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    stopper = StopFilter(stops)
    shown: list[str] = []
    for piece in pieces:
        if stopper.stopped is not None:
            break
        shown += [
            event.text for event in stopper.feed([TextDelta(choice=0, text=piece)]) if isinstance(event, TextDelta)
        ]
    if stopper.stopped is None:
        shown += [event.text for event in stopper.flush() if isinstance(event, TextDelta)]
    return "".join(shown), stopper.stopped, shown


def first_completed(text: str, stops: list[str]) -> tuple[int, str] | None:
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop and stop in text]
    return (min(ends)[1], min(ends)[2]) if ends else None


texts = st.text(alphabet="ab ", max_size=30)


@given(st.lists(st.text(alphabet="ab ", max_size=4), max_size=12), st.lists(texts.map(lambda t: t[:4]), max_size=3))
def test_any_cutting_gives_the_text_before_the_stop_string_that_completes_first(
    pieces: list[str], stops: list[str]
) -> None:
    shown, stopped, _ = run(pieces, stops)
    whole = "".join(pieces)
    match = first_completed(whole, stops)
    if match is None:
        assert (shown, stopped) == (whole, None)
    else:
        assert (shown, stopped) == (whole[: match[0]], match[1])


@given(pieces=st.lists(st.text(alphabet="ab \n", max_size=5), max_size=6), space=st.text(alphabet=" \n", max_size=4))
def test_a_stop_string_that_ends_in_white_space_not_said_yet_ends_the_answer_where_it_would_end(pieces, space) -> None:
    stops = ["\n\n", "b ", "a\n b"]
    told, peeked = StopFilter(stops), StopFilter(stops)
    events = [TextDelta(choice=0, text=piece) for piece in pieces]
    before = [told.feed(events), peeked.feed(events)]
    shown = peeked.peek(space)
    said = told.feed([TextDelta(choice=0, text=space)])
    assert (before[0], told.stopped) == (before[1], peeked.stopped)
    assert shown == ([] if told.stopped is None else said)
    if told.stopped is None:
        again = StopFilter(stops)
        both = [*again.feed(events), *again.feed([TextDelta(choice=0, text=space + "a")])]
        assert [*before[1], *peeked.feed([TextDelta(choice=0, text=space + "a")])] == both


def test_nothing_that_could_begin_a_stop_string_is_shown() -> None:
    # vLLM issue 3574: DEF, G, HI were sent before J completed the stop string.
    shown, stopped, pieces = run(["ABC", "DEF", "G", "HI", "J", "KL"], ["DEFGHIJ"])
    assert (shown, stopped, pieces) == ("ABC", "DEFGHIJ", ["ABC"])


def test_a_disproved_beginning_is_released() -> None:
    shown, stopped, _ = run(["AB", "x"], ["ABC"])
    assert (shown, stopped) == ("ABx", None)


def test_logprobs_of_tokens_behind_the_cut_are_dropped() -> None:
    stopper = StopFilter(["END"])

    def delta(text: str, token: int) -> list[Event]:
        return [TextDelta(choice=0, text=text, tokens=(TokenLogprobs(token, text.encode(), -1.0),))]

    shown = stopper.feed(delta("ab", 1)) + stopper.feed(delta("cE", 2)) + stopper.feed(delta("ND", 3))
    assert "".join(event.text for event in shown if isinstance(event, TextDelta)) == "abc"
    assert [token.token for event in shown if isinstance(event, TextDelta) for token in event.tokens] == [1, 2]
    assert stopper.stopped == "END"


def test_held_text_comes_before_a_tool_call() -> None:
    stopper = StopFilter(["END"])
    shown = stopper.feed([TextDelta(choice=0, text="E"), ToolStart(choice=0, index=0, id="c", name="f")])
    assert [type(event) for event in shown] == [TextDelta, ToolStart]
