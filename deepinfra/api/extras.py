"""Fields beyond OpenAI's that both completion protocols take, spelled as vLLM spells them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import Field

from deepinfra.api.wire import Options, Salt, SamplingFields
from deepinfra.core.conversation import Constraint
from deepinfra.core.digits import json_text
from deepinfra.core.request import GenerateRequest, PromptInput
from deepinfra.engine.nesting import bare_grammar
from deepinfra.errors import RequestError, UnsupportedFieldError

__all__ = ("ExtraFields", "StructuredOutputs", "schema_constraint")

_KINDS = ("json", "json_object", "regex", "choice", "grammar")

_REGEX_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")
"""Characters that mean something in Rust's regular expressions."""

_REFUSED = {
    "<": "names control tokens, which no request may",
    "~": "has '~': what a text is not may be a control token; write a repetition as {2,5}",
    "&": "has '&': what must match several expressions at once takes too long to find out",
}
"""What a request's grammar may not have, and why."""


class StructuredOutputs(Options):
    """`structured_outputs`: what the answer's text must match, stated in one of five ways."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1, max_length=16_384)] | None = None
    choice: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(min_length=1, max_length=1000)]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None

    @property
    def constraint(self) -> Constraint:
        """The protocol-free form.

        Raises:
            RequestError: Not exactly one way is used, or JSON in a string is none.
            UnsupportedFieldError: A grammar that can reach control tokens, which are the recipe's to place, or that
                can take for ever to compile.
        """
        given = [kind for kind in _KINDS if getattr(self, "json_" if kind == "json" else kind) not in (None, False)]
        if len(given) != 1:
            raise RequestError(f"'structured_outputs' takes exactly one of {', '.join(_KINDS)}", "structured_outputs")
        if self.json_ is not None:
            return schema_constraint(self.json_, "structured_outputs.json")
        if self.regex is not None:
            return Constraint(kind="regex", source=self.regex)
        if self.choice is not None:
            escaped = (_REGEX_SYNTAX.sub(r"\\\g<0>", text) for text in self.choice)
            return Constraint(kind="regex", source="|".join(f"(?:{text})" for text in escaped))
        if self.grammar is not None:
            bare = bare_grammar(self.grammar)
            for sign, why in _REFUSED.items():
                if sign in bare:
                    raise UnsupportedFieldError("structured_outputs.grammar", why)
            if not _closed(bare):  # it is put into another grammar, whose rules it must not reach
                raise UnsupportedFieldError("structured_outputs.grammar", "has a '}' without its '{'")
            return Constraint(kind="grammar", source=self.grammar)
        return Constraint(kind="json")


def _closed(bare: str) -> bool:
    depth = 0
    for char in bare:
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return False
    return depth == 0


def schema_constraint(schema: Mapping[str, Any] | str, param: str) -> Constraint:
    """A JSON Schema, with its keys in the order received.

    Raises:
        RequestError: A text that is no JSON object; `param` is named.
    """
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise RequestError(f"{param!r} is no JSON Schema: {error}", param) from None
    return Constraint(kind="json_schema", source=json_text(schema))


class ExtraFields(SamplingFields):
    """What both completion protocols take.

    Attributes:
        stop_token_ids: Tokens that end an answer besides the model's own.
        priority: Lower ones run sooner, as in vLLM.
        structured_outputs: What the answer must match.
        cache_salt: The prompt's KV is found by requests of the same tenant with the same salt, and by no others.
    """

    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-8, le=8)] | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Salt | None = None

    def request(
        self, given: PromptInput, *, logprobs: int | None, max_tokens: int | None, constraint: Constraint | None
    ) -> GenerateRequest:
        """What to ask the engine for one prompt."""
        return GenerateRequest(
            input=given,
            sampling=self.sampling(logprobs),
            n=self.n or 1,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            stop_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            constraint=constraint,
            priority=-(self.priority or 0),
            salt=self.cache_salt or "",
            receipt=self.wants_receipt,
        )
