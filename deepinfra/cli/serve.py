"""`deepinfra serve`: a model behind HTTP, until a signal says stop."""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from deepinfra.cli.progress import nbytes_text
from deepinfra.cli.setup import Config, Model, blueprint_for, fetch_models
from deepinfra.errors import ResourceError

if TYPE_CHECKING:
    from uvicorn import Server

    from deepinfra.config import Blueprint
    from deepinfra.config.resolve import Part
    from deepinfra.core.identity import ApiKey
    from deepinfra.engine import Engine
    from deepinfra.hookspecs import ASGIApp, Observer
    from deepinfra.interfaces import KVStore
    from deepinfra.registry import Registry

__all__ = ("serve",)

_CLOSE_S = 5.0
"""How long connections may take to close after their last answer."""

_OBSERVE_S = 1.0


def serve(
    model: Model = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on (8000); 0 takes one.")] = None,
    config: Config = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Keep no KV beyond this process.")] = False,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Write a line for each request to standard error; never its text.")
    ] = False,
) -> None:
    """Serve a model with the APIs of OpenAI and Anthropic, until SIGTERM, Ctrl-C, or the terminal is closed.

    The first signal stops new requests, lets running ones finish, and saves their KV; a second one stops at once.
    """
    from deepinfra.config import keys_of
    from deepinfra.registry import load_plugins

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("deepinfra").setLevel(logging.INFO)
    logging.getLogger("deepinfra.access").setLevel(logging.INFO if log_requests else logging.WARNING)
    registry = load_plugins()
    blueprint = blueprint_for(config, {"model": model, "host": host, "port": port}, registry=registry)
    if no_store:
        blueprint = blueprint.without_stores()
    keys = keys_of(blueprint.settings)
    if keys is None:
        _warn_if_open(blueprint.settings.host)
    with _listener(blueprint.settings.host, blueprint.settings.port) as listener:
        fetch_models(blueprint)
        engine = blueprint.build()
        _print_plan(blueprint, engine)
        # uvicorn runs on asyncio only.
        uvloop = importlib.util.find_spec("uvloop") is not None
        anyio.run(_serve, blueprint, engine, keys, registry, listener, backend_options={"use_uvloop": uvloop})


async def _serve(
    blueprint: Blueprint,
    engine: Engine,
    keys: Sequence[ApiKey] | None,
    registry: Registry,
    listener: socket.socket,
) -> None:
    from deepinfra.api.app import asgi

    settings = blueprint.settings
    app = asgi(engine, keys=keys, **settings.api.model_dump(exclude={"keys_file"}))
    for path, mounted in registry.routes(engine).items():
        app.mount(path, mounted)
    listening = anyio.Event()
    server = _server(app, listening)
    observers = registry.observers()
    async with anyio.create_task_group() as serving:
        async with app.lifespan(app), anyio.create_task_group() as watching:
            serving.start_soon(partial(server.serve, sockets=[listener]))
            await listening.wait()
            watching.start_soon(_observe, observers, engine)
            _announce(blueprint, keys, listener)
            await _first_signal(settings.drain_deadline_s)
            if not await engine.drain(settings.drain_deadline_s):
                _say("not every request was finished in time; the rest ends with an error", err=True)
            watching.cancel_scope.cancel()
        _tell(observers, engine)
        # Only now, so that what was cut has somewhere to send its error to.
        server.should_exit = True


def _server(app: ASGIApp, listening: anyio.Event) -> Server:
    import uvicorn

    class Quiet(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield  # signals are this command's business

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listening.set()

    return Quiet(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(_CLOSE_S),
        )
    )


async def _first_signal(deadline_s: float) -> None:
    stopping = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        stopping.append(signal.SIGHUP)
    with anyio.open_signal_receiver(*stopping) as signals:
        number = await anext(signals)
    # From here on the kernel acts on a second signal, however busy the loop is; KV on disk survives that. Not on a
    # hangup: a terminal that closes sends it more than once, and who is gone asks for nothing more.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _say(f"{number.name}: finishing running requests, {deadline_s:g} s at most; again to stop at once")


def _say(text: str, *, err: bool = False) -> None:
    """Tell the operator, if anybody still reads: a terminal or pipe that is gone must not cut the requests off."""
    with suppress(OSError):
        typer.echo(text, err=err)


def _announce(blueprint: Blueprint, keys: Sequence[ApiKey] | None, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    body = json.dumps({"model": blueprint.name, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]})
    quoted = body.replace("'", "'\\''")
    typer.echo(f"Serving {blueprint.name} on {url}. Try:\n")
    key = ' -H "authorization: Bearer $KEY"' if keys else ""
    typer.echo(f"  curl -sN {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{quoted}'\n")
    if keys:
        typer.echo(f"Whoever asks needs an API key, one of {len(keys)}, as KEY.\n")


async def _observe(observers: Sequence[Observer], engine: Engine) -> None:
    while True:
        _tell(observers, engine)
        await anyio.sleep(_OBSERVE_S)


def _tell(observers: Sequence[Observer], engine: Engine) -> None:
    for observer in observers:
        observer(engine.stats())


# -- before anything runs -------------------------------------------------------------------------


def _warn_if_open(host: str) -> None:
    if host == "localhost":
        return
    try:
        if ip_address(host).is_loopback:
            return
    except ValueError:
        pass
    typer.secho(
        f"WARNING: {host} can be reached from other machines and this server has no API keys: "
        "whoever can connect can use it. Set api.keys_file or DEEPINFRA_API_KEYS, or listen on 127.0.0.1.",
        err=True,
        fg="red",
        bold=True,
    )


def _listener(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: who connects before the model is there is refused, not left waiting."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ResourceError(f"host {host!r} is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from None
    return listener


def _print_plan(blueprint: Blueprint, engine: Engine) -> None:
    for plan, pool in zip(blueprint.pools, engine.pools, strict=True):
        for name, words in pool.executor.explain().items():
            typer.echo(f"{pool.name} {name}: {words}")
        if plan.store is None:
            typer.echo(f"{pool.name} KV store: none")
        else:
            inside = ", then ".join(_about_store(part) for part in plan.store.nested)
            about = f"{plan.store.entry.name}: {inside}" if inside else _about_store(plan.store)
            typer.echo(f"{pool.name} KV store: {about}; --no-store turns it off")


def _about_store(store: Part[KVStore]) -> str:
    options = store.options.model_dump()
    where = f" in {Path(str(options['path'])).expanduser().absolute()}" if "path" in options else ""
    most = f", at most {nbytes_text(options['capacity_nbytes'])}" if "capacity_nbytes" in options else ""
    return f"{store.entry.name}{where}{most}"
