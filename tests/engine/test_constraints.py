"""Constrained answers: what may follow, where they end, what is refused, and how they fail."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import anyio
import jsonschema
import pytest

from deepinfra.core.conversation import Constraint, Conversation, Message, TextPart
from deepinfra.core.drafts import Draft, TokenView
from deepinfra.core.events import Event, Failed, Finished
from deepinfra.core.ids import SeqId
from deepinfra.core.request import GenerateRequest, Prompt, SeqSpec, TextInput
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine, Pool
from deepinfra.engine.constraints import Constraints
from deepinfra.engine.matcher import Matcher, masks_of
from deepinfra.errors import RequestError, UnsupportedFieldError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.given import InlineOffload, ThreadOffload
from deepinfra.interfaces.speculator import Speculator
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.asking import events_of, toy_pool
from deepinfra.testing.schemas import random_schema
from deepinfra.testing.tiny import EOS, USER, TinyRecipe

T = TypeVar("T")
Kind = Literal["json", "json_schema", "regex", "grammar"]

NBYTES = 33  # of a mask over 260 ids


def regex(source: str) -> Constraint:
    return Constraint(kind="regex", source=source)


def spec(constraint: Constraint, *after: int, stop_ids: Sequence[int] = (EOS,)) -> SeqSpec:
    return SeqSpec(
        seq=SeqId(1),
        tokens=(1, 2, *after),
        prompt_len=2,
        max_tokens=100,
        seed=0,
        stop_ids=frozenset(stop_ids),
        constraint=constraint,
    )


async def matcher_of(constraint: Constraint, *after: int, stop_ids: Sequence[int] = (EOS,)) -> Matcher:
    matcher = await Constraints(TinyRecipe(), InlineOffload()).matcher(spec(constraint, *after, stop_ids=stop_ids))
    assert matcher is not None
    return matcher


def ids_of(row: bytes) -> set[int]:
    return {token for token in range(8 * len(row)) if row[token >> 3] >> (token & 7) & 1}


def allowed(matcher: Matcher, nbytes: int = NBYTES) -> set[int]:
    (row,) = matcher.rows((), nbytes)
    return ids_of(row)


def request(constraint: Constraint, **fields: Any) -> GenerateRequest:
    fields.setdefault("input", TextInput("hello"))
    fields.setdefault("max_tokens", 60)
    fields.setdefault("sampling", SamplingParams(temperature=1.0, logprobs=0))
    fields.setdefault("seed", 3)
    return GenerateRequest(constraint=constraint, **fields)


async def answer(constraint: Constraint, pool: Pool | None = None, **fields: Any) -> list[Event]:
    async with Engine(TinyRecipe(), pool or toy_pool(num_blocks=200)) as engine:
        return await events_of(engine, request(constraint, **fields))


def text_of(events: Sequence[Event], choice: int = 0) -> str:
    return "".join(getattr(event, "text", "") for event in events if event.choice == choice)


# -- what may follow ------------------------------------------------------------------------------


async def test_a_mask_is_exactly_what_may_follow() -> None:
    matcher = await matcher_of(regex("ab?[0-9]"))
    assert allowed(matcher) == {ord("a")}
    assert matcher.take(ord("a"))
    assert allowed(matcher) == {ord("b"), *range(ord("0"), ord("9") + 1)}


async def test_a_regex_is_for_the_whole_answer() -> None:
    matcher = await matcher_of(regex("b"))
    assert not matcher.take(ord("a"))
    assert matcher.take(ord("b"))
    assert matcher.complete


async def test_every_stop_id_is_allowed_where_the_constraint_may_end_and_nowhere_else() -> None:
    matcher = await matcher_of(regex("ab?"), stop_ids=(EOS, USER, 7))
    assert allowed(matcher) == {ord("a")}
    matcher.take(ord("a"))
    assert allowed(matcher) == {ord("b"), EOS, USER, 7}
    matcher.take(ord("b"))
    assert allowed(matcher) == {EOS, USER, 7}


@pytest.mark.parametrize("source", ["(?s:.)*", "[^a]*", r"\PC*|[^\n]*", r"(<\[258\]>)*"])
async def test_no_text_is_a_control_token(source: str) -> None:
    matcher = await matcher_of(regex(source))
    assert allowed(matcher) & set(range(256, 264)) == {EOS}  # because it may end at once


async def test_a_grammar_names_control_tokens_by_id_and_text_by_its_characters() -> None:
    matcher = await matcher_of(Constraint(kind="grammar", source=f'start: <[{USER}]> "<[258]>"'))
    assert allowed(matcher) == {USER}
    assert matcher.take(USER)
    for token in b"<[258]>":
        assert allowed(matcher) == {token}
        assert matcher.take(token)
    assert matcher.complete


async def test_padding_of_the_executors_vocabulary_is_never_allowed() -> None:
    matcher = await matcher_of(regex("(?s:.)*"))
    assert max(allowed(matcher, nbytes=50)) == EOS
    assert not matcher.take(260)
    assert not matcher.take(300)
    assert matcher.admits([97, 260, 97]) == 1
    assert matcher.take(97)


async def test_any_json_is_an_object_without_endless_blanks() -> None:
    matcher = await matcher_of(Constraint(kind="json"))
    assert allowed(matcher) == {ord("{")}
    for token in b'{"a":':
        assert ord(" ") not in allowed(matcher) or token != ord(" ")
        assert matcher.take(token)
    assert allowed(matcher) == {ord(" ")}
    assert matcher.take(ord(" "))
    assert not allowed(matcher) & set(b" \t\r\n")


def test_whatever_is_drawn_under_a_schema_is_valid_and_ends() -> None:
    """Tokens are drawn at random among those allowed: the worst model there is."""
    constraints = Constraints(TinyRecipe(), InlineOffload())

    async def walk(seed: int) -> None:
        rng = random.Random(seed)
        schema = random_schema(rng)
        matcher = await constraints.matcher(spec(Constraint(kind="json_schema", source=json.dumps(schema.schema))))
        assert matcher is not None
        drawn: list[int] = []
        while not matcher.complete and (token := rng.choice(sorted(allowed(matcher)))) != EOS:
            assert matcher.take(token)
            drawn.append(token)
        value = json.loads(bytes(drawn))
        checker = jsonschema.FormatChecker()
        jsonschema.Draft202012Validator(schema.schema, format_checker=checker).validate(value)
        assert len(drawn) <= schema.nbytes

    async def walks() -> None:
        for seed in range(300):
            await walk(seed)

    anyio.run(walks)


# -- drafts -----------------------------------------------------------------------------------------


async def test_there_is_a_mask_behind_every_draft_and_nothing_moves() -> None:
    matcher = await matcher_of(regex("ab[cd]"))
    first, second, third = matcher.rows([ord("a"), ord("b")], NBYTES)
    assert (ids_of(first), ids_of(second), ids_of(third)) == ({ord("a")}, {ord("b")}, {ord("c"), ord("d")})
    assert allowed(matcher) == {ord("a")}


async def test_drafts_that_complete_the_constraint_are_undone_too() -> None:
    matcher = await matcher_of(regex("ab"))
    rows = matcher.rows([ord("a"), ord("b")], NBYTES)
    assert ids_of(rows[-1]) == {EOS}
    assert not matcher.complete
    assert allowed(matcher) == {ord("a")}


async def test_a_step_has_a_row_for_every_draft_even_one_that_is_not_allowed() -> None:
    matcher = await matcher_of(regex("ab"))
    rows = masks_of([(SeqId(4), matcher, (ord("a"), ord("x"), ord("y")))], 260)
    assert (rows.seqs, rows.rows_per_seq, len(rows.bits)) == ((4,), (4,), 4 * NBYTES)


class Drafting(Speculator):
    """Proposes the same text whatever comes."""

    max_drafts = 4

    def __init__(self, text: bytes) -> None:
        self._text = tuple(text)

    def propose(self, views: Sequence[TokenView]) -> Sequence[Draft]:
        return [Draft(view.seq, self._text, (0.9,) * 4) for view in views]


class Watched(ToyExecutor):
    """Notes the drafts it is given."""

    def _run(self, plan: Any) -> Any:
        self.drafts = [*getattr(self, "drafts", []), *(item.drafts for item in plan.items if item.drafts)]
        return super()._run(plan)


async def test_a_draft_that_the_constraint_forbids_is_dropped_before_it_is_verified() -> None:
    executor = Watched(num_blocks=64, block_size=2)
    pool = Pool(Fcfs(), executor, speculator=Drafting(b"aaxa"))
    events = await answer(regex("[ab]{9}"), pool)
    assert set(executor.drafts) == {(97, 97)}
    assert text_of(events) == text_of(await answer(regex("[ab]{9}")))


# -- where it ends ------------------------------------------------------------------------------------


async def test_an_answer_that_can_only_end_ends_without_another_step() -> None:
    pool = toy_pool(num_blocks=64)
    events = await answer(regex("abc"), pool)
    last = events[-1]
    assert isinstance(last, Finished)
    assert (text_of(events), last.reason, last.usage.completion_tokens) == ("abc", "stop", 3)
    assert pool.stats().steps == 3


async def test_the_token_that_completes_it_is_a_stop_even_where_it_is_the_last_allowed() -> None:
    last = (await answer(regex("abc"), max_tokens=3))[-1]
    assert isinstance(last, Finished)
    assert last.reason == "stop"


async def test_an_answer_cut_short_says_so() -> None:
    last = (await answer(regex("[a-z]{50}"), max_tokens=10))[-1]
    assert isinstance(last, Finished)
    assert last.reason == "length"


async def test_accepted_drafts_end_where_the_constraint_does() -> None:
    pool = Pool(Fcfs(), ToyExecutor(num_blocks=64, block_size=2), speculator=Drafting(b"bcd\0"))
    events = await answer(regex("abcd"), pool)
    last = events[-1]
    assert isinstance(last, Finished)
    assert (text_of(events), last.reason, last.usage.completion_tokens) == ("abcd", "stop", 4)
    assert pool.stats().steps == 2


async def test_each_of_several_answers_has_a_way_of_its_own() -> None:
    events = await answer(regex("[a-z]{4,9}"), n=4)
    texts = [text_of(events, choice) for choice in range(4)]
    assert len(set(texts)) > 1
    assert all(4 <= len(text) <= 9 and text.isalpha() for text in texts)


async def test_a_conversations_constraint_is_composed_by_its_recipe() -> None:
    said = Conversation(messages=(Message(role="user", content=(TextPart("hi"),)),), constraint=regex("yes|no"))
    async with Engine(TinyRecipe(), toy_pool()) as engine:
        own = await events_of(engine, GenerateRequest(input=said, max_tokens=9))
        over = await events_of(engine, GenerateRequest(input=said, max_tokens=9, constraint=regex("maybe")))
    assert text_of(own) in ("yes", "no")
    assert text_of(over) == "maybe"


async def test_a_dead_end_fails_the_answer_by_its_own_code() -> None:
    events = await answer(Constraint(kind="grammar", source="start: /a/ <[260]>"))
    assert [type(event) for event in events[-1:]] == [Failed]
    assert isinstance(events[-1], Failed)
    assert events[-1].code == "constraint-failed"
    assert text_of(events) == "a"


async def test_a_constraint_that_is_met_is_no_dead_end_where_no_stop_id_says_so() -> None:
    matcher = await matcher_of(regex("ab"), *b"ab", stop_ids=())
    assert matcher.complete
    assert allowed(matcher) == set(range(8 * NBYTES))  # a step must sample something
    assert matcher.why_stuck == ""


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "source", "told"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "(" + "a" * 9_000, "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", '{"not": {}}', "'not'"),
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", '{"type": "string", "format": "banana"}', "banana"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "incompatible"),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"minimum": 3}]}', "oneOf"),
        ("json_schema", '{"$ref": "#"}', "nothing matches"),
        ("grammar", "start: foo", "foo"),
        ("grammar", "start: <[4000]>", "4000"),
        ("grammar", "start: A\nA: /a/ & /b/", "nothing matches"),
    ],
)
async def test_what_is_wrong_with_a_constraint_is_told_in_one_line(kind: Kind, source: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as refused:
        await answer(Constraint(kind=kind, source=source))
    assert refused.value.param == "constraint"
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


async def test_a_constraint_that_takes_too_long_is_refused() -> None:
    async def never(function: Callable[..., T], /, *args: object) -> T:
        await anyio.sleep_forever()
        raise AssertionError

    constraints = Constraints(TinyRecipe(), never, time_limit_s=0.001)
    for _ in range(2):
        with pytest.raises(RequestError, match="more than") as refused:
            await constraints.matcher(spec(regex("a")))
        assert refused.value.param == "constraint"


async def test_a_constraint_that_was_compiled_too_late_is_there_when_it_is_asked_for_again() -> None:
    threads: list[Callable[[], object]] = []

    async def late(function: Callable[..., T], /, *args: object) -> T:
        threads.append(partial(function, *args))
        await anyio.sleep_forever()
        raise AssertionError

    constraints = Constraints(TinyRecipe(), late, time_limit_s=0.001)
    with pytest.raises(RequestError, match="more than"):
        await constraints.matcher(spec(regex("a")))
    (thread,) = threads
    thread()
    assert await constraints.matcher(spec(regex("a"))) is not None


async def test_a_long_text_that_must_follow_does_not_make_masks_slow() -> None:
    asked: list[int] = []

    class Asked(TinyRecipe):
        def __init__(self) -> None:
            super().__init__()
            encode = self._tokenizer.encode

            def counted(text: str) -> list[int]:
                asked.append(len(text))
                return encode(text)

            self._tokenizer.encode = counted  # type: ignore[method-assign]

    text = "be" * 50_000
    constraint = Constraint(kind="json_schema", source=json.dumps({"const": text}))
    matcher = await Constraints(Asked(), InlineOffload()).matcher(spec(constraint))
    assert matcher is not None
    for byte in f'"{text[:2000]}'.encode():
        assert allowed(matcher) == {byte}
        assert matcher.take(byte)
    assert asked
    assert max(asked) < 1000


async def test_a_constraint_that_is_too_long_is_refused() -> None:
    with pytest.raises(RequestError, match="characters"):
        await answer(regex("a" * 600_000))


async def test_an_executor_without_masks_refuses() -> None:
    class Plain(ToyExecutor):
        @property
        def provides(self) -> frozenset[str]:
            return super().provides - {"masks"}

    with pytest.raises(UnsupportedFieldError) as refused:
        await answer(regex("a"), Pool(Fcfs(), Plain()))
    assert refused.value.param == "constraint"


async def test_a_recipe_that_drops_a_conversations_constraint_is_no_reason_to_drop_it() -> None:
    class Deaf(TinyRecipe):
        def render(self, conversation: Conversation) -> Prompt:
            return super().render(Conversation(messages=conversation.messages))

    said = Conversation(messages=(Message(role="user", content=(TextPart("hi"),)),), constraint=regex("a"))
    async with Engine(Deaf(), toy_pool()) as engine:
        with pytest.raises(UnsupportedFieldError, match="constraint"):
            await events_of(engine, GenerateRequest(input=said))


async def test_going_on_past_the_end_contradicts_a_constraint() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        await answer(regex("a"), ignore_eos=True)


# -- compiled once ----------------------------------------------------------------------------------------


class Counting(Constraints):
    compiled = 0

    def _built(self, constraint: Constraint) -> Any:
        self.compiled += 1
        return super()._built(constraint)


async def test_a_text_is_compiled_once_however_many_ask() -> None:
    constraints = Counting(TinyRecipe(), ThreadOffload())
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(constraints.matcher, spec(regex("a{3}")))
    await constraints.matcher(spec(regex("a{3}")))
    assert constraints.compiled == 1


async def test_a_refusal_is_remembered_too() -> None:
    constraints = Counting(TinyRecipe(), ThreadOffload())
    for _ in range(2):
        with pytest.raises(RequestError):
            await constraints.matcher(spec(regex("(")))
    assert constraints.compiled == 1


async def test_who_stops_waiting_takes_nothing_from_those_who_wait() -> None:
    constraints = Counting(TinyRecipe(), ThreadOffload())
    slow = Constraint(kind="json_schema", source='{"type": "integer", "multipleOf": 9973}')
    with anyio.move_on_after(0.001):
        await constraints.matcher(spec(slow))
    assert await constraints.matcher(spec(slow)) is not None


async def test_the_longest_unused_are_forgotten() -> None:
    constraints = Counting(TinyRecipe(), InlineOffload())
    for index in (*range(130), 129, 0):
        await constraints.matcher(spec(regex(f"a{{{index + 1}}}")))
    assert constraints.compiled == 131
    assert len(constraints._kept) == 128
