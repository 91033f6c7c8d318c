"""Errors in Anthropic's words."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfra.api.errors import WireError
from deepinfra.api.protocol import Json

__all__ = ("anthropic_error",)

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Types by status; other statuses below 500 are `invalid_request_error`, other ones `api_error`."""


def anthropic_error(error: WireError, request_id: str) -> tuple[int, Json]:
    """Status and body; 529 says that the server cannot take a request now, 429 that its caller made too many."""
    status = 529 if error.status == 503 else error.status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
