"""Receipts of an engine's answers."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from deepinfra.core.conversation import JsonValue
from deepinfra.core.request import GenerateRequest, Prompt
from deepinfra.engine.receipts.record import (
    VERSION,
    Answered,
    Asked,
    Demanded,
    Drawn,
    ExecutorFacts,
    Receipt,
    builtins_of,
    digest_of,
)
from deepinfra.errors import RequestError
from deepinfra.interfaces.given import Offload
from deepinfra.interfaces.recipe import Recipe, Tokenizer

if TYPE_CHECKING:
    from deepinfra.engine.answer import Answer
    from deepinfra.engine.pool import Pool
    from deepinfra.engine.stream import Stream

__all__ = ("Receipts", "check_tellable", "joined", "receipt_json")


def check_tellable(request: GenerateRequest, prompt: Prompt) -> None:
    """Refuse what a receipt could not be read again with: beyond its limits, or what JSON has no number for.

    Raises:
        RequestError: Names it.
    """
    for token, bias in request.sampling.logit_bias:
        if not math.isfinite(bias):
            raise RequestError(f"a receipt cannot hold a logit_bias of {bias}", f"logit_bias.{token}")
    demanded = prompt.constraint
    asked = Asked(
        prompt=(0,),
        seed="0",
        max_tokens=1,
        answers=(Answered(tokens=(), finish="stop"),),
        sampling=Drawn.of(request.sampling),
        stop_ids=tuple(prompt.stop_ids),
        stop=request.stop,
        constraint=None if demanded is None else Demanded(kind=demanded.kind, source=demanded.source),
    )
    try:
        msgspec.convert(msgspec.json.decode(msgspec.json.encode(asked)), Asked)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.removesuffix("`").removeprefix("sampling.")
        raise RequestError(f"a receipt cannot hold this {name}: {what}", name) from None


class Receipts:
    """Writes the receipts of one engine while it is entered."""

    def __init__(self, recipe: Recipe, first: Sequence[Pool], last: Sequence[Pool], name: str) -> None:
        self._recipe, self._pools, self._last, self._name = recipe, (*first, *last), last, name
        self._tokenizer = ""

    async def prepare(self, offload: Offload) -> None:
        """Fingerprint the tokenizer, once: off the loop, as it reads the whole vocabulary."""
        if not self._tokenizer:
            self._tokenizer = await offload(_tokenizer_digest, self._recipe.tokenizer)

    def blank(self) -> Receipt:
        """What a receipt says of the engine: one without requests; `prepare` was called before."""
        executors = tuple(dict.fromkeys(map(_executor_facts, self._pools)))
        return Receipt(
            version=VERSION,
            model=self._name,
            recipe=self._recipe.version,
            tokenizer=self._tokenizer,
            executors=executors,
            configuration=self._configuration(executors),
            invariant=all("batch-invariant" in pool.executor.provides for pool in self._pools),
            requests=(),
        )

    def write(self, request: GenerateRequest, stream: Stream, answers: Sequence[Answer]) -> Receipt | None:
        """The receipt of a request, unless an answer of it failed; `prepare` was called before."""
        told = [each for answer in answers if (each := answer.told) is not None]
        if len(told) < len(answers):
            return None
        spec, prompt = answers[0].spec, stream.prompt
        demanded = spec.constraint
        asked = Asked(
            prompt=prompt.ids,
            seed=str(stream.seed),
            max_tokens=spec.max_tokens,
            answers=tuple(told),
            sampling=Drawn.of(spec.sampling),
            stop_ids=tuple(sorted(spec.stop_ids)),
            stop=request.stop,
            constraint=None if demanded is None else Demanded(kind=demanded.kind, source=demanded.source),
            media=tuple(digest.hex() for _, digest in prompt.media),
            approximate=stream.usage.cached.approximate,
        )
        return _sealed(msgspec.structs.replace(self.blank(), requests=(asked,)))

    def _configuration(self, executors: Sequence[ExecutorFacts]) -> str:
        """In ordinary mode how steps are cut changes bits, so what cuts them is part of it."""
        pools = [
            (
                "last" if pool in self._last else "first",
                pool.replay,
                pool.executor.layout.block_size,
                pool.limits.grid,
                pool.limits.max_step_tokens,
                pool.limits.max_seqs,
                type(pool.speculator).__name__,
            )
            for pool in self._pools
        ]
        facts = [list(map(msgspec.to_builtins, executors)), self._recipe.version, self._tokenizer, pools]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


def joined(receipts: Sequence[Receipt | None]) -> Receipt | None:
    """One receipt of several prompts of one call, asked of one engine; of all of them or none."""
    told = [receipt for receipt in receipts if receipt is not None]
    if not told or len(told) < len(receipts):
        return None
    if len(told) == 1:
        return told[0]
    requests = tuple(asked for receipt in told for asked in receipt.requests)
    return _sealed(msgspec.structs.replace(told[0], requests=requests))


def receipt_json(receipt: Receipt) -> dict[str, JsonValue]:
    """The object that a response carries."""
    return builtins_of(receipt)


def _sealed(receipt: Receipt) -> Receipt:
    return msgspec.structs.replace(receipt, digest=digest_of(receipt))


def _executor_facts(pool: Pool) -> ExecutorFacts:
    identity, computing = pool.executor.identity, pool.computing
    return ExecutorFacts(
        weights=identity.weights,
        adapter=identity.adapter,
        kv_dtype=identity.kv_dtype,
        numerics=identity.numerics,
        dtype=computing.dtype,
        form=computing.weights,
        path=computing.path,
        kernels=computing.kernels,
        library=computing.library,
        machine=computing.machine,
    )


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 over the bytes of every id, and the ids that end an answer."""
    told: list[Any] = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    framed = b"".join(struct.pack("<I", len(data)) + data for data in told)
    ends = struct.pack(f"<{len(tokenizer.eos_ids)}I", *sorted(tokenizer.eos_ids))
    return hashlib.sha256(struct.pack("<I", len(told)) + framed + ends).hexdigest()
