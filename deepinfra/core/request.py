"""A request at the engine's door, and the sequences it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from deepinfra.core.conversation import Constraint, Conversation, ToolDefinition
from deepinfra.core.ids import RequestId, SeqId
from deepinfra.core.kv import Retention
from deepinfra.core.sampling import SamplingParams

__all__ = (
    "PUBLIC",
    "CachedTokens",
    "FinishReason",
    "GenerateRequest",
    "Prompt",
    "PromptInput",
    "SeqSpec",
    "TextInput",
    "Usage",
)

PUBLIC = "public"
"""The tenant of callers without a key, and of what is declared to be everybody's."""

FinishReason = Literal["stop", "length", "context", "tool_calls", "content_filter", "error"]
"""`length`: the request's own limit of tokens; `context`: the model's."""


@dataclass(frozen=True, slots=True)
class TextInput:
    """Bare text to be continued, without a chat template; markers in it stay text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a recipe makes of a request's input.

    Attributes:
        ids: Token ids; control tokens appear only where the template put them.
        control: Positions in `ids` of the control tokens, ascending.
        text: The rendered text, for people and logs' lengths; never logged itself.
        stop_ids: Ids that end an answer.
        start: State in which the output parser begins (`text`, `reasoning`, `tool`), read from the rendered prompt;
            `raw` for bare text and ids: everything is text.
        constraint: What the whole output must match (reasoning, markers and calls included), if the conversation
            demands anything.
        breakpoints: Prompt lengths (in tokens) at which a cached prefix is likely to be reused.
        media: SHA-256 digests of media, with the position each is bound to.
        ranges: Where the control tokens stand in `text`, as (start, end) in characters, ascending.
        tools: Tools the answer may call: their schemas say what an untyped argument is.
        begun: Text with which the answer begins because the conversation says so; `ids` end with it, and the parser
            reads on from it.
    """

    ids: tuple[int, ...]
    control: tuple[int, ...] = ()
    text: str = ""
    stop_ids: frozenset[int] = frozenset()
    start: str = "text"
    constraint: Constraint | None = None
    breakpoints: tuple[int, ...] = ()
    media: tuple[tuple[int, bytes], ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    tools: tuple[ToolDefinition, ...] = ()
    begun: str = ""


PromptInput: TypeAlias = Conversation | TextInput | tuple[int, ...] | Prompt
"""A conversation, bare text, token ids as the client counted them, or a prompt as a recipe rendered it before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request: what to continue and how.

    Attributes:
        input: A conversation, bare text, token ids or a rendered prompt, which states its own constraint.
        sampling: How tokens are drawn.
        n: Independent answers; each has its own draws.
        seed: `None` lets the engine draw one; the answer's events carry what was used.
        max_tokens: Upper bound of generated tokens per answer; `None` means as many as fit.
        fit: A `max_tokens` that does not fit into the context is lowered instead of refused.
        constraint: What the answer's text must match; overrides a conversation's own.
        stop: Strings that end an answer; matched in answer text only, never returned.
        stop_ids: Token ids that end an answer besides the model's own.
        ignore_eos: Go on past the model's own end tokens (benchmarks).
        tenant: Whose request; tenants share no cache but of prefixes that are declared public.
        retention: How long its KV is worth keeping.
        priority: Higher runs sooner; aging keeps low ones alive.
        deadline_s: Give up after this many seconds from admission.
        salt: Narrows what its KV is shared with: prompts of the same tenant and the same salt, and nothing else.
        explain: Say why what was not found in the cache was not; its first answer's stream has the explanation.
        receipt: Say what decided the tokens; the stream has the receipt when every answer is complete.
    """

    input: PromptInput
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    fit: bool = False
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    tenant: str = PUBLIC
    retention: Retention = field(default_factory=Retention)
    priority: int = 0
    deadline_s: float | None = None
    request_id: RequestId | None = None
    salt: str = ""
    explain: bool = False
    receipt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqSpec:
    """A sequence on its way into a pool; crosses processes.

    `tokens` is the prompt plus whatever was generated before (after a handoff); `prompt_len` says where the prompt
    ends. `max_tokens` counts generated tokens from `prompt_len` on. The first `public` tokens lie in a prefix that all
    tenants share. With `stops` its answer has stop strings, so that any token may end it.
    """

    seq: SeqId
    tokens: tuple[int, ...]
    prompt_len: int
    max_tokens: int
    seed: int
    choice: int = 0
    sampling: SamplingParams = SamplingParams()
    stop_ids: frozenset[int] = frozenset()
    tenant: str = PUBLIC
    retention: Retention = field(default_factory=Retention)
    priority: int = 0
    arrived_at: float = 0.0
    deadline: float | None = None
    constraint: Constraint | None = None
    salt: str = ""
    public: int = 0
    explain: bool = False
    stops: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Prompt tokens that were not computed, by the tier they came from.

    `age_s` are seconds since the oldest of a tier's records was saved, where the store says so. `approximate`: windows
    were rebuilt from too few rows to be exact, here or where the cached KV was computed, because the server is set up
    so (bounded replay).
    """

    device: int = 0
    store: dict[str, int] = field(default_factory=dict)
    age_s: dict[str, float] = field(default_factory=dict)
    approximate: bool = False

    @property
    def total(self) -> int:
        """Tokens of all tiers."""
        return self.device + sum(self.store.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, counted by the engine; `completion_tokens` sums over all answers.

    `cache_write_tokens` are prompt tokens that were computed and can be found in the cache from now on.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)
    cache_write_tokens: int = 0
