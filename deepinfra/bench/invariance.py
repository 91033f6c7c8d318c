"""The experiment that surprises everyone: the same prompts alone and in a batch, at temperature 0."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import TokenProbs
from deepinfra.errors import ConfigError
from deepinfra.interfaces.executor import Executor
from deepinfra.interfaces.recipe import Tokenizer
from deepinfra.testing.host import Host

__all__ = ("Divergence", "InvarianceReport", "InvarianceRun", "ModeReport", "Question", "questions", "run_invariance")

_PROBED = SamplingParams(temperature=0.0, logprobs=2)

_FORMS = (
    "Explain in a few sentences {what}.",
    "Write a short story about {what}.",
    "What would you tell a curious child about {what}?",
    "List three surprising facts about {what}, and say why they matter.",
    "My neighbour and I disagree about {what}. Give the best argument of each side.",
    "Write a letter to a friend in which you describe {what}.",
    "Continue this sentence in your own words: When I first heard of {what}, I",
    "Compare {what} with something from everyday life.",
    "Give step by step advice to someone who has to deal with {what} tomorrow morning.",
    "Summarise what people a hundred years ago may have thought of {what}.",
)

_SUBJECTS = (
    "how bread rises",
    "the way tides follow the moon",
    "a lighthouse in winter",
    "why leaves change their colour",
    "learning to ride a bicycle",
    "the first telephone call",
    "a library that is open all night",
    "how bees find their way home",
    "repairing an old wooden boat",
    "the noise of a busy harbour",
    "why some rivers flow underground",
    "a long journey by train",
    "growing tomatoes on a balcony",
    "the history of the pencil",
    "how a lock and a key fit together",
    "walking through a city at dawn",
    "the taste of salt",
    "a choir without a conductor",
    "why ice floats on water",
    "choosing a name for a ship",
)


class Question(NamedTuple):
    """A prompt as text and as the model's tokens."""

    text: str
    ids: tuple[int, ...]


def questions(seed: int, count: int) -> list[str]:
    """Natural questions of this package's own, no two alike; there are 200."""
    every = [form.format(what=subject) for form in _FORMS for subject in _SUBJECTS]
    return random.Random(seed).sample(every, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvarianceRun:
    """What to run.

    Attributes:
        prompts: Most that are searched for a divergence of the ordinary mode.
        least: The invariant mode is held to at least so many, also where the other diverges sooner.
        batch: Prompts at a time.
        new: Tokens to generate for each.
        seed: Of the choice of prompts.
    """

    prompts: int = 200
    least: int = 32
    batch: int = 8
    new: int = 48
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first token at which a prompt's two answers part.

    Attributes:
        prompt: The prompt's number, from 0.
        question: Its text.
        at: The token's number in the answer, from 0.
        common: The text that both begin with.
        alone: Then, by itself: the text of the token at which they part, and that of the rest of the answer.
        batched: Then, in the batch: the same two.
        apart: How much likelier, as a difference of logarithms, the prompt by itself found its token than the next.
    """

    prompt: int
    question: str
    at: int
    common: str
    alone: tuple[str, str]
    batched: tuple[str, str]
    apart: float


@dataclass(kw_only=True)
class ModeReport:
    """What one mode did.

    Attributes:
        name: `ordinary` or `invariant`.
        about: What its executor says about itself.
        refused: Why it cannot run; empty if it can.
        prompts: How many were compared.
        texts: Of how many the tokens differed.
        logprobs: Of how many a token or a logprob differed, if only in its last bit.
        first: The first divergence of tokens.
    """

    name: str
    about: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    prompts: int = 0
    texts: int = 0
    logprobs: int = 0
    first: Divergence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InvarianceReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `verify-invariance`.
        model: The model's name.
        run: What was run.
        ordinary: torch, whose sums depend on the batch.
        invariant: The batch-invariant mode.
        kept: Whether the invariant mode ran and never differed, to the bit.
    """

    kind: str
    model: str
    run: InvarianceRun
    ordinary: ModeReport
    invariant: ModeReport
    kept: bool


class _Answer(NamedTuple):
    tokens: tuple[int, ...]
    probs: tuple[TokenProbs, ...]


async def run_invariance(
    ordinary: Executor,
    invariant: Executor | str,
    tokenizer: Tokenizer,
    prompts: Sequence[Question],
    run: InvarianceRun,
    *,
    progress: Callable[[str, int, int, str], None] = lambda what, done, total, note: None,
) -> InvarianceReport:
    """Compare answers alone with answers in a batch until the ordinary mode diverges, and hold the invariant one to it.

    Args:
        ordinary: Entered.
        invariant: Entered; or why there is none.
        tokenizer: The model's.
        prompts: `run.prompts` of them, at least two.
        run: What to run.
        progress: Told what is done, how much of how much, and what was found.

    Raises:
        ConfigError: An executor has no room for the batch.
    """
    modes = [ModeReport(name="ordinary", about=dict(ordinary.explain()))]
    executors = [ordinary]
    if isinstance(invariant, str):
        refused = ModeReport(name="invariant", refused=invariant)
    else:
        modes.append(ModeReport(name="invariant", about=dict(invariant.explain())))
        executors.append(invariant)
    for executor in executors:
        _check_room(executor, prompts, run)
    for first in range(0, len(prompts) - 1, run.batch):  # a last one left alone has no batch to differ in
        batch = prompts[first : first + run.batch]
        pending = [
            (executor, mode)
            for executor, mode in zip(executors, modes, strict=True)
            if not modes[0].first or (mode is not modes[0] and mode.prompts < run.least)
        ]
        if not pending:
            break
        for executor, mode in pending:
            alone = [(await _answers(executor, [question], run.new))[0] for question in batch]
            together = await _answers(executor, batch, run.new)
            for index, (one, other) in enumerate(zip(alone, together, strict=True), first):
                _judge(mode, index, prompts[index], one, other, tokenizer)
            note = f"{mode.texts} other texts, {mode.logprobs} with other logprobs"
            progress(f"{mode.name} mode", mode.prompts, len(prompts), note)
    last = modes[1] if len(modes) > 1 else refused
    return InvarianceReport(
        kind="verify-invariance",
        model=ordinary.identity.model,
        run=run,
        ordinary=modes[0],
        invariant=last,
        kept=last.prompts > 0 and not last.logprobs,
    )


def _check_room(executor: Executor, prompts: Sequence[Question], run: InvarianceRun) -> None:
    limits, size = executor.limits, executor.layout.block_size
    longest = max(len(question.ids) for question in prompts) + run.new
    need = run.batch * -(-longest // size)
    if longest > limits.max_context or run.batch > limits.max_seqs or need > limits.num_blocks:
        raise ConfigError(
            f"a batch of {run.batch} needs as many sequences of {longest} tokens and {need} blocks; the executor has "
            f"{limits.max_seqs} of {limits.max_context} and {limits.num_blocks}: compare fewer at a time"
        )


async def _answers(executor: Executor, batch: Sequence[Question], new: int) -> list[_Answer]:
    """All at once, prompts in as few steps as possible."""
    host = Host(executor)
    lines = [host.line(question.ids, sampling=_PROBED) for question in batch]
    while lacking := [line for line in lines if len(line.output) < new]:
        room, work = executor.limits.max_step_tokens, []
        for line in lacking:
            if room:
                item = host.work(line, room)
                room -= item.length
                work.append((line, item))
        await host.step(*work)
    for line in lines:
        host.close(line)
    await host.step()
    return [_Answer(tuple(line.output), tuple(line.probs)) for line in lines]


def _judge(
    mode: ModeReport, index: int, question: Question, alone: _Answer, batched: _Answer, tokenizer: Tokenizer
) -> None:
    mode.prompts += 1
    mode.logprobs += alone != batched
    ours, theirs = (_until_end(answer.tokens, tokenizer) for answer in (alone, batched))
    if ours == theirs:
        return
    mode.texts += 1
    if mode.first is not None:
        return
    at = next(i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b)
    likeliest = alone.probs[at].top
    mode.first = Divergence(
        prompt=index,
        question=question.text,
        at=at,
        common=_text(ours[:at], tokenizer),
        alone=(_text(ours[at : at + 1], tokenizer), _text(ours[at + 1 :], tokenizer)),
        batched=(_text(theirs[at : at + 1], tokenizer), _text(theirs[at + 1 :], tokenizer)),
        apart=likeliest[0][1] - likeliest[1][1],
    )


def _until_end(tokens: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """What people would see: up to the token that ends an answer, which is kept."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in tokenizer.eos_ids), len(tokens))
    return tokens[:end]


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    pieces = (tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b"" for token in tokens)
    return b"".join(pieces).decode("utf-8", "replace")
