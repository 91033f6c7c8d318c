from __future__ import annotations

from collections.abc import Sequence

import pytest

from deepinfra.core.events import Event, Failed, Finished, TextDelta
from deepinfra.core.ids import Epoch, SeqId
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import MaskRows, SeqOpen, StepPlan, WorkItem
from deepinfra.engine import Engine, Pool
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.asking import events_of
from deepinfra.testing.replay import ReplayExecutor
from deepinfra.testing.tiny import EOS, TinyRecipe


def engine(executor: ReplayExecutor) -> Engine:
    return Engine(TinyRecipe(), Pool(Fcfs(), executor))


def replay(*answers: bytes) -> ReplayExecutor:
    return ReplayExecutor([tuple(answer) for answer in answers], eos=EOS, vocab_size=260)


def text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def test_it_says_what_was_recorded_in_order_and_stops() -> None:
    async with engine(replay(b"one", b"two")) as asked:
        for prompt, answer in (((1, 2), "one"), ((3,), "two")):
            events = await events_of(asked, GenerateRequest(input=prompt))
            assert text(events) == answer
            last = events[-1]
            assert isinstance(last, Finished)
            assert (last.reason, last.usage.completion_tokens) == ("stop", len(answer) + 1)


async def test_a_record_belongs_to_its_prompt() -> None:
    executor = ReplayExecutor({(1,): tuple(b"one"), (2,): tuple(b"two")}, eos=EOS, vocab_size=260)
    async with engine(executor) as asked:
        for prompt, answer in (((2,), "two"), ((1,), "one"), ((2,), "two")):
            assert text(await events_of(asked, GenerateRequest(input=prompt))) == answer
    assert executor.prompts == [(2,), (1,), (2,)]


async def test_each_choice_takes_a_record_and_sampling_changes_nothing() -> None:
    async with engine(replay(b"a", b"b")) as asked:
        request = GenerateRequest(input=(1,), n=2, sampling=SamplingParams(top_k=1, min_p=0.5, logprobs=2))
        events = await events_of(asked, request)
    said = {event.choice: event for event in events if isinstance(event, TextDelta)}
    assert (said[0].text, said[1].text) == ("a", "b")
    assert [len(token.top) for token in said[0].tokens] == [2]


async def test_a_prompt_without_a_record_fails() -> None:
    async with engine(replay(b"a")) as asked:
        await events_of(asked, GenerateRequest(input=(1,)))
        (event,) = await events_of(asked, GenerateRequest(input=(1,)))
    assert isinstance(event, Failed)
    assert "no answer is recorded for prompt number 2" in event.message


@pytest.mark.parametrize("forbidden", [None, 0, 1, 2])
async def test_a_token_that_a_mask_forbids_fails_its_sequence(forbidden: int | None) -> None:
    executor = replay(b"abc")
    opened = SeqOpen(SeqId(1), Epoch(0), (7,), 1, (), seed=0)
    item = WorkItem(SeqId(1), Epoch(0), 0, 3, 0, samples=True, drafts=tuple(b"ab"))
    rows = [bytearray(b"\xff" * 33) for _ in range(3)]
    if forbidden is not None:
        token = b"abc"[forbidden]
        rows[forbidden][token // 8] &= ~(1 << token % 8)
    async with executor:
        handle = executor.submit(StepPlan(0, (item,), opened=(opened,), masked=True))
        handle.masks(MaskRows((SeqId(1),), (3,), b"".join(rows)))
        result = await handle.result()
    if forbidden is None:
        assert result.outputs[0].tokens == tuple(b"abc")
        assert not result.failed
    else:
        assert not result.outputs
        assert f"token {b'abc'[forbidden]} of the record" in result.failed[0].why
