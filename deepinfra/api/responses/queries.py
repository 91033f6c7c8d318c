"""What is asked about stored responses: retrieve, delete, list input items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from deepinfra.api.protocol import Json, Received
from deepinfra.api.responses.items import item_json
from deepinfra.api.responses.store import ResponseStore
from deepinfra.errors import RequestError, UnsupportedFieldError

__all__ = ("ResponseQueries",)

_MAX_LIMIT = 100

_INCLUDES = ("include", "include[]")
"""The client writes the second. Everything that can be included is there, so that its values change nothing."""


class ResponseQueries:
    """Answers about a store; `params` are those of path and query string."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def retrieve(self, raw: Json, received: Received, params: Mapping[str, str]) -> Json:
        """`GET /v1/responses/{response_id}`: the object as it was answered; streams are not repeated.

        Raises:
            RequestError: It is not there, or a parameter is not served.
        """
        _check(params, {"stream": ("false",), "include_obfuscation": ("false",)})
        body = self._store.body(received.tenant, params["response_id"])
        return msgspec.json.decode(body, type=dict)

    async def delete(self, raw: Json, received: Received, params: Mapping[str, str]) -> Json:
        """`DELETE /v1/responses/{response_id}`.

        Raises:
            RequestError: It is not there, or a parameter is not served.
        """
        _check(params, {})
        self._store.delete(received.tenant, params["response_id"])
        return {"id": params["response_id"], "object": "response", "deleted": True}

    async def input_items(self, raw: Json, received: Received, params: Mapping[str, str]) -> Json:
        """`GET /v1/responses/{response_id}/input_items`: its whole context, items of earlier responses included.

        Newest first unless `order` is `asc`; `limit` of them (20), after the item `after`.

        Raises:
            RequestError: The response is not there, or a parameter is wrong.
        """
        _check(params, {"order": ("asc", "desc")}, ("after", "limit"))
        limit = params.get("limit", "20")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:4]) <= _MAX_LIMIT:
            raise RequestError(f"'limit' must be a number from 1 to {_MAX_LIMIT}", "limit")
        turn = self._store.turn(received.tenant, params["response_id"])
        items = [*(turn.before.context() if turn.before else ()), *turn.items[: turn.asked]]
        if params.get("order") != "asc":
            items.reverse()
        first = 0
        if "after" in params:
            ids = [item_id for item_id, _ in items]
            if params["after"] not in ids:
                raise RequestError("'after' is no item of this response", "after")
            first = ids.index(params["after"]) + 1
        page = items[first : first + int(limit)]
        return {
            "object": "list",
            "data": [item_json(item, item_id) for item_id, item in page],
            "first_id": page[0][0] if page else None,
            "last_id": page[-1][0] if page else None,
            "has_more": first + len(page) < len(items),
        }


def _check(params: Mapping[str, str], values: Mapping[str, Sequence[str]], free: Sequence[str] = ()) -> None:
    """Refuse parameters that are unknown, and values other than these."""
    for name, value in params.items():
        if name in values and value not in values[name]:
            raise UnsupportedFieldError(name, f"may only be {' or '.join(values[name])} here")
        if name not in values and name not in (*free, *_INCLUDES, "response_id"):
            raise UnsupportedFieldError(name, "is not a parameter of this request")
