"""What a form of weights costs in quality: beside the same weights decoded to float32, on a text it has not made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import torch

from deepinfra.bench.machine import CpuUse, CpuWatch
from deepinfra.errors import ConfigError
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.config import decoder_config
from deepinfra.interfaces.given import Clock, SystemClock
from deepinfra.models import Model

__all__ = ("LEAST_AGREEMENT", "MOST_PERPLEXITY", "FormQuality", "QualityReport", "QualityRun", "manual", "run_quality")

MOST_PERPLEXITY = 0.005
"""A form's perplexity may differ from the reference's by this share."""

LEAST_AGREEMENT = 0.95
"""Share of positions at which a form has to find the reference's token likeliest."""

_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRun:
    """What to run.

    Attributes:
        tokens: Of the text, from its beginning; cut to whole chunks.
        chunk: Tokens that see each other. Each but the last predicts the next.
    """

    tokens: int = 50_688
    chunk: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FormQuality:
    """One form.

    Attributes:
        form: Its name.
        about: What its executor says about itself.
        perplexity: Over all predictions.
        change: `perplexity` over the reference's, less 1.
        agreement: Share of positions at which both find the same token likeliest, under teacher forcing.
        mean_error: Of logits, absolute, over all positions and tokens.
        max_error: The largest.
        kept: Whether `change` and `agreement` are within the limits.
    """

    form: str
    about: Mapping[str, str]
    perplexity: float
    change: float
    agreement: float
    mean_error: float
    max_error: float
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `quality`.
        model: The model's name.
        text: What was read.
        run: What was run.
        predictions: Positions that predicted a token.
        perplexity: Of the reference: weights decoded to float32, multiplied by torch in float32.
        forms: What is compared with it.
        cpu: What else the machine did meanwhile; it does not matter for quality.
    """

    kind: str
    model: str
    text: str
    run: QualityRun
    predictions: int
    perplexity: float
    forms: tuple[FormQuality, ...]
    cpu: CpuUse


@dataclass(slots=True)
class _Sums:
    """Over all positions so far."""

    loss: float = 0.0
    same: int = 0
    error: float = 0.0
    worst: float = 0.0
    about: Mapping[str, str] = field(default_factory=dict)


def manual() -> str:
    """Python's reference manual as its standard library ships it for `help()`: prose, tables and code."""
    return "\n\n".join(topics[name] for name in sorted(topics))


async def run_quality(
    model: Model,
    forms: Mapping[str, Mapping[str, object]],
    run: QualityRun,
    *,
    text: tuple[str, str] | None = None,
    threads: int | None = None,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> QualityReport:
    """Read a text chunk by chunk with each form and the reference.

    Args:
        model: Opened.
        forms: Options of the torch executor by name.
        run: What to run.
        text: Its name and itself; default: Python's manual.
        threads: Of each.
        clock: Time.
        progress: Told how far it is.

    Raises:
        ConfigError: The text is too short, or an executor refuses its options.
    """
    clock = clock or SystemClock()
    name, words = text or ("the manual of Python's standard library (pydoc_data.topics)", manual())
    ids = model.tokenizer().encode(words, add_special_tokens=False).ids
    chunks = [ids[at : at + run.chunk] for at in range(0, min(run.tokens, len(ids)) - run.chunk + 1, run.chunk)]
    if run.tokens < run.chunk:
        raise ConfigError(f"{run.tokens} tokens are less than one chunk of {run.chunk}")
    if len(ids) < run.tokens:
        raise ConfigError(f"{name} has {len(ids)} tokens, fewer than the {run.tokens} asked for")
    if run.chunk > (most := decoder_config(model.config).max_positions):
        raise ConfigError(f"a chunk of {run.chunk} tokens is longer than the model's context of {most}")
    sizes = {"num_blocks": -(-run.chunk // _BLOCK) + 1, "block_size": _BLOCK, "max_step_tokens": run.chunk}
    if threads is not None:
        sizes["threads"] = threads
    watch, began = CpuWatch(), clock.now()
    sums = {form: _Sums() for form in forms}
    loss = 0.0
    async with AsyncExitStack() as stack:
        reference = await stack.enter_async_context(
            TorchExecutor(model, dtype="float32", kernels="torch", **sizes)  # type: ignore[arg-type]
        )
        others: dict[str, TorchExecutor] = {}
        for form, own in forms.items():
            executor = TorchExecutor(model, **{**own, **sizes})  # type: ignore[arg-type]
            others[form] = await stack.enter_async_context(executor)
            sums[form].about = executor.explain()
        for index, chunk in enumerate(chunks):
            progress(f"{index * run.chunk} of {len(chunks) * run.chunk} tokens")
            right = torch.from_numpy(await reference.score(chunk))
            loss += _loss(right, chunk)
            for form, executor in others.items():
                _add(sums[form], torch.from_numpy(await executor.score(chunk)), right, chunk)
    predictions, positions = len(chunks) * (run.chunk - 1), len(chunks) * run.chunk
    perplexity = math.exp(loss / predictions)
    vocab = int(str(model.config["vocab_size"]))
    return QualityReport(
        kind="quality",
        model=model.name,
        text=name,
        run=run,
        predictions=predictions,
        perplexity=perplexity,
        forms=tuple(_form(form, each, perplexity, predictions, positions, vocab) for form, each in sums.items()),
        cpu=watch.stop(clock.now() - began),
    )


def _loss(logits: torch.Tensor, chunk: Sequence[int]) -> float:
    """Sum over all positions of the negative logarithm of the next token's probability."""
    asked = torch.tensor(chunk[1:])
    return float(torch.nn.functional.cross_entropy(logits[:-1], asked, reduction="none").double().sum())


def _add(sums: _Sums, logits: torch.Tensor, right: torch.Tensor, chunk: Sequence[int]) -> None:
    sums.loss += _loss(logits, chunk)
    sums.same += int((logits.argmax(-1) == right.argmax(-1)).sum())
    error = (logits - right).abs_()
    sums.error += float(error.sum(dtype=torch.float64))
    sums.worst = max(sums.worst, float(error.max()))


def _form(form: str, sums: _Sums, reference: float, predictions: int, positions: int, vocab: int) -> FormQuality:
    perplexity = math.exp(sums.loss / predictions)
    change, agreement = perplexity / reference - 1.0, sums.same / positions
    return FormQuality(
        form=form,
        about=sums.about,
        perplexity=perplexity,
        change=change,
        agreement=agreement,
        mean_error=sums.error / (positions * vocab),
        max_error=sums.worst,
        kept=abs(change) <= MOST_PERPLEXITY and agreement >= LEAST_AGREEMENT,
    )
