"""Servers, ours and peers', under the same load in one run, in turns."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from deepinfra.bench.compare.dense import write_dense
from deepinfra.bench.compare.forms import form_options
from deepinfra.bench.compare.run import CompareRow, SideReport, figure_row
from deepinfra.bench.compare.sides import vllm_environ
from deepinfra.bench.http import Endpoint
from deepinfra.bench.load import LoadRun, ask, first_model, made_prompt, run_load
from deepinfra.bench.machine import CpuUse, CpuWatch, peak_nbytes
from deepinfra.bench.server import SERVING, Child, started
from deepinfra.errors import EngineError
from deepinfra.interfaces.given import Clock, SystemClock
from deepinfra.models import Model

__all__ = ("ServeReport", "ServeRun", "ServerSpec", "our_servers", "run_serve", "vllm_server")

_LISTEN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRun:
    """What to send.

    Attributes:
        clients: Requests at a time; each sends another when its own has ended.
        requests: In each round.
        prompt: Words of a chat's message, each about a token.
        new: Tokens per answer.
        turn: Words of the long chat whose second turn is timed.
        repeat: Rounds; servers go in order in even ones and backwards in odd ones.
        seed: Of the texts.
    """

    clients: int = 8
    requests: int = 32
    prompt: int = 240
    new: int = 64
    turn: int = 960
    repeat: int = 5
    seed: int = 0

    def load(self, index: int) -> LoadRun:
        """What is sent in one round: no prompt of it was sent in another."""
        return LoadRun(
            requests=self.requests,
            concurrency=self.clients,
            prompt=self.prompt,
            new=self.new,
            chat=True,
            seed=self.seed + 1 + index,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `compare-http`.
        model: The model's name.
        threads: Of each server.
        run: What was sent.
        sides: Who took part.
        rows: What was measured: `output` in tokens per second over a whole round, medians of `first token` and of the
            `second turn`'s first token, `start to ready` and `peak memory` of a server and its children.
        prompt_tokens: Of one request, as the first server counted them, on average.
        cpu: What else the machine did meanwhile; with `noisy` the figures are not to be trusted.
    """

    kind: str
    model: str
    threads: int
    run: ServeRun
    sides: tuple[SideReport, ...]
    rows: tuple[CompareRow, ...]
    prompt_tokens: float
    cpu: CpuUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """A server to start.

    Attributes:
        label: Its name in the report.
        ours: Whether it is deepinfra.
        command: Program and arguments.
        ready: What it prints when it serves; a pattern whose group is its URL, unless `url` is given.
        url: Where it was told to listen.
        environ: Added to this process's own environment.
    """

    label: str
    ours: bool
    command: tuple[str, ...]
    ready: str
    url: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


def our_servers(forms: Sequence[str], *, model: str, config: Path | None, threads: int) -> list[ServerSpec]:
    """`deepinfra serve` in some forms, with no store on the disk, and in all else as configured.

    Args:
        forms: See `form_options`.
        model: Its name.
        config: The configuration file; `None` for none.
        threads: That compute.

    Raises:
        ConfigError: There is no such form.
    """
    made = []
    for form in forms:
        executor = {**form_options(form), "threads": threads}.items()
        options = {f"DEEPINFRA_POOL__EXECUTOR__{name.upper()}": str(value) for name, value in executor}
        command = [sys.executable, "-m", "deepinfra", "serve", "--port", "0", "--no-store", "--model", model]
        command += ["--config", str(config)] if config else []
        made.append(ServerSpec(label=f"ours {form}", ours=True, command=tuple(command), ready=SERVING, environ=options))
    return made


def vllm_server(python: str, model: Model, folder: Path, *, threads: int, context: int, seqs: int) -> ServerSpec:
    """VLLM's server for OpenAI's protocol, on a free port."""
    url = f"http://127.0.0.1:{_free_port()}"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(write_dense(model, folder))]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--dtype", "bfloat16"]
    command += ["--max-model-len", str(context), "--max-num-seqs", str(seqs), "--served-model-name", model.name]
    return ServerSpec(
        label="vLLM bf16",
        ours=False,
        command=tuple(command),
        ready=r"Application startup complete",
        url=url,
        environ=vllm_environ(python, threads),
    )


async def run_serve(
    specs: Sequence[ServerSpec],
    run: ServeRun,
    *,
    model: str,
    threads: int,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> ServeReport:
    """Start all servers, load them in turns, and end them.

    Args:
        specs: Whom; at least one.
        run: What to send.
        model: The model's name.
        threads: Of each, as they were told.
        clock: Time.
        progress: Told what is measured next.

    Raises:
        EngineError: A server ended, or did not answer a request.
    """
    clock = clock or SystemClock()
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    prompt_tokens: list[float] = []

    def add(name: str, unit: str, spec: ServerSpec, value: float) -> None:
        found.setdefault((name, unit), {}).setdefault(spec.label, []).append(value)

    watch, began = CpuWatch(), clock.now()
    async with AsyncExitStack() as stack:
        servers: list[tuple[ServerSpec, Child]] = []
        for spec in specs:
            progress(f"{spec.label}: starting")
            start = clock.now()
            child = await stack.enter_async_context(started(spec.command, spec.environ, spec.ready, spec.url))
            await _listed(Endpoint(f"{child.url}/v1"))
            add("start to ready", "s", spec, clock.now() - start)
            servers.append((spec, child))
        for index in range(-1, run.repeat):  # the first round is to warm up
            for spec, child in servers if index % 2 == 0 else servers[::-1]:
                progress(f"round {index + 1} of {run.repeat}: {spec.label}")
                endpoint = Endpoint(f"{child.url}/v1")
                report = await run_load(endpoint, run.load(index), clock=clock)
                if report.failed:
                    raise EngineError(f"{spec.label}: {report.failed} requests failed: {'; '.join(report.errors)}")
                second = await _second_turn(endpoint, report.model, run, index, clock)
                if index < 0 or report.ttft_s is None:
                    continue
                add(f"output, {run.clients} clients", "tok/s", spec, report.output_tokens_per_s)
                add(f"first token, {run.clients} clients", "s", spec, report.ttft_s.p50)
                add("second turn, first token", "s", spec, second)
                prompt_tokens.append(report.prompt_tokens / report.succeeded)
        cpu = watch.stop(clock.now() - began)
        for spec, child in servers:
            add("peak memory", "B", spec, float(peak_nbytes(child.pid)))
    ours = {spec.label for spec in specs if spec.ours}
    return ServeReport(
        kind="compare-http",
        model=model,
        threads=threads,
        run=run,
        sides=tuple(
            SideReport(label=each.label, name=each.command[0], about={"arguments": " ".join(each.command[1:])})
            for each in specs
        ),
        rows=tuple(figure_row(name, unit, values, ours) for (name, unit), values in found.items()),
        prompt_tokens=sum(prompt_tokens) / len(prompt_tokens),
        cpu=cpu,
    )


async def _listed(endpoint: Endpoint) -> None:
    """Wait until models are listed: a server may say that it has started before it listens."""
    with anyio.move_on_after(_LISTEN_S):
        while True:
            try:
                await first_model(endpoint)
                return
            except OSError:
                await anyio.sleep(0.02)
    await first_model(endpoint)


async def _second_turn(endpoint: Endpoint, model: str, run: ServeRun, index: int, clock: Clock) -> float:
    """Seconds to the first token of the second turn of a long chat that nobody has seen before."""
    draw = random.Random(f"{run.seed} {index}")
    chat = [{"role": "user", "content": made_prompt(draw, 1000 + index, run.turn)}]
    first = await ask(endpoint, "/chat/completions", {"model": model, "messages": chat}, run.new // 2, clock)
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": made_prompt(draw, 2, 30)}]
    second = await ask(endpoint, "/chat/completions", {"model": model, "messages": chat}, run.new // 2, clock)
    return second.ttft_s


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
