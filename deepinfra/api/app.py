"""`asgi`: engines in, an application out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from starlette._utils import get_route_path
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deepinfra.api.chat.request import CHAT, ChatProtocol
from deepinfra.api.completions.request import CompletionProtocol
from deepinfra.api.endpoint import Door, Endpoint, Query, ReceiptPolicy
from deepinfra.api.errors import WireError, wire_error, wire_error_of
from deepinfra.api.gate import Gate, KeyRing
from deepinfra.api.messages.count import TokenCount
from deepinfra.api.messages.request import MESSAGES, ParamNames
from deepinfra.api.middleware import RequestLog, record_of
from deepinfra.api.models import model_routes
from deepinfra.api.probes import probe_routes
from deepinfra.api.protocol import WireProtocol
from deepinfra.api.responses.queries import ResponseQueries
from deepinfra.api.responses.request import Responses
from deepinfra.api.responses.store import ResponseStore
from deepinfra.api.wire import Dialect
from deepinfra.core.identity import ApiKey
from deepinfra.engine import Engine
from deepinfra.interfaces.given import Clock, Offload, SystemClock, ThreadOffload

__all__ = ("App", "asgi")


class App(Starlette):
    """A Starlette application over engines.

    Served by itself, it enters its engines in its own lifespan. Mounted into another application it needs that
    application's help, because no framework runs the lifespan of a mounted app:

        llm = asgi(engine)
        app = FastAPI(lifespan=llm.lifespan)
        app.mount("/llm", llm)

    Attributes:
        engines: By the model names they are served under.
        lifespan: Enters the engines, and leaves them in reverse order; takes whatever application runs it.
    """

    engines: Mapping[str, Engine]
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]]


def asgi(
    engine: Engine | Mapping[str, Engine],
    *,
    max_body_nbytes: int = 8 * 1024 * 1024,
    max_n: int = 64,
    keepalive_s: float = 10.0,
    keys: Sequence[ApiKey] | None = None,
    cors_origins: Sequence[str] = (),
    dialect: Dialect = "openai",
    max_stored: int = 10_000,
    max_stored_nbytes: int = 256 * 1024 * 1024,
    stored_ttl_s: float = 24 * 3600.0,
    tenant_metrics: bool = False,
    receipts: ReceiptPolicy = "asked",
    clock: Clock | None = None,
    offload: Offload | None = None,
) -> App:
    """An ASGI application that serves OpenAI's protocols and Anthropic's from one engine or several.

    Serves `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, `/v1/models`, `/health`,
    `/ready` and `/metrics`. Installs no signal handler and keeps nothing outside the returned object.

    Args:
        engine: One engine, served under its own name, or engines by model name.
        max_body_nbytes: Larger request bodies are refused with 413.
        max_n: Most answers per request: `n`, or prompts times `n`.
        keepalive_s: A streamed response begins with its first event or after this time, and a comment is sent
            whenever it was silent for as long.
        keys: Who may ask; everybody if left out. With keys everything needs one but `/health`, `/ready` and
            `/metrics`, applications mounted into this one included.
        cors_origins: Web origins whose pages may read answers (`https://chat.example.com`); without any, no CORS
            header is sent and browsers let no page read them.
        dialect: Whose habits chat and completions follow where OpenAI's and DeepSeek's differ; see `Dialect`.
        max_stored: Most answers of `/v1/responses` kept for later requests, in memory; the least recently used of the
            tenant that holds the most goes.
        max_stored_nbytes: Most bytes of them.
        stored_ttl_s: How long after its last use one is kept, in seconds.
        tenant_metrics: Tell each tenant's numbers by its name on `/metrics`, which needs no key.
        receipts: Which answers carry `deepinfra.receipt`, which says what decided their tokens: those for which it is
            asked, all, or none.
        clock: Time for `created`, the date in prompts, limits of keys and the access log.
        offload: Threads for parsing large bodies.

    Raises:
        ValueError: No engine at all, or `keys` without a key or with two alike.
    """
    engines = dict(engine) if isinstance(engine, Mapping) else {engine.name: engine}
    if not engines:
        raise ValueError("an application needs at least one engine")
    clock, offload = clock or SystemClock(), offload or ThreadOffload()
    door = Door(
        max_body_nbytes=max_body_nbytes,
        max_n=max_n,
        keepalive_s=keepalive_s,
        clock=clock,
        offload=offload,
        receipts=receipts,
    )

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for each in dict.fromkeys(engines.values()):  # an engine under two names is entered once
                await stack.enter_async_context(each)
            yield

    def endpoint(path: str, protocol: WireProtocol, *, off_loop: bool = False) -> Route:
        return Route(path, Endpoint(protocol, engines, door, off_loop=off_loop), methods=["POST"])

    store = ResponseStore(clock, max_responses=max_stored, max_nbytes=max_stored_nbytes, ttl_s=stored_ttl_s)
    app = App(
        routes=[
            endpoint("/v1/chat/completions", ChatProtocol(dialect)),
            endpoint("/v1/completions", CompletionProtocol(dialect)),
            endpoint("/v1/responses", Responses(store, clock), off_loop=True),
            *_response_routes(store, clock, door),
            endpoint("/v1/messages", MESSAGES),
            _count_route(engines, door),
            *model_routes(engines, int(clock.wall())),
            *probe_routes(engines, tenant_metrics=tenant_metrics),
        ],
        middleware=_middleware(clock, keys, cors_origins),
        exception_handlers={HTTPException: _http_error, Exception: _server_error},
        lifespan=lifespan,
    )
    app.engines, app.lifespan = engines, lifespan
    return app


def _response_routes(store: ResponseStore, clock: Clock, door: Door) -> list[Route]:
    """Questions about stored responses."""
    one, queries, protocol = "/v1/responses/{response_id}", ResponseQueries(store), Responses(store, clock)
    return [
        Route(one, Query(protocol, queries.retrieve, door), methods=["GET"]),
        Route(one, Query(protocol, queries.delete, door), methods=["DELETE"]),
        Route(f"{one}/input_items", Query(protocol, queries.input_items, door), methods=["GET"]),
    ]


def _count_route(engines: Mapping[str, Engine], door: Door) -> Route:
    count = Query(MESSAGES, TokenCount(engines, door.offload), door, ParamNames())
    return Route("/v1/messages/count_tokens", count, methods=["POST"])


def _protocol_at(path: str) -> WireProtocol:
    """Whose words an error is told in where no endpoint was reached."""
    return MESSAGES if path.startswith("/v1/messages") else CHAT


def _middleware(clock: Clock, keys: Sequence[ApiKey] | None, origins: Sequence[str]) -> list[Middleware]:
    """From the outside in; a preflight has no key, so CORS stands before the gate."""
    found = [Middleware(RequestLog, clock=clock)]
    if origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after"],
            )
        )
    if keys is not None:
        found.append(Middleware(Gate, ring=KeyRing(keys, clock), protocol_at=_protocol_at))
    return found


async def _http_error(request: Request, error: Exception) -> Response:
    """What routing refuses."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        wire = wire_error("method-not-allowed", f"{request.method} is not allowed here; see the header 'allow'")
    else:
        wire = wire_error("not-found", f"there is nothing at {request.url.path}")
    return _refusal(request, wire, error.headers)


async def _server_error(request: Request, error: Exception) -> Response:
    return _refusal(request, wire_error_of(error, {}))


def _refusal(request: Request, error: WireError, headers: Mapping[str, str] | None = None) -> Response:
    status, answer = _protocol_at(get_route_path(request.scope)).error(error, record_of(request.scope).id)
    return JSONResponse(answer, status, headers)
