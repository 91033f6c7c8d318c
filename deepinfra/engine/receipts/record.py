"""What a receipt holds. Limits stand at the fields: they are for receipts that come back from anywhere."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from deepinfra.core.conversation import Constraint
from deepinfra.core.request import FinishReason
from deepinfra.core.sampling import SamplingParams

__all__ = ("VERSION", "Answered", "Asked", "Demanded", "Drawn", "ExecutorFacts", "Receipt", "builtins_of", "digest_of")

VERSION = 1
"""Version of the format; another one is refused. A field more is another version."""

Word: TypeAlias = Annotated[str, Meta(max_length=1024)]
Token: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Tokens: TypeAlias = Annotated[tuple[Token, ...], Meta(max_length=2**23)]
Number: TypeAlias = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not said has its default."""


class ExecutorFacts(_Record, frozen=True):
    """An executor as far as bits depend on it.

    Attributes:
        weights: Fingerprint of the weights' content.
        adapter: Of an adapter; empty for none.
        kv_dtype: Element type of the KV.
        numerics: Mode and form of computing, as they stand in the names of its KV.
        dtype: Element type in which activations enter products.
        form: Form in which weights are multiplied.
        path: Whose kernels ran.
        kernels: Fingerprint of their code.
        library: Library and version.
        machine: Kind of machine.
    """

    weights: Word
    kv_dtype: Word
    numerics: Word
    adapter: Word = ""
    dtype: Word = ""
    form: Word = ""
    path: Word = ""
    kernels: Word = ""
    library: Word = ""
    machine: Word = ""


class Drawn(_Record, frozen=True):
    """`SamplingParams`, which say what each means."""

    temperature: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: Annotated[tuple[tuple[Token, Number], ...], Meta(max_length=2**17)] = ()
    logprobs: Annotated[int, Meta(ge=0, lt=2**31)] | None = None

    @classmethod
    def of(cls, params: SamplingParams) -> Drawn:
        """What was asked for."""
        return cls(**{name: getattr(params, name) for name in cls.__struct_fields__})

    @property
    def params(self) -> SamplingParams:
        """What to ask for."""
        return SamplingParams(**{name: getattr(self, name) for name in self.__struct_fields__})


class Demanded(_Record, frozen=True):
    """What the whole output had to match; see `Constraint`."""

    kind: Literal["json", "json_schema", "regex", "grammar"]
    source: Annotated[str, Meta(max_length=2**20)] = ""

    @property
    def constraint(self) -> Constraint:
        """What to ask for."""
        return Constraint(kind=self.kind, source=self.source)


class Answered(_Record, frozen=True):
    """One answer.

    Attributes:
        tokens: All ids that were generated, one that ended the answer included; none where a constraint was
            met at once.
        finish: Why it ended.
        stop: The stop string that ended it.
        logprobs: SHA-256 over the logarithms of the probabilities that were told, if any were.
    """

    tokens: Tokens
    finish: FinishReason
    stop: Annotated[str, Meta(max_length=65_536)] = ""
    logprobs: Word = ""


class Asked(_Record, frozen=True):
    """One prompt, how it was continued, and its answers by number.

    Attributes:
        prompt: The ids themselves: no template, date or stored answer is needed to have them again.
        seed: As it was resolved, in decimal digits: JavaScript's numbers end at 2^53.
        max_tokens: Most tokens of an answer, as it was resolved.
        answers: By number.
        sampling: How tokens were drawn, and how many alternatives were told (`logprobs`).
        stop_ids: Ids that ended an answer.
        stop: Strings that would have; a replay needs none, for it knows where the answer ended.
        constraint: What the whole output had to match, as `kind` and `source`.
        media: SHA-256 of images and sounds; what has any cannot be computed again from a receipt.
        approximate: Cached KV or windows were an approximation: nothing is promised then.
    """

    prompt: Annotated[Tokens, Meta(min_length=1)]
    seed: Annotated[str, Meta(pattern=r"^[0-9]{1,20}\Z")]
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    answers: Annotated[tuple[Answered, ...], Meta(min_length=1, max_length=65_536)]
    sampling: Drawn = Drawn()
    stop_ids: Annotated[tuple[Token, ...], Meta(max_length=65_536)] = ()
    stop: Annotated[tuple[Annotated[str, Meta(max_length=65_536)], ...], Meta(max_length=1024)] = ()
    constraint: Demanded | None = None
    media: Annotated[tuple[Word, ...], Meta(max_length=65_536)] = ()
    approximate: bool = False


class Receipt(_Record, frozen=True):
    """What decided the tokens of a response.

    Attributes:
        version: Of this format.
        model: Name under which it was served.
        recipe: Fingerprint of tokenizer, template and rules.
        tokenizer: Fingerprint of what each id stands for.
        executors: Those that may have computed it, each once: several pools may serve a model.
        configuration: Fingerprint of all settings that can have an effect on tokens, the above included.
        invariant: The same tokens were promised on this kind of machine, whatever else was computed beside them.
        requests: One per prompt.
        digest: SHA-256 over all the rest. It shows that a receipt was altered by accident or carelessly; whoever wants
            to forge one can, and is found out by a replay.
    """

    version: int
    model: Word
    recipe: Word
    tokenizer: Word
    executors: Annotated[tuple[ExecutorFacts, ...], Meta(min_length=1, max_length=1024)]
    configuration: Word
    invariant: bool
    requests: Annotated[tuple[Asked, ...], Meta(min_length=1, max_length=65_536)]
    digest: Word = ""


def builtins_of(receipt: Receipt) -> dict[str, Any]:
    """A receipt as JSON has it; defaults are left out."""
    told: dict[str, Any] = _bare(receipt)
    return told


@cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A record's fields; asking for them takes longer than all the rest of a small receipt."""
    return {field.name: field.default for field in msgspec.structs.fields(kind)}


def _bare(value: Any) -> Any:
    # Not `omit_defaults`, which compares by identity: 1.0 would be told or not as it came about.
    if isinstance(value, msgspec.Struct):
        fields = _defaults(type(value)).items()
        return {name: _bare(told) for name, default in fields if (told := getattr(value, name)) != default}
    if isinstance(value, tuple):
        return [_bare(each) for each in value] if value and not isinstance(value[0], int) else list(value)
    return value


def digest_of(receipt: Receipt) -> str:
    """SHA-256 over everything but the digest: over JSON of the fields with sorted keys and no spaces.

    Numbers are written as their fields' types demand, so that a receipt which went through another program, where `1.0`
    became `1`, has its digest still.
    """
    bare = builtins_of(msgspec.structs.replace(receipt, digest=""))
    return hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()
