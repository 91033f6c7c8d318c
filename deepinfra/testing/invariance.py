"""Cases of batch invariance: the same sequences alone, and in any company, order, cut, place and cache state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import TokenProbs
from deepinfra.interfaces.executor import Executor
from deepinfra.testing.host import Host, Line

__all__ = ("Answer", "Ask", "alone", "hits", "mixed")

_CHUNKS = (1, 2, 3, 7, 16, 17, 48, 10_000)
_MOST_DRAFTS = 5


@dataclass(frozen=True, slots=True)
class Ask:
    """A sequence to run: `new` tokens behind `prompt`."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    new: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a sequence gave. Two are the same only if every logprob is, to the bit."""

    tokens: tuple[int, ...]
    probs: tuple[TokenProbs, ...]


def _answer(line: Line, ask: Ask) -> Answer:
    return Answer(tuple(line.output[: ask.new]), tuple(line.probs[: ask.new]))


def _line(host: Host, ask: Ask, published: Sequence[int] = ()) -> Line:
    return host.line(ask.prompt, sampling=ask.sampling, seed=ask.seed, published=published)  # type: ignore[arg-type]


async def alone(executor: Executor, asks: Sequence[Ask]) -> list[Answer]:
    """Each by itself, its prompt in as few steps as possible."""
    host, answers = Host(executor), []
    for ask in asks:
        line = _line(host, ask)
        await host.generate(line, ask.new)
        answers.append(_answer(line, ask))
        host.close(line)
    await host.step()
    return answers


async def mixed(
    executor: Executor, asks: Sequence[Ask], truth: Sequence[Answer], draw: random.Random
) -> list[tuple[int, Answer]]:
    """A random schedule of all `asks` at once.

    Blocks lie anywhere. In each step a random part of the sequences runs, in random order, prompts in chunks of any
    size, decodes with up to five drafts that are right as far as they go or not. Sequences lose their blocks and come
    back, from staging slots as far as these were saved in time.

    Returns:
        Indices of asks whose answer is not `truth`'s, and what it was.
    """
    host = Host(executor)
    draw.shuffle(host.free)
    lines = [_line(host, ask) for ask in asks]
    limits = executor.limits
    lasts = {ask.prompt: answer.tokens for ask, answer in zip(asks, truth, strict=True)}
    while lacking := [(line, ask) for line, ask in zip(lines, asks, strict=True) if len(line.output) < ask.new]:
        draw.shuffle(lacking)
        room, work = limits.max_step_tokens, []
        for line, ask in lacking[: draw.choice((1, 2, 5, len(lacking), len(lacking)))]:
            guess: list[int] = []
            if len(line.tokens) - line.done == 1 and "drafts" in executor.provides:
                known = len(line.output)
                guess = list(lasts[ask.prompt][known : known + draw.randint(0, _MOST_DRAFTS)])
                if guess and draw.random() < 0.5:
                    guess[draw.randrange(len(guess))] = draw.randrange(limits.vocab_size)
            if room <= len(guess):
                break
            item = host.work(line, min(draw.choice(_CHUNKS), room - len(guess)), guess)
            room -= item.length
            work.append((line, item))
        await host.step(*work)
        if draw.random() < 0.15:
            await _preempt(host, draw.choice(lines), draw)
    for line in lines:
        host.close(line)
    await host.step()
    found = [_answer(line, ask) for line, ask in zip(lines, asks, strict=True)]
    return [(i, answer) for i, answer in enumerate(found) if answer != truth[i]]


async def hits(executor: Executor, ask: Ask, truth: Answer, draw: random.Random) -> list[tuple[int, Answer]]:
    """One prompt behind cached prefixes that end at every block, side by side.

    Returns:
        Lengths in blocks of the prefixes that changed the answer, and what it was.
    """
    host = Host(executor)
    draw.shuffle(host.free)
    first = _line(host, ask)
    await host.generate(first, 1, chunk=draw.choice(_CHUNKS))
    blocks = len(ask.prompt) // host.block_size
    lines = [_line(host, replace(ask), first.blocks[:count]) for count in range(blocks + 1)]
    while lacking := [line for line in lines if len(line.output) < ask.new]:
        share = executor.limits.max_step_tokens // len(lacking)
        await host.step(*((line, host.work(line, min(share, draw.choice(_CHUNKS)))) for line in lacking))
    for line in (first, *lines):
        host.close(line)
    await host.step()
    found = [_answer(line, ask) for line in lines]
    return [(count, answer) for count, answer in enumerate(found) if answer != truth]


async def _preempt(host: Host, line: Line, draw: random.Random) -> None:
    """Take a sequence's blocks; none to all of the whole ones come back from staging."""
    if not line.open:
        return
    whole = min(line.done // host.block_size, host.executor.memory.num_slots)
    slots = list(range(draw.randint(0, whole)))
    await host.executor.memory.drain(line.blocks[: len(slots)], slots)
    host.preempt(line, slots)
    if slots:  # before another one's blocks are written there
        await host.step((line, host.work(line, 1)))
