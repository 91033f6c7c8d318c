"""What is asked about the server rather than of a model: health, readiness, metrics."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deepinfra.api.metrics import registry
from deepinfra.engine import Engine

__all__ = ("probe_routes",)


def probe_routes(engines: Mapping[str, Engine], *, tenant_metrics: bool) -> list[Route]:
    """`/health`, `/ready` and `/metrics`; all answer at once, whatever the load."""
    metrics_registry = registry(engines, tenants=tenant_metrics)

    async def health(request: Request) -> Response:
        """Whether this process should be left alone: 503 only if an engine cannot recover."""
        states = {name: engine.state for name, engine in engines.items()}
        failed = "failed" in states.values()
        return JSONResponse({"status": "failed" if failed else "ok", "engines": states}, 503 if failed else 200)

    async def ready(request: Request) -> Response:
        """Whether requests should be sent here: every engine takes them."""
        states = {name: engine.state for name, engine in engines.items()}
        willing = all(state == "ready" for state in states.values())
        return JSONResponse({"ready": willing, "engines": states}, 200 if willing else 503)

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics_registry), headers={"content-type": content_type})

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
    ]
