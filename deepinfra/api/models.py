"""`/v1/models`: what is served, in objects that OpenAI's clients and Anthropic's both read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deepinfra.api.errors import wire_error_of
from deepinfra.api.messages.errors import anthropic_error
from deepinfra.api.middleware import record_of
from deepinfra.api.protocol import Json
from deepinfra.api.wire import openai_error
from deepinfra.engine import Engine
from deepinfra.errors import DeepinfraError, ModelUnknownError, RequestError

__all__ = ("model_routes",)

_MAX_PAGE = 1000
"""Anthropic's own bound of `limit`."""


def model_routes(engines: Mapping[str, Engine], created: int) -> list[Route]:
    """`/v1/models` and `/v1/models/{id}`; `created` is a Unix time.

    Anthropic's client asks for pages, OpenAI's for everything, which is the one page that no `limit` gives.
    """

    async def models(request: Request) -> Response:
        try:
            return JSONResponse(_page(request.query_params, [_model(*each, created) for each in engines.items()]))
        except RequestError as error:
            return _refused(request, error)

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in engines:
            return _refused(request, ModelUnknownError(name, tuple(engines)))
        return JSONResponse(_model(name, engines[name], created))

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", one_model)]


def _model(name: str, engine: Engine, created: int) -> Json:
    """OpenAI's fields, then Anthropic's; how much fits is known once the engine runs."""
    most = engine.max_context if engine.state in ("ready", "draining") else None
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "deepinfra",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": most,
        "max_tokens": most,
    }


def _page(params: QueryParams, models: Sequence[Json]) -> Json:
    """Those behind `after_id`, or before `before_id`, at most `limit`.

    Raises:
        RequestError: A parameter is wrong.
    """
    lifecycles = [*params.getlist("lifecycle"), *params.getlist("lifecycle[]")]
    if lifecycles and "active" not in lifecycles:
        models = ()
    after, before = _place(params, "after_id", models), _place(params, "before_id", models)
    found = models[0 if after is None else after + 1 : before]
    limit = params.get("limit", str(_MAX_PAGE))
    if not limit.isdecimal() or not 1 <= int(limit) <= _MAX_PAGE:
        raise RequestError(f"'limit' must be a number from 1 to {_MAX_PAGE}", "limit")
    page = found[-int(limit) :] if before is not None and after is None else found[: int(limit)]
    return {
        "object": "list",
        "data": list(page),
        "has_more": len(page) < len(found),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _place(params: QueryParams, param: str, models: Sequence[Json]) -> int | None:
    name = params.get(param)
    if name is None:
        return None
    for index, model in enumerate(models):
        if model["id"] == name:
            return index
    raise RequestError(f"{param!r} is no model of this list", param)


def _refused(request: Request, error: DeepinfraError) -> Response:
    """In the words of whose client asks: only Anthropic's name a version."""
    say = anthropic_error if "anthropic-version" in request.headers else openai_error
    status, answer = say(wire_error_of(error, {}), record_of(request.scope).id)
    return JSONResponse(answer, status)
