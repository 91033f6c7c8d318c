"""More requests than a server can serve: what it still serves, whom it refuses, whether its word on when is kept."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio

from deepinfra.bench.http import Endpoint, Refused
from deepinfra.bench.load import Reply, Spread, ask, first_model, made_prompt, spread
from deepinfra.bench.machine import CpuUse, CpuWatch, use_of
from deepinfra.bench.scrape import Scrape, parsed
from deepinfra.engine.collapse import collapsed
from deepinfra.errors import EngineError
from deepinfra.interfaces.given import Clock, SystemClock

__all__ = ("Level", "Memory", "OverloadReport", "OverloadRun", "Retries", "run_overload")

_LOOK_S = 1.0
_SETTLE_S = 60.0
"""What was admitted is given so long to be given back after the last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadRun:
    """What to send.

    Attributes:
        times: Requests per second, as a multiple of what the server can serve.
        seconds: For so long.
        concurrency: Clients at a time, each asking again at once, with which to find what it can serve.
        calibrate_s: For so long each.
        prompt: Words per prompt, each about a token; no two prompts begin alike, but for the recipe's own words.
        new: Tokens to generate per request; the model's own end is ignored.
        patient: Share of the clients that wait as told when they are refused, and ask once more; others leave.
        model: Name to ask for; default: the first that the server lists.
        seed: Of prompts, of when they are sent, and of who is patient.
    """

    times: float = 5.0
    seconds: float = 60.0
    concurrency: Sequence[int] = (16, 64)
    calibrate_s: float = 20.0
    prompt: int = 32
    new: int = 32
    patient: float = 1.0
    model: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What so many clients at a time were served, per second; tokens of requests that came to their end."""

    concurrency: int
    output_tokens_per_s: float
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Clients that waited as told and asked once more: how many did, got in, and the share; `None` of nobody."""

    came: int
    served: int
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident bytes of the server's process, and of its children, where models are.

    Attributes:
        before: When the overload began.
        first_half: At most in its first half;
        second_half: and in its second: who keeps something for each refused request grows on.
        after: When all was over.
        children_before: Of the children. What they planned for KV is theirs once it was used.
        children_most: At most.
    """

    before: int
    first_half: int
    second_half: int
    after: int
    children_before: int
    children_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadReport:
    """Everything a run found; its fields are those of the JSON output.

    Attributes:
        kind: `overload`.
        model: The model's name on the server.
        run: What was sent.
        levels: What the server can serve, by clients at a time.
        best: The best of these.
        requests_per_s: Sent per second while overloaded, without those that came again.
        output_tokens_per_s: Tokens per second while overloaded, of requests that came to their end.
        goodput: These by the best's.
        sent: Clients.
        served: Of them, served at once.
        refused: Of them, told to come again.
        failed: Requests that were neither served nor told when to come again, first or second ones.
        errors: What these said, each sentence once.
        told_s: Seconds that refused ones were told to wait.
        refusal_s: Seconds from sending a request to its refusal.
        retries: Of those that came again while the overload lasted.
        late_retries: Of those that came again later.
        ttft_s: Seconds from sending a request to the first text of its answer, of those sent while overloaded.
        waiting_most: Most sequences that waited in the server at once.
        settled: Whether in the end nothing ran or waited, and all blocks were free.
        memory: `None` of a server that is not this process's child.
        load_cores: Processor use of this process, which sends the load.
        server_cores: Of the server and its children, if they are this process's.
        cpu: What else the machine did while overloaded. A server that is not a child counts as other programs.
    """

    kind: str
    model: str
    run: OverloadRun
    levels: Sequence[Level]
    best: Level
    requests_per_s: float
    output_tokens_per_s: float
    goodput: float
    sent: int
    served: int
    refused: int
    failed: int
    errors: tuple[str, ...]
    told_s: Spread | None
    refusal_s: Spread | None
    retries: Retries
    late_retries: Retries
    ttft_s: Spread | None
    waiting_most: int
    settled: bool
    memory: Memory | None
    load_cores: float
    server_cores: float
    cpu: CpuUse


@dataclass(slots=True)
class _Found:
    """What the clients found; `again` are times at which refused ones came again, and whether they got in."""

    replies: list[Reply] = field(default_factory=list)
    served: int = 0
    told: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    again: list[tuple[float, bool]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def tokens_per_s(self, start: float, end: float) -> float:
        """Tokens of replies that arrived in some time; a piece of a reply is as many as another."""
        tokens = 0.0
        for reply in self.replies:
            within = sum(start <= piece < end for piece in reply.pieces)
            tokens += reply.completion_tokens * within / len(reply.pieces)
        return tokens / (end - start)


@dataclass(slots=True)
class _Looks:
    """What was seen of the server while overloaded, with the seconds since it began."""

    waiting_most: int = 0
    memory: list[tuple[float, int, int]] = field(default_factory=list)


class _Load:
    """Clients of one server.

    Args:
        url: Of the server, without `/v1`.
        run: What to send.
        model: The name to ask for.
        api_key: Sent as bearer token.
        clock: Time.
    """

    def __init__(self, url: str, run: OverloadRun, api_key: str | None, clock: Clock) -> None:
        self.run, self.clock = run, clock
        self.endpoint, self._root = Endpoint(f"{url}/v1", api_key=api_key), Endpoint(url)
        self.model = run.model or ""
        self._draw, self._count = random.Random(run.seed), 0

    async def closed(self, concurrency: int) -> Level:
        """So many clients that ask again as soon as they are answered."""
        found, began = _Found(), self.clock.now()
        end = began + self.run.calibrate_s

        async def client() -> None:
            while self.clock.now() < end:
                await self.client(found, patient=True)

        async with anyio.create_task_group() as tasks:
            for _ in range(concurrency):
                tasks.start_soon(client)
        if found.errors:
            raise EngineError(f"the server fails before it is overloaded: {found.errors[0]}")
        # Without the beginning, in which all prompts are computed at once, unless the time is too short for more.
        tokens_per_s = found.tokens_per_s(began + 0.3 * self.run.calibrate_s, end)
        tokens_per_s = tokens_per_s or found.tokens_per_s(began, self.clock.now())
        return Level(
            concurrency=concurrency,
            output_tokens_per_s=tokens_per_s,
            requests_per_s=tokens_per_s / self.run.new,
        )

    async def open(self, per_s: float, found: _Found, progress: Callable[[str], None]) -> int:
        """Clients that come at random, whether others are answered or not; returns how many when all are gone."""
        began, at, sent = self.clock.now(), 0.0, 0
        async with anyio.create_task_group() as tasks:
            while at < self.run.seconds:
                await anyio.sleep(max(0.0, began + at - self.clock.now()))
                patient = self._draw.random() < self.run.patient
                tasks.start_soon(partial(self.client, found, patient=patient))
                sent, at = sent + 1, at + self._draw.expovariate(per_s)
                if sent % 100 == 0:
                    progress(f"overload: {at:.0f} s, {sent} sent, {len(found.told)} told to come again")
            progress(f"overload: over, {sent} sent, {len(found.told)} told to come again; waiting for the last")
        return sent

    async def client(self, found: _Found, *, patient: bool) -> None:
        """Asks; if refused, waits as told and asks once more."""
        self._count += 1
        text = made_prompt(self._draw, self._count, self.run.prompt)
        body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        began = self.clock.now()
        try:
            try:
                found.replies.append(await ask(self.endpoint, "/chat/completions", body, self.run.new, self.clock))
                found.served += 1
                return
            except Refused as error:
                wait_s = _told(error)
            found.told.append(wait_s)
            found.refusals.append(self.clock.now() - began)
            if not patient:
                return
            await anyio.sleep(wait_s)
            came = self.clock.now()
            try:
                found.replies.append(await ask(self.endpoint, "/chat/completions", body, self.run.new, self.clock))
                found.again.append((came, True))
            except Refused as error:
                _told(error)
                found.again.append((came, False))
        except (EngineError, OSError) as error:
            found.errors.append(str(error))

    async def look(self) -> Scrape:
        """At the server's metrics."""
        async with self._root.request("/metrics") as response:
            text = await response.text()
        try:
            return parsed(text, self.clock.now())
        except ValueError as error:
            raise EngineError(f"/metrics are no metrics: {error}") from None

    async def watch(self, looks: _Looks, pid: int | None) -> None:
        """Look again and again, until cancelled."""
        began = self.clock.now()
        while True:
            seen = await self.look()
            looks.waiting_most = max(looks.waiting_most, int(seen.sum("sequences", state="waiting") or 0))
            if pid is not None:
                use = use_of(pid)
                looks.memory.append((self.clock.now() - began, use.nbytes, use.descendants_nbytes))
            await anyio.sleep(_LOOK_S)

    async def settled(self) -> bool:
        """Whether everything is given back."""
        with anyio.move_on_after(_SETTLE_S):
            while True:
                seen = await self.look()
                if not seen.sum("sequences") and seen.sum("blocks", state="free") == seen.sum("blocks", state="total"):
                    return True
                await anyio.sleep(0.2)
        return False


def _told(error: Refused) -> float:
    """Seconds that a refusal says to wait; any other is a failure."""
    if error.status not in (429, 503) or error.retry_after_s is None:
        raise error
    return error.retry_after_s


async def run_overload(
    url: str,
    run: OverloadRun,
    *,
    pid: int | None = None,
    api_key: str | None = None,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> OverloadReport:
    """Find what a server can serve, send it a multiple of that, and wait until everybody who comes again did.

    Args:
        url: Of the server, without `/v1`.
        run: What to send.
        pid: The server's process, if it is a child of this one.
        api_key: Sent as bearer token.
        clock: Time.
        progress: Told how far it is.

    Raises:
        OSError: Nobody listens there.
        EngineError: It is not a server of this package, or fails before it is overloaded.
    """
    clock = clock or SystemClock()
    load = _Load(url, run, api_key, clock)
    load.model = run.model or await first_model(load.endpoint)
    levels = []
    for concurrency in run.concurrency:
        progress(f"{concurrency} clients at a time")
        levels.append(await load.closed(concurrency))
    best = max(levels, key=lambda level: level.output_tokens_per_s)
    per_s = run.times * best.requests_per_s
    found, looks = _Found(), _Looks()
    before = use_of(pid) if pid is not None else None
    watch, own_s, began = CpuWatch(), _own_cpu_s(), clock.now()
    cpu: CpuUse | None = None
    load_cores = server_cores = 0.0

    async def end() -> None:
        nonlocal cpu, load_cores, server_cores
        await anyio.sleep(run.seconds)
        wall_s = clock.now() - began
        cpu, load_cores = watch.stop(wall_s), (_own_cpu_s() - own_s) / wall_s
        if pid is not None and before is not None:
            server_cores = (use_of(pid).cpu_s - before.cpu_s) / wall_s

    with collapsed():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.watch, looks, pid)
            async with anyio.create_task_group() as sending:
                sending.start_soon(end)
                sent = await load.open(per_s, found, progress)
            tasks.cancel_scope.cancel()
    settled = await load.settled()
    assert cpu is not None
    over = began + run.seconds
    goodput = found.tokens_per_s(began + 0.1 * run.seconds, over)
    return OverloadReport(
        kind="overload",
        model=load.model,
        run=run,
        levels=levels,
        best=best,
        requests_per_s=sent / run.seconds,
        output_tokens_per_s=goodput,
        goodput=goodput / best.output_tokens_per_s,
        sent=sent,
        served=found.served,
        refused=len(found.told),
        failed=len(found.errors),
        errors=tuple(dict.fromkeys(found.errors)),
        told_s=spread(found.told),
        refusal_s=spread(found.refusals),
        retries=_retries([served for came, served in found.again if came < over]),
        late_retries=_retries([served for came, served in found.again if came >= over]),
        ttft_s=spread([reply.ttft_s for reply in found.replies if reply.began < over]),
        waiting_most=looks.waiting_most,
        settled=settled,
        memory=_memory(looks, run.seconds, pid),
        load_cores=load_cores,
        server_cores=server_cores,
        cpu=cpu,
    )


def _retries(served: Sequence[bool]) -> Retries:
    return Retries(came=len(served), served=sum(served), share=sum(served) / len(served) if served else None)


def _memory(looks: _Looks, seconds: float, pid: int | None) -> Memory | None:
    if pid is None or not looks.memory:
        return None
    after = use_of(pid)
    overloaded = [look for look in looks.memory if look[0] <= seconds]
    halves = [[own for at, own, _ in overloaded if (at < seconds / 2) == first] for first in (True, False)]
    return Memory(
        before=overloaded[0][1],
        first_half=max(halves[0]),
        second_half=max(halves[1], default=overloaded[-1][1]),
        after=after.nbytes,
        children_before=overloaded[0][2],
        children_most=max(children for _, _, children in looks.memory),
    )


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
