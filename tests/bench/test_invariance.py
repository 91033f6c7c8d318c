"""The experiment finds what differs with the batch, and says so only then."""

from __future__ import annotations

import pytest

from deepinfra.bench.invariance import InvarianceReport, InvarianceRun, Question, questions, run_invariance
from deepinfra.core.step import SeqOutput, StepPlan, StepResult, WorkItem
from deepinfra.errors import ConfigError
from deepinfra.executors.toy import ToyExecutor, _Seq
from deepinfra.interfaces.executor import Executor
from deepinfra.testing.tiny import TinyRecipe

RUN = InvarianceRun(prompts=12, least=6, batch=3, new=5)
PROMPTS = [Question(text, tuple(text.encode()[:20])) for text in questions(3, RUN.prompts)]


class Turns(ToyExecutor):
    """Gives another third token in company."""

    def _run(self, plan: StepPlan) -> StepResult:
        self._company = len(plan.items) - 1
        return super()._run(plan)

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        output = super()._sample(item, state)
        third = len(state.tokens) - state.opened.prompt_len == 2
        return output._replace(tokens=((output.tokens[0] + self._company) % 256,)) if third else output


class Rounds(Turns):
    """Gives other logprobs in company."""

    def _sample(self, item: WorkItem, state: _Seq) -> SeqOutput:
        output = ToyExecutor._sample(self, item, state)
        probs = tuple(probs._replace(logprob=probs.logprob - self._company * 1e-12) for probs in output.probs)
        return output._replace(probs=probs)


async def verify(ordinary: Executor, invariant: Executor | str, run: InvarianceRun = RUN) -> InvarianceReport:
    async with ordinary:
        if isinstance(invariant, str):
            return await run_invariance(ordinary, invariant, TinyRecipe().tokenizer, PROMPTS, run)
        async with invariant:
            return await run_invariance(ordinary, invariant, TinyRecipe().tokenizer, PROMPTS, run)


async def test_the_first_token_that_differs_is_shown_and_the_search_ends() -> None:
    report = await verify(Turns(), ToyExecutor())
    assert report.kept
    assert (report.ordinary.prompts, report.ordinary.texts, report.ordinary.logprobs) == (3, 3, 3)
    first = report.ordinary.first
    assert first is not None
    assert (first.prompt, first.at, first.question) == (0, 2, PROMPTS[0].text)
    assert first.alone != first.batched
    assert len(first.common) == 2
    assert len(first.alone[0]) == len(first.batched[0]) == 1


async def test_the_invariant_mode_is_held_to_the_least_number_and_to_all_that_were_searched() -> None:
    report = await verify(Turns(), ToyExecutor())
    assert (report.invariant.prompts, report.invariant.texts, report.invariant.logprobs) == (6, 0, 0)
    report = await verify(ToyExecutor(), ToyExecutor())
    assert (report.ordinary.prompts, report.ordinary.first, report.invariant.prompts) == (12, None, 12)
    assert report.kept


@pytest.mark.parametrize(("mutant", "texts"), [(Turns, 12), (Rounds, 0)])
async def test_an_invariant_mode_that_differs_is_found_out(mutant: type[Turns], texts: int) -> None:
    report = await verify(ToyExecutor(), mutant())
    assert not report.kept
    assert (report.invariant.texts, report.invariant.logprobs) == (texts, 12)


async def test_a_last_prompt_that_would_be_alone_is_not_compared() -> None:
    async with ToyExecutor() as one, ToyExecutor() as other:
        report = await run_invariance(one, other, TinyRecipe().tokenizer, PROMPTS[:4], RUN)
    assert (report.ordinary.prompts, report.invariant.prompts) == (3, 3)


async def test_without_an_invariant_mode_nothing_is_verified() -> None:
    report = await verify(Turns(), "torch computes here")
    assert not report.kept
    assert report.invariant.refused == "torch computes here"
    assert report.ordinary.texts == 3


async def test_a_batch_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="a batch of 3 needs as many sequences of 25 tokens and 21 blocks"):
        await verify(ToyExecutor(num_blocks=20), ToyExecutor())


def test_there_are_200_questions_no_two_alike() -> None:
    assert len(set(questions(0, 200))) == 200
    assert questions(1, 5) == questions(1, 5) != questions(2, 5)
