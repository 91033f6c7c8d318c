"""Receipts: however an answer came about, its receipt gives the same tokens again, and an altered one is noticed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from deepinfra.core.conversation import Constraint
from deepinfra.core.events import Finished
from deepinfra.core.model import Computing, ExecutorIdentity
from deepinfra.core.request import GenerateRequest, Prompt, TextInput
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine import Engine, Pool
from deepinfra.engine.receipts import (
    Receipt,
    decoded,
    joined,
    receipt_json,
    receipt_of,
    replay,
)
from deepinfra.engine.receipts.record import digest_of
from deepinfra.errors import EngineNotRunningError, RequestError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.executor import StepHandle
from deepinfra.kvstores import MemoryStore
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.executors import FlakyExecutor
from deepinfra.testing.speculators import Hostile, Oracle
from deepinfra.testing.tiny import EOS, TinyRecipe

PROMPT = (1, 2, 3, 1, 2, 3, 1, 2, 3, 4)


def sealed(receipt: Receipt) -> Receipt:
    return msgspec.structs.replace(receipt, digest=digest_of(receipt))


def toy(**settings: Any) -> Pool:
    pool = {name: settings.pop(name) for name in ("store", "speculator", "name") if name in settings}
    return Pool(Fcfs(), ToyExecutor(**{"num_blocks": 64, **settings}), **pool)


def engine(**settings: Any) -> Engine:
    return Engine(TinyRecipe(), toy(**settings))


def asked(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"input": PROMPT, "max_tokens": 9, "receipt": True, **fields})


async def certified(one: Engine, request: GenerateRequest) -> Receipt:
    async with one.generate(request) as stream:
        async for _ in stream:
            pass
        receipt = stream.receipt
    assert receipt is not None
    return receipt_of(decoded(json.dumps(receipt_json(receipt)).encode()))


# -- again --------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams(temperature=0.0)},
    "drawn": {},
    "several": {"n": 3},
    "seeded": {"seed": -1},
    "logprobs": {"sampling": SamplingParams(logprobs=2), "n": 2},
    "text": {"input": TextInput("grüße")},
    "json": {"input": TextInput("x"), "constraint": Constraint(kind="json"), "max_tokens": 60},
    "regex": {"input": TextInput("x"), "constraint": Constraint(kind="regex", source="[ab]{3}"), "n": 2},
    "stop ids": {"stop_ids": frozenset(range(0, 260, 7)), "max_tokens": 200},
    "endless": {"ignore_eos": True, "max_tokens": 30},
    "as many as fit": {"max_tokens": None},
}


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_is_computed_again_from_its_receipt_alone(way: str) -> None:
    async with engine() as one:
        receipt = await certified(one, asked(**WAYS[way]))
    async with engine() as other:
        outcome = await replay(other, receipt)
    assert (outcome.verdict, outcome.promised, outcome.obstacles) == ("same", True, ())
    assert len(outcome.answers) == asked(**WAYS[way]).n
    assert all(each.logprobs is (True if way == "logprobs" else None) for each in outcome.answers)


async def test_a_stop_string_ends_where_it_did_beside_longer_answers() -> None:
    async with engine() as one:
        texts = [
            [*answer.tokens] for answer in (await certified(one, asked(n=4, seed=5, max_tokens=40))).requests[0].answers
        ]
        stop = next(chr(token) for token in texts[2][3:] if token < 128)
        request = asked(n=4, seed=5, max_tokens=40, stop=(stop,), sampling=SamplingParams(logprobs=1))
        receipt = await certified(one, request)
        lengths = [len(answer.tokens) for answer in receipt.requests[0].answers]
        outcome = await replay(one, receipt)
    assert receipt.requests[0].answers[2].stop == stop
    assert len(set(lengths)) > 1
    assert (outcome.verdict, [each.tokens for each in outcome.answers]) == ("same", lengths)
    assert all(each.logprobs for each in outcome.answers)


async def test_the_cache_and_lack_of_room_change_no_receipt() -> None:
    """The second time blocks come from the device or a store."""
    receipts = []
    for settings in ({}, {"store": MemoryStore()}, {"num_blocks": 9, "max_seqs": 2}):
        async with engine(**settings) as one:
            receipts += [await certified(one, asked(n=3, seed=3)) for _ in range(2)]
            outcome = await replay(one, receipts[0])
            assert outcome.verdict == "same"
    assert len({receipt.requests for receipt in receipts}) == 1


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
async def test_drafts_change_no_receipt(right: bool) -> None:
    async with engine() as plain:
        receipt = await certified(plain, asked(seed=3, max_tokens=30))
    line = [*PROMPT, *receipt.requests[0].answers[0].tokens, *[0] * 8]
    drafting = Oracle(lambda tokens: line[len(tokens)]) if right else Hostile()
    async with engine(speculator=drafting) as one:
        drafted = await certified(one, asked(seed=3, max_tokens=30))
        outcome = await replay(one, receipt)
        stats = one.stats().pools[0]
    assert (stats.drafts_accepted if right else stats.drafts_verified) > 20
    assert drafted.requests == receipt.requests
    assert (outcome.verdict, outcome.promised) == ("same", True)


async def test_a_split_engine_certifies_both_kinds_of_pool_once() -> None:
    parted = Engine(TinyRecipe(), prefill=[toy(name="p")], decode=[toy(name="d0"), toy(name="d1")])
    async with parted as split, engine() as whole:
        receipt = await certified(split, asked(n=2))
        outcome = await replay(whole, receipt)
    assert len(receipt.executors) == 1
    assert (outcome.verdict, outcome.alike) == ("same", False)


async def test_a_lost_executor_changes_no_receipt() -> None:
    import random

    inner = ToyExecutor(num_blocks=64)
    faulty = FlakyExecutor(inner, random.Random(1), rate=1.0, kinds=("lose",), most=1)
    async with Engine(TinyRecipe(), Pool(Fcfs(), faulty)) as one:
        receipt = await certified(one, asked(seed=4))
        assert faulty.injected["lose"] == 1
        outcome = await replay(one, receipt)
    assert outcome.verdict == "same"


async def test_several_prompts_of_a_call_are_one_receipt() -> None:
    async with engine() as one:
        both = joined([await certified(one, asked()), await certified(one, asked(input=(9, 8, 7), n=2))])
        outcome = await replay(one, receipt_of(receipt_json(both)))
    assert [(each.request, each.choice) for each in outcome.answers] == [(0, 0), (1, 0), (1, 1)]
    assert outcome.verdict == "same"


async def test_a_receipt_is_there_behind_the_last_event_and_only_if_asked_for() -> None:
    async with engine() as one:
        async with one.generate(asked(receipt=False)) as stream:
            async for _ in stream:
                pass
        assert stream.receipt is None
        async with one.generate(asked(n=2)) as stream:
            ends = [stream.receipt is not None async for event in stream if isinstance(event, Finished)]
    assert ends == [False, True]


async def test_an_answer_that_failed_has_none() -> None:
    class Broken(ToyExecutor):
        def submit(self, plan: Any) -> StepHandle:
            return super().submit(plan._replace(items=tuple(item._replace(start=9999) for item in plan.items)))

    async with Engine(TinyRecipe(), Pool(Fcfs(), Broken())) as one, one.generate(asked()) as stream:
        async for _ in stream:
            pass
        assert stream.receipt is None


async def test_the_seed_that_was_drawn_is_told() -> None:
    async with engine() as one:
        first, second = [(await certified(one, asked())).requests[0] for _ in range(2)]
    assert first.seed != second.seed
    assert first.answers != second.answers


async def test_nothing_of_the_caller_is_in_it() -> None:
    secrets = {"tenant": "acme-tenant", "salt": "pepper-and-salt"}
    async with engine() as one:
        told = json.dumps(receipt_json(await certified(one, asked(**secrets, priority=3, deadline_s=77.5))))
    assert not any(word in told for word in (*secrets.values(), "tenant", "salt", "77.5"))


async def test_a_bias_that_json_has_no_number_for_is_refused_by_name() -> None:
    class Sampling(ToyExecutor):
        @property
        def provides(self) -> frozenset[str]:
            return super().provides | {"sampling"}

    async with Engine(TinyRecipe(), Pool(Fcfs(), Sampling())) as one:
        with pytest.raises(RequestError, match="logit_bias of -inf") as caught:
            async with one.generate(asked(sampling=SamplingParams(logit_bias=((3, float("-inf")),)))):
                pass
    assert caught.value.param == "logit_bias.3"


async def test_a_rendered_prompt_can_be_asked_as_it_is() -> None:
    """With the ids that end it, which are no others than those it names."""
    prompt = Prompt(ids=PROMPT, stop_ids=frozenset(range(0, 256, 2)), start="raw")
    async with engine() as one:
        receipt = await certified(one, asked(input=prompt, max_tokens=50))
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await one.count(Prompt(ids=(1, 260)))
        with pytest.raises(RequestError, match="states its own constraint"):
            await certified(one, asked(input=prompt, constraint=Constraint(kind="json")))
    assert receipt.requests[0].stop_ids == tuple(range(0, 256, 2))
    assert receipt.requests[0].answers[0].tokens[-1] % 2 == 0
    assert EOS not in receipt.requests[0].stop_ids


# -- not again ----------------------------------------------------------------------------------------


class Another(ToyExecutor):
    """A toy of another seed under the first one's name: a machine that computes wrongly."""

    @property
    def identity(self) -> ExecutorIdentity:
        return super().identity._replace(weights="toy-0")


async def test_the_first_token_that_differs_is_told_with_both_texts() -> None:
    async with engine() as one:
        receipt = await certified(one, asked(n=2, seed=1))
        answers = receipt.requests[0].answers
        tokens = [*answers[1].tokens]
        tokens[5] = (tokens[5] + 1) % 256
        altered = msgspec.structs.replace(answers[1], tokens=tuple(tokens))
        request = msgspec.structs.replace(receipt.requests[0], answers=(answers[0], altered))
        outcome = await replay(one, sealed(msgspec.structs.replace(receipt, requests=(request,))))
    first, second = outcome.answers
    assert outcome.verdict == "differs"
    assert first.at is None
    assert (second.at, second.recorded, second.replayed) == (5, tokens[5], answers[1].tokens[5])
    assert second.before == bytes(token for token in tokens[:5] if token < 256).decode("utf-8", "replace")
    assert second.recorded_text != second.replayed_text


async def test_an_answer_that_ends_sooner_differs_at_its_end() -> None:
    async with engine() as one:
        receipt = await certified(one, asked(seed=1, max_tokens=4))
        answer = receipt.requests[0].answers[0]
        longer = msgspec.structs.replace(answer, tokens=(*answer.tokens, 7))
        stops = (answer.tokens[-1],)
        request = msgspec.structs.replace(receipt.requests[0], answers=(longer,), max_tokens=5, stop_ids=stops)
        outcome = await replay(one, sealed(msgspec.structs.replace(receipt, requests=(request,))))
    (told,) = outcome.answers
    assert (told.at, told.recorded, told.replayed, told.replayed_text) == (4, 7, None, "")


async def test_a_machine_that_computes_wrongly_breaks_the_promise() -> None:
    async with engine() as one:
        receipt = await certified(one, asked(seed=1))
    async with Engine(TinyRecipe(), Pool(Fcfs(), Another(num_blocks=64, seed=9))) as other:
        outcome = await replay(other, receipt)
    assert (outcome.verdict, outcome.promised) == ("differs", True)


class Loose(ToyExecutor):
    """Promises nothing."""

    @property
    def provides(self) -> frozenset[str]:
        return super().provides - {"batch-invariant"}


async def test_without_a_promise_the_same_tokens_are_the_same_all_the_same() -> None:
    async with Engine(TinyRecipe(), Pool(Fcfs(), Loose(num_blocks=64))) as one:
        receipt = await certified(one, asked())
        outcome = await replay(one, receipt)
    assert not receipt.invariant
    assert (outcome.verdict, outcome.promised) == ("same", False)


class Told(ToyExecutor):
    """A toy that says something else of itself."""

    def __init__(self, identity: dict[str, str], computing: dict[str, str]) -> None:
        super().__init__(num_blocks=64)
        self._identity_changes, self._computing_changes = identity, computing

    @property
    def identity(self) -> ExecutorIdentity:
        return super().identity._replace(**self._identity_changes)

    @property
    def computing(self) -> Computing:
        return super().computing._replace(**self._computing_changes)


@pytest.mark.parametrize(
    ("name", "identity", "computing"),
    [
        *((name, {name: "new"}, {}) for name in ("weights", "adapter", "kv_dtype", "numerics")),
        *((name, {}, {name: "new"}) for name in ("dtype", "path", "kernels", "library", "machine")),
        ("form", {}, {"weights": "new"}),
    ],
)
async def test_what_differs_is_named_and_nothing_is_computed(
    name: str, identity: dict[str, str], computing: dict[str, str]
) -> None:
    async with engine() as one:
        receipt = await certified(one, asked())
        before = one.stats().generated_tokens
        assert before
    async with Engine(TinyRecipe(), Pool(Fcfs(), Told(identity, computing))) as other:
        outcome = await replay(other, receipt)
        assert other.stats().generated_tokens == 0
        forced = await replay(other, receipt, anyway=True)
    named = [obstacle for obstacle in outcome.obstacles if obstacle.name == name]
    assert (outcome.verdict, outcome.answers, outcome.promised) == ("incomparable", (), False)
    assert [obstacle.here for obstacle in named] == ["new"]
    assert {obstacle.name for obstacle in outcome.obstacles} <= {
        name,
        "dtype",
    }  # of the toy, `dtype` follows `kv_dtype`
    assert (forced.verdict, forced.promised, forced.obstacles) == ("same", False, outcome.obstacles)


async def test_another_recipe_tokenizer_or_mode_is_named() -> None:
    class Other(TinyRecipe):
        version = "tiny-2"

    async with Engine(Other(), Pool(Fcfs(), Loose(num_blocks=64))) as one:
        outcome = await replay(one, sealed(msgspec.structs.replace(await certified(one, asked()), invariant=True)))
        receipt = await certified(one, asked())
    async with Engine(TinyRecipe(), Pool(Fcfs(), Loose(num_blocks=64))) as other:
        renamed = await replay(other, sealed(msgspec.structs.replace(receipt, tokenizer="another")))
    assert [obstacle.name for obstacle in outcome.obstacles] == ["invariant"]
    assert [obstacle.name for obstacle in renamed.obstacles] == ["recipe", "tokenizer"]


async def test_what_cuts_steps_is_no_obstacle_and_is_told() -> None:
    async with engine() as one:
        receipt = await certified(one, asked())
    async with engine(max_step_tokens=3, block_size=2) as other:
        outcome = await replay(other, receipt)
    assert (outcome.verdict, outcome.alike) == ("same", False)


async def test_media_are_not_in_a_receipt() -> None:
    async with engine() as one:
        receipt = await certified(one, asked())
        request = msgspec.structs.replace(receipt.requests[0], media=("ab" * 32,))
        outcome = await replay(one, sealed(msgspec.structs.replace(receipt, requests=(request,))), anyway=True)
    assert (outcome.verdict, [obstacle.name for obstacle in outcome.obstacles]) == ("incomparable", ["media"])


async def test_what_no_longer_fits_fails_with_the_engines_sentence() -> None:
    async with engine() as one:
        receipt = await certified(one, asked(max_tokens=100, ignore_eos=True))
    async with engine(num_blocks=4) as small:
        outcome = await replay(small, receipt)
    assert outcome.verdict == "failed"
    assert "maximum context length is 16" in outcome.why


async def test_an_engine_that_nobody_entered_replays_nothing() -> None:
    async with engine() as one:
        receipt = await certified(one, asked())
    with pytest.raises(EngineNotRunningError):
        await replay(engine(), receipt)


# -- at the edges -------------------------------------------------------------------------------------


async def test_an_answer_of_no_token_is_told_and_computed_again() -> None:
    """A constraint that nothing meets already, and no id that could say so."""
    prompt = Prompt(ids=PROMPT, stop_ids=frozenset(), start="raw", constraint=Constraint(kind="regex", source="(ab)?"))
    empty = Prompt(ids=PROMPT, stop_ids=frozenset(), start="raw", constraint=Constraint(kind="regex", source=""))
    async with engine() as one:
        for given, logprobs in ((empty, None), (empty, 2), (prompt, 2)):
            receipt = await certified(one, asked(input=given, n=2, sampling=SamplingParams(logprobs=logprobs)))
            outcome = await replay(one, receipt)
            assert (outcome.verdict, outcome.why) == ("same", "")
            assert all(each.logprobs is (None if logprobs is None else True) for each in outcome.answers)
            if given is empty:
                assert [answer.tokens for answer in receipt.requests[0].answers] == [(), ()]


class Sampling(ToyExecutor):
    """A toy that says it does what it does not: parameters of sampling."""

    @property
    def provides(self) -> frozenset[str]:
        return super().provides | {"sampling"}


async def test_numbers_of_any_size_are_told_readably() -> None:
    sampling = SamplingParams(logit_bias=((3, 1e7), (4, -1.7e308)), temperature=1e9, frequency_penalty=-1e30)
    async with Engine(TinyRecipe(), Pool(Fcfs(), Sampling(num_blocks=64))) as one:
        receipt = await certified(one, asked(sampling=sampling))
        assert receipt.requests[0].sampling.params == sampling
        assert (await replay(one, receipt)).verdict == "same"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("logit_bias.3", {"sampling": SamplingParams(logit_bias=((3, float("nan")),))}),
        ("temperature", {"sampling": SamplingParams(temperature=float("inf"))}),
        ("presence_penalty", {"sampling": SamplingParams(presence_penalty=float("nan"))}),
        ("top_k", {"sampling": SamplingParams(top_k=2**40)}),
        ("top_p", {"sampling": SamplingParams(top_p=1.5)}),
        ("stop", {"stop": tuple(map(str, range(2000)))}),
        ("stop[0]", {"stop": ("x" * 70_000,)}),
    ],
)
async def test_what_could_not_be_read_again_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    async with Engine(TinyRecipe(), Pool(Fcfs(), Sampling(num_blocks=64))) as one:
        with pytest.raises(RequestError, match="a receipt cannot hold") as caught:
            await certified(one, asked(**fields))
        assert caught.value.param == param
        async with one.generate(asked(**fields, receipt=False)) as stream:
            assert [event async for event in stream if isinstance(event, Finished)]


async def test_answers_of_many_lengths_are_computed_once_each() -> None:
    async with engine(num_blocks=512) as one:
        request = asked(n=12, seed=5, max_tokens=60, stop=("e", "a", "t"), sampling=SamplingParams(logprobs=1))
        receipt = await certified(one, request)
        lengths = [len(answer.tokens) for answer in receipt.requests[0].answers]
        before = one.stats().generated_tokens
        outcome = await replay(one, receipt)
        computed = one.stats().generated_tokens - before
    assert len(set(lengths)) > 4
    assert (outcome.verdict, {each.logprobs for each in outcome.answers}) == ("same", {True})
    assert computed <= 12 * max(lengths)


async def test_another_logprob_of_any_answer_is_seen() -> None:
    async with engine() as one:
        receipt = await certified(one, asked(n=3, seed=5, sampling=SamplingParams(logprobs=1)))
        (request,) = receipt.requests
        for index, answer in enumerate(request.answers):
            altered = [*request.answers]
            altered[index] = msgspec.structs.replace(answer, logprobs="0" * 64)
            changed = msgspec.structs.replace(request, answers=tuple(altered))
            outcome = await replay(one, sealed(msgspec.structs.replace(receipt, requests=(changed,))))
            assert outcome.verdict == "differs"
            assert [each.logprobs for each in outcome.answers] == [each != index for each in range(3)]


async def test_a_call_of_several_prompts_has_a_receipt_of_all_or_none() -> None:
    async with engine() as one:
        receipt = await certified(one, asked())
    assert joined([receipt]) is receipt
    assert joined([receipt, None]) is None
    assert joined([None]) is None
    assert joined([]) is None
