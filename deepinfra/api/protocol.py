"""What a wire protocol is made of: each folder beside this file defines one `WireProtocol`.

bytes ─► parse_object ─► protocol.parse ─► Call ─► engine ─► events ─► writer ─► frames ─► stream, or fold ─► object
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol, TypeAlias

from deepinfra.api.errors import WireError
from deepinfra.core.conversation import JsonValue
from deepinfra.core.events import Event
from deepinfra.core.kv import Traffic
from deepinfra.core.request import PUBLIC, CachedTokens, GenerateRequest, Usage
from deepinfra.engine.explain import Explanation
from deepinfra.engine.receipts import Receipt, receipt_json

__all__ = (
    "Call",
    "Extension",
    "Fold",
    "Frame",
    "Head",
    "Json",
    "Received",
    "WireProtocol",
    "Writer",
    "explanation_json",
)

Json: TypeAlias = dict[str, JsonValue]
"""A JSON object on its way out."""


class Frame(NamedTuple):
    """One server-sent event; protocols that name their events set `event`."""

    data: Json
    event: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What is known about a request besides its body.

    Attributes:
        tenant: Whose key it came with; `public` if the server asks for none.
        headers: Lower-case names; the last of repeated ones counts.
        now: ISO 8601 date of the server, for prompts that print it. Never a time: prompts would differ every second.
        max_choices: Most answers that one call may ask for.
        retention: The policy of its key.
    """

    tenant: str = PUBLIC
    headers: Mapping[str, str]
    now: str
    max_choices: int
    retention: Traffic | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object of one answer repeats.

    `fingerprint` stands for weights, numerics, recipe and replay: while it stays, a seed repeats its answer.
    """

    id: str
    created: int
    model: str
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What only this server tells: goes into the object `deepinfra`."""

    seed: int
    cached: CachedTokens
    explanation: Explanation | None = None
    receipt: Receipt | None = None

    def json(self) -> Json:
        """`seed` reproduces the answer; `cached_tokens` are prompt tokens not computed, by tier.

        `cached_age_s` are seconds since the oldest of a tier's records was saved; the device and stores that do not
        know are left out. `replay` is `bounded` where cached KV or windows are an approximation: the server is set up
        to rebuild sliding windows so. `explain` is there if a header asked for it: why no more of the first prompt was
        found. `receipt`, if it was asked for, says what decided the tokens.
        """
        explained: Json = {} if self.explanation is None else {"explain": explanation_json(self.explanation)}
        certified: Json = {} if self.receipt is None else {"receipt": receipt_json(self.receipt)}
        return {
            "seed": self.seed,
            "cached_tokens": {"device": self.cached.device, **self.cached.store},
            "cached_age_s": {tier: round(age_s, 3) for tier, age_s in self.cached.age_s.items()},
            **({"replay": "bounded"} if self.cached.approximate else {}),
            **explained,
            **certified,
        }


def explanation_json(explanation: Explanation) -> Json:
    """An explanation as an object."""
    differs = explanation.differs
    return {
        "why": explanation.why,
        "words": explanation.words,
        "prompt_tokens": explanation.prompt_tokens,
        "held_tokens": explanation.held_tokens,
        "block_size": explanation.block_size,
        "tiers": [{"tier": hit.tier, "blocks": hit.count, "age_s": round(hit.age_s, 3)} for hit in explanation.tiers],
        "differs": None if differs is None else asdict(differs),
    }


class Fold(Protocol):
    """The whole answer, made of all frames of the stream it would have been."""

    def add(self, frame: Frame) -> None:
        """Take one frame, in order."""

    def answer(self) -> Json:
        """The object a client gets that did not ask for a stream; after the last frame."""


class Writer(Protocol):
    """Says one call's events in a protocol's words: `begin`, `write` per event, then `end` or `failed`.

    `begin` is called with the first event, or when a stream was silent for too long, so that what fails before it still
    has a status of its own; `failed` may therefore be called without it. Answers that are not streamed are folded from
    the same frames.

    Attributes:
        keepalive: Bytes that say nothing, sent while nothing happens, behind `begin`'s frames.
        closing: Bytes after the last frame of a stream that did not fail.
    """

    @property
    def keepalive(self) -> bytes:
        """See the class."""

    @property
    def closing(self) -> bytes:
        """See the class."""

    def begin(self, head: Head, usage: Usage) -> Sequence[Frame]:
        """Frames before the first event; `usage` may not know yet what was cached."""

    def write(self, prompt: int, event: Event) -> Sequence[Frame]:
        """Frames that say what `event` of prompt number `prompt` says; never called with `Failed`."""

    def end(self, usage: Usage, extension: Extension) -> Sequence[Frame]:
        """Frames after the last event."""

    def failed(self, error: WireError, request_id: str) -> Frame:
        """The frame that ends a stream which cannot be finished."""

    def fold(self) -> Fold:
        """Begin a whole answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A parsed request: what to ask the engine, and how to say its answer.

    Attributes:
        requests: One per prompt; answers are numbered through: `prompt * n + choice`. Whose they are is filled in
            by the endpoint, which also decides about their retention: here it is what the body asks for.
        id_prefix: Of the answer's `id`.
        param_names: The engine's field names in this protocol's words, for errors.
    """

    model: str
    stream: bool
    requests: tuple[GenerateRequest, ...]
    writer: Writer
    id_prefix: str
    param_names: Mapping[str, str]


class WireProtocol(Protocol):
    """One way of asking and answering."""

    def parse(self, raw: Mapping[str, JsonValue], received: Received) -> Call:
        """Read a request.

        Raises:
            RequestError: Names the field that is wrong.
        """

    def error(self, error: WireError, request_id: str) -> tuple[int, Json]:
        """Status and body that say an error in this protocol's words, also one from before `parse`."""
