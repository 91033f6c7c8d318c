"""Errors on the wire: one table from our codes to statuses and OpenAI's words, and pydantic's findings in ours."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from pydantic import ValidationError

from deepinfra.core.conversation import JsonValue
from deepinfra.errors import (
    ContextLengthError,
    DeepinfraError,
    Overloaded,
    RequestError,
    TemplateError,
    UnsupportedFieldError,
)

__all__ = ("STATUS", "UNSUPPORTED", "WireError", "request_error", "wire_error", "wire_error_of")


class WireError(NamedTuple):
    """One error as a client is told, in OpenAI's words; other protocols have their own for `status` and `cause`.

    Attributes:
        cause: The error's code in our own words, which tell more apart.
    """

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    cause: str = ""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Content type, `retry-after` in whole seconds where waiting helps, and how to authenticate."""
        headers = [(b"content-type", b"application/json")]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        return headers


UNSUPPORTED = "unsupported"
"""Type of the `PydanticCustomError` that a model raises for a value which is known and not honoured."""

_INDEX = re.compile(r"\[(\d+)\]")
"""Parts write `messages[0].content` as Python does, clients read `messages.0.content` as OpenAI does."""

_HEAD = re.compile(r"(\w+)(\[\d+\])?")

_LONGEST = 2000
"""Characters of a message or path: both may quote what a client sent."""

_JSON_WORDS: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be an array",
    "model_type": "must be an object",
    "string_type": "must be a string",
}
"""What pydantic finds, in JSON's words: its own are Python's and name our classes."""

STATUS: Mapping[str, tuple[int, str, str]] = {
    "invalid-request": (400, "invalid_request_error", "invalid_value"),
    "unsupported-parameter": (400, "invalid_request_error", "unsupported_parameter"),
    "context-length-exceeded": (400, "invalid_request_error", "context_length_exceeded"),
    "template-error": (400, "invalid_request_error", "template-error"),
    "invalid-json": (400, "invalid_request_error", "invalid_json"),
    "body-too-large": (413, "invalid_request_error", "body-too-large"),
    "unauthorized": (401, "invalid_request_error", "invalid_api_key"),
    "model-unknown": (404, "invalid_request_error", "model_not_found"),
    "not-stored": (404, "invalid_request_error", "not_found"),
    "not-found": (404, "invalid_request_error", "not_found"),
    "method-not-allowed": (405, "invalid_request_error", "method_not_allowed"),
    "overloaded": (503, "server_error", "overloaded"),
    "tenant-full": (429, "rate_limit_error", "rate_limit_exceeded"),
    "rate-limited": (429, "rate_limit_error", "rate_limit_exceeded"),
    "engine-not-running": (503, "server_error", "engine-not-running"),
    "engine-draining": (503, "server_error", "engine-draining"),
    "pool-failed": (503, "server_error", "pool-failed"),
    "cancelled": (503, "server_error", "engine-stopped"),
    "constraint-failed": (500, "server_error", "constraint-failed"),
    "deadline-exceeded": (504, "server_error", "deadline-exceeded"),
    "client-timeout": (408, "server_error", "client-timeout"),
}
"""Our code to HTTP status, OpenAI's type and code. Where OpenAI has no word for it the code is ours; a code that is
not listed is a fault of the server (500). 429 is the caller's own limit, 503 the server's."""


def wire_error(code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> WireError:
    """The wire form of one of our codes, as carried by an exception or by a `Failed` event."""
    status, kind, word = STATUS.get(code, (500, "server_error", code))
    if retry_after_s is None and (status == 429 or code == Overloaded.code):
        retry_after_s = 1.0
    told = str.__str__(message)[:_LONGEST]  # a template's own words may be of a kind of string that no JSON takes
    return WireError(status, kind, word, told, param and param[:_LONGEST], retry_after_s, code)


def wire_error_of(error: Exception, param_names: Mapping[str, str]) -> WireError:
    """The wire form of any exception; what is not ours is not described to the client.

    `param_names` are the engine's field names in the protocol's words; `input` names what holds the prompt.
    """
    if not isinstance(error, DeepinfraError):
        return wire_error("internal-error", "the server made a mistake; its log has the details")
    message, param, retry_after_s = str(error), None, None
    if isinstance(error, RequestError):
        param = error.param
        if param is None and isinstance(error, ContextLengthError | TemplateError):
            param = "input"
        if param is not None:
            told = _INDEX.sub(r".\1", _renamed(param, param_names))
            message, param = message.replace(repr(param), repr(told)), told
    elif isinstance(error, Overloaded):
        retry_after_s = error.retry_after_s
    return wire_error(error.code, message, param=param, retry_after_s=retry_after_s)


def _renamed(param: str, names: Mapping[str, str]) -> str:
    """A path in the protocol's words: known as a whole, or by the field, or the element of one, it begins with."""
    head = _HEAD.match(param)
    if param in names or head is None:
        return names.get(param, param)
    if head[0] in names:
        return names[head[0]] + param[head.end() :]
    return names.get(head[1], head[1]) + param[head.end(1) :]


def request_error(error: ValidationError, known: Collection[str] = ()) -> RequestError:
    """The first finding of pydantic, with the path as the client would write it (`messages.0.content.1.type`).

    Union tags are written `<tag>` in our models and left out of paths; an unknown tag names the field that holds it.
    A misspelt field of the body itself gets the nearest of `known` as advice.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    path = [str(part) for part in first["loc"] if part != "[key]" and not str(part).startswith("<")]
    context: Mapping[str, JsonValue] = first.get("ctx", {})
    if first["type"] == "unknown_tag":
        path.append(str(context["field"]))
    param = ".".join(path)
    match first["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(param[:64], known, 1, 0.7) if len(path) == 1 else []
            advice = f"; did you mean {near[0]!r}?" if near else ""
            return UnsupportedFieldError(param, f"is not a field of this request{advice}")
        case "unsupported":
            return UnsupportedFieldError(param, first["msg"])
        case "missing":
            return RequestError(f"missing required field {param!r}", param)
        case "value_error":
            return RequestError(f"{param!r}: {context['error']}" if param else str(context["error"]), param or None)
    return RequestError(f"{param!r}: {_JSON_WORDS.get(first['type'], first['msg'])}", param)
