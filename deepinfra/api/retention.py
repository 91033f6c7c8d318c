"""How long a request's KV is kept: what its key, a header, its body and its kind say of that, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from deepinfra.api.protocol import Received
from deepinfra.api.wire import Options
from deepinfra.core.conversation import Conversation
from deepinfra.core.kv import Retention, Traffic
from deepinfra.core.request import GenerateRequest, PromptInput
from deepinfra.errors import RequestError

__all__ = ("HEADER", "CacheOptions", "Kept", "body_retention", "retention_of")

HEADER = "x-deepinfra-retention"

Kept: TypeAlias = Literal["in_memory", "24h"]
"""`prompt_cache_retention`."""

_CLASSES: Mapping[str, Traffic] = {name: name for name in get_args(Traffic)}

_LEAST_S = {"30m": 1800.0, "12h": 43_200.0}

_DAY_S = 86_400.0


class CacheOptions(Options):
    """`prompt_cache_options`: every prefix is cached here, so that only `ttl` has an effect."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


def body_retention(kept: Kept | None, options: CacheOptions | None) -> Retention:
    """What OpenAI's two fields ask for; they are independent of each other."""
    return Retention(
        ttl_s=_DAY_S if kept == "24h" else None,
        disk=kept != "in_memory",
        least_s=_LEAST_S[options.ttl] if options is not None and options.ttl is not None else 0.0,
    )


def retention_of(request: GenerateRequest, received: Received) -> Retention:
    """What holds for a request; its own `retention` is what its body asks for.

    A key's policy or a header names a class, whose life then counts instead of the body's. That KV is not to be written
    to a disk holds whoever chooses the class: it says where, not how long.

    Raises:
        RequestError: The header says what it cannot.
    """
    asked = request.retention
    header = received.headers.get(HEADER)
    if header is not None and header not in _CLASSES:
        raise RequestError(f"the header {HEADER!r} must be one of {', '.join(_CLASSES)}", HEADER)
    named = received.retention or (_CLASSES[header] if header is not None else None)
    if named is not None:
        return Retention(traffic=named, disk=asked.disk)
    return replace(asked, traffic=_by_rule(request.input))


def _by_rule(given: PromptInput) -> Traffic:
    """Who offers tools will come back with their results, and who talks will talk on."""
    if not isinstance(given, Conversation):
        return "default"
    return "agent" if given.tools else "chat"
