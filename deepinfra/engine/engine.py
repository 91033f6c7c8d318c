"""The engine: a recipe and its pools, and the door through which requests come."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import Self

import anyio
from anyio import AsyncContextManagerMixin
from anyio.abc import TaskStatus

from deepinfra.core.conversation import Constraint, Conversation
from deepinfra.core.ids import SeqId
from deepinfra.core.request import GenerateRequest, Prompt, PromptInput, SeqSpec, TextInput
from deepinfra.core.sampling import SamplingParams
from deepinfra.engine.answer import Answer, AnswerSettings
from deepinfra.engine.collapse import collapsed
from deepinfra.engine.constraints import Constraints
from deepinfra.engine.handoff import Handoff
from deepinfra.engine.lengths import SHORT, characters, is_short
from deepinfra.engine.live import Ending, Live
from deepinfra.engine.meters import Meters
from deepinfra.engine.pool import Pool
from deepinfra.engine.public import PublicPrefixes
from deepinfra.engine.receipts.record import Receipt
from deepinfra.engine.receipts.writing import Receipts, check_tellable
from deepinfra.engine.routes import Route, least_loaded
from deepinfra.engine.sources import Chain, Kin
from deepinfra.engine.stats import EngineStats, State
from deepinfra.engine.stream import Mailbox, Signal, Stream
from deepinfra.errors import (
    ConfigError,
    ContextLengthError,
    EngineDrainingError,
    EngineError,
    EngineNotRunningError,
    ExecutorLost,
    Overloaded,
    RequestError,
    UnsupportedFieldError,
)
from deepinfra.interfaces.given import Clock, Offload, SystemClock, ThreadOffload
from deepinfra.interfaces.recipe import Recipe

__all__ = ("Engine",)

_log = logging.getLogger("deepinfra.engine")

_RENDERS = 2
"""Long conversations rendered at once; more would take the cores from the model and the threads from the store."""

_LAG_INTERVAL_S = 0.25


class Engine(AsyncContextManagerMixin):
    """Serves one model: `async with engine`, then `async with engine.generate(request) as stream`.

    Args:
        recipe: Request to tokens and back.
        pool: One pool that does everything, or several that each do: replicas; or
        prefill: pools that compute prompts up to the first token, and
        decode: pools that go on from there.
        route: Chooses among several pools of one kind.
        name: Under which the model is served; default: the executor's name for it.
        client_timeout_s: An answer that nobody reads for so long is over.
        public_prefixes: Beginnings of prompts whose cached blocks all tenants share: conversations without a user's
            turn, a system message or tools. Everything else is its tenant's own.
        clock: Time.
        offload: Threads.
    """

    def __init__(
        self,
        recipe: Recipe,
        pool: Pool | Sequence[Pool] = (),
        *,
        prefill: Sequence[Pool] = (),
        decode: Sequence[Pool] = (),
        route: Route = least_loaded,
        name: str | None = None,
        client_timeout_s: float = 300.0,
        public_prefixes: Sequence[Conversation] = (),
        clock: Clock | None = None,
        offload: Offload | None = None,
    ) -> None:
        whole = [pool] if isinstance(pool, Pool) else list(pool)
        if bool(whole) == bool(prefill and decode) or (whole and (prefill or decode)):
            raise ConfigError("an engine needs either pools that do everything, or both prefill and decode pools")
        self.recipe = recipe
        self._first, self._last = whole or list(prefill), list(decode)
        _check_apart(self.pools)
        self._route = route
        self._name = name
        self._clock: Clock = clock or SystemClock()
        self._offload: Offload = offload or ThreadOffload()
        self._client_timeout_s = client_timeout_s
        self._public = PublicPrefixes(public_prefixes, recipe, self._offload)
        self._meters = Meters()
        self._ids = count(1)
        self._entered = False
        self._draining = False
        self._active = 0
        self._quiet = Signal()

    @property
    def name(self) -> str:
        """The name under which it is served."""
        return self._name or self._first[0].executor.identity.model

    @property
    def pools(self) -> tuple[Pool, ...]:
        """All pools, first ones first."""
        return (*self._first, *self._last)

    @property
    def state(self) -> State:
        """Whether it serves."""
        if not self._entered:
            return "stopped"
        kinds = [[pool.state for pool in pools] for pools in (self._first, self._last) if pools]
        if any(all(state == "failed" for state in states) for states in kinds):
            return "failed"
        if self._draining:
            return "draining"
        return "ready" if all("ready" in states for states in kinds) else "starting"

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and output together; valid while entered."""
        return min(self._capacity(pool) for pool in self.pools)

    @staticmethod
    def _capacity(pool: Pool) -> int:
        limits = pool.limits
        return min(limits.max_context, limits.num_blocks * pool.executor.layout.block_size)

    # -- life ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self.recipe.give(self._clock, self._offload)
        constraints = Constraints(self.recipe, self._offload)
        for pool in self.pools:
            pool.give(self._clock, self._offload, lambda: self.recipe.version, constraints)
        with collapsed():
            async with AsyncExitStack() as stack:
                reading = await stack.enter_async_context(anyio.create_task_group())
                read = anyio.Event()
                reading.start_soon(self._read_recipe, read)  # it takes as long as weights do, which are read meanwhile
                for pool in (*self._last, *self._first):
                    # The first look at an executor's identity may read all weights to fingerprint them.
                    await self._offload(getattr, pool.executor, "identity")
                    await stack.enter_async_context(pool)
                await read.wait()
                await stack.enter_async_context(self.recipe)
                await self._public.ids(datetime.fromtimestamp(self._clock.wall(), UTC).date().isoformat())
                self._renders = anyio.CapacityLimiter(_RENDERS)
                self._tasks = await stack.enter_async_context(anyio.create_task_group())
                stack.callback(self._tasks.cancel_scope.cancel)
                self._tasks.start_soon(self._watch_lag)
                self._receipts = Receipts(self.recipe, self._first, self._last, self.name)
                self._entered, self._draining = True, False
                try:
                    yield self
                finally:
                    self._entered = False

    async def _read_recipe(self, read: anyio.Event) -> None:
        self._longest_token = await self._offload(_longest_token, self.recipe)
        read.set()

    async def drain(self, deadline_s: float) -> bool:
        """Take no new requests, let running ones finish, and wait until their KV is saved.

        Args:
            deadline_s: Seconds after which it returns anyway.

        Returns:
            Whether everything was finished and saved in time.
        """
        self._draining = True
        with anyio.move_on_after(deadline_s) as scope:
            while self._active:
                await self._quiet.wait()
            for pool in self.pools:
                await pool.settle()
        return not scope.cancelled_caught

    async def _watch_lag(self) -> None:
        while True:
            before = self._clock.now()
            await anyio.sleep(_LAG_INTERVAL_S)
            self._meters.loop_lag.add(max(0.0, self._clock.now() - before - _LAG_INTERVAL_S))

    # -- requests -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Stream]:
        """Admit a request and stream its answer; leaving the block ends it, at whatever token it is.

        Raises (on entering, before anything was generated):
            EngineNotRunningError: Nobody entered the engine.
            EngineDrainingError: It is shutting down.
            RequestError: The request is wrong or asks for what is not supported.
            ContextLengthError: It does not fit.
            Overloaded: Not now.
            DeadlineExceededError: Its deadline passed before it was admitted.
            PoolFailedError: The executor was lost too often.
        """
        if not self._entered:
            raise EngineNotRunningError
        if self._draining:
            raise EngineDrainingError
        arrived = self._clock.now()
        self._active += 1
        scopes: list[anyio.CancelScope] = []
        try:
            prompt = await self._render(request)
            given, public = request.input, 0
            if isinstance(given, Conversation):
                public = await self._public.shared(prompt.ids, given.now)
            stream, answers = self._answers(request, prompt, arrived, public)
            if request.receipt:
                check_tellable(request, prompt)
                await self._receipts.prepare(self._offload)
                stream.certify(
                    lambda: self._receipts.write(request, stream, answers),
                    lambda choice, tokens: answers[choice].logprobs_digest(tokens),
                )
            for answer in answers:
                scope: anyio.CancelScope = await self._tasks.start(self._drive, answer)
                scopes.append(scope)
            yield stream
        finally:
            for scope in scopes:
                scope.cancel()
            self._active -= 1
            if not self._active:
                self._quiet.set()

    async def count(self, given: PromptInput) -> int:
        """Tokens of a prompt, rendered as `generate` renders it.

        Raises:
            EngineNotRunningError: Nobody entered the engine.
            RequestError: The input is wrong or asks for what is not supported.
        """
        if not self._entered:
            raise EngineNotRunningError
        return len((await self._render(GenerateRequest(input=given))).ids)

    async def receipt(self) -> Receipt:
        """What its receipts say of itself: one without requests.

        Raises:
            EngineNotRunningError: Nobody entered the engine.
        """
        if not self._entered:
            raise EngineNotRunningError
        await self._receipts.prepare(self._offload)
        return self._receipts.blank()

    async def _render(self, request: GenerateRequest) -> Prompt:
        """Exact ids of a request's input, off the loop when it is long."""
        given = request.input
        if isinstance(given, Prompt) and request.constraint is not None:
            raise RequestError("a rendered prompt states its own constraint", "constraint")
        if isinstance(given, tuple):
            ends = self.recipe.tokenizer.eos_ids
            given = Prompt(ids=given, stop_ids=ends, start="raw", constraint=request.constraint)
        if isinstance(given, Prompt):
            size = self._first[0].limits.vocab_size
            if given.ids and not 0 <= min(given.ids) <= max(given.ids) < size:
                wrong = next(token for token in given.ids if not 0 <= token < size)
                raise RequestError(f"token id {wrong} is outside the vocabulary of {size}", "prompt")
            return given
        if not isinstance(given, TextInput) and request.constraint is not None:
            given = replace(given, constraint=request.constraint)
        length = len(given.text) if isinstance(given, TextInput) else characters(given)
        if length <= SHORT if isinstance(given, TextInput) else is_short(given):
            return self._rendered(given, request.constraint)
        # Before any work: the text would not fit even if every token were the longest one.
        if length > self.max_context * self._longest_token:
            raise ContextLengthError(-(-length // self._longest_token), request.max_tokens, self.max_context)
        async with self._renders:
            return await self._offload(self._rendered, given, request.constraint)

    def _rendered(self, given: TextInput | Conversation, constraint: Constraint | None) -> Prompt:
        if isinstance(given, TextInput):
            return replace(self.recipe.text(given), constraint=constraint)
        prompt = self.recipe.render(given)
        if given.constraint is not None and prompt.constraint is None:
            raise UnsupportedFieldError("constraint", "is not supported with this model's recipe")
        return prompt

    def _answers(
        self, request: GenerateRequest, prompt: Prompt, arrived: float, public: int
    ) -> tuple[Stream, list[Answer]]:
        """Check shape and length, and make one answer per choice."""
        self._refuse_unsupported(request, prompt)
        length = len(prompt.ids)
        max_tokens = self._max_tokens(request, length)
        seed = secrets.randbits(63) if request.seed is None else request.seed % 2**64
        mailbox = Mailbox()
        stream = Stream(prompt, seed, request.n, mailbox)
        settings = AnswerSettings(self.recipe, self._clock, self._meters, self._client_timeout_s)
        # Keeping more than all keeps all; whatever integer a client sends, a step can carry this one.
        top_k = min(request.sampling.top_k, self._first[0].limits.vocab_size)
        sampling = replace(request.sampling, top_k=top_k)
        stop_ids = request.stop_ids if request.ignore_eos else request.stop_ids | prompt.stop_ids
        answers = [
            Answer(
                settings,
                request,
                SeqSpec(
                    seq=SeqId(next(self._ids)),
                    tokens=prompt.ids,
                    prompt_len=length,
                    max_tokens=max_tokens,
                    seed=seed,
                    choice=choice,
                    sampling=sampling,
                    stop_ids=stop_ids,
                    tenant=request.tenant,
                    retention=request.retention,
                    priority=request.priority,
                    arrived_at=arrived,
                    deadline=None if request.deadline_s is None else arrived + request.deadline_s,
                    constraint=prompt.constraint,
                    salt=request.salt,
                    public=public,
                    explain=request.explain and choice == 0,
                    stops=bool(request.stop),
                ),
                stream,
                mailbox,
            )
            for choice in range(request.n)
        ]
        return stream, answers

    def _max_tokens(self, request: GenerateRequest, length: int) -> int:
        """How many tokens a prompt of `length` may be continued by."""
        if length == 0:
            raise RequestError("the prompt is empty", "prompt")
        wanted, room = request.max_tokens, self.max_context - length
        if room < 1 or (wanted is not None and wanted > room and not request.fit):
            raise ContextLengthError(length, wanted, self.max_context)
        return room if wanted is None else min(wanted, room)

    def _refuse_unsupported(self, request: GenerateRequest, prompt: Prompt) -> None:
        """Refuse what has an effect and would not be honoured."""
        if request.n < 1:
            raise RequestError("n must be at least 1", "n")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise RequestError("max_tokens must be at least 1", "max_tokens")
        if prompt.constraint is not None and request.ignore_eos:
            raise RequestError("ignore_eos contradicts a constraint, which says where an answer ends", "ignore_eos")
        size = self._first[0].limits.vocab_size
        if request.sampling.top_k < 0:
            raise RequestError("top_k must be at least 0", "top_k")
        if not 0 <= (request.sampling.logprobs or 0) <= size:
            raise RequestError(f"logprobs must be between 0 and {size}", "logprobs")
        for token, _ in request.sampling.logit_bias:
            if not 0 <= token < size:
                raise RequestError(f"token id {token} is outside the vocabulary of {size}", f"logit_bias.{token}")
        for pool in self.pools:
            provides = pool.executor.provides
            if request.sampling.logprobs is not None and "logprobs" not in provides:
                raise UnsupportedFieldError("logprobs")
            if prompt.media and "media" not in provides:
                raise UnsupportedFieldError("input", "holds media, which this server's executor does not take")
            if prompt.constraint is not None and "masks" not in provides:
                raise UnsupportedFieldError("constraint")
            if "sampling" not in provides:
                plain = SamplingParams(temperature=request.sampling.temperature, logprobs=request.sampling.logprobs)
                for name in SamplingParams.__slots__:
                    if getattr(request.sampling, name) != getattr(plain, name):
                        raise UnsupportedFieldError(name)

    async def _drive(self, answer: Answer, *, task_status: TaskStatus[anyio.CancelScope]) -> None:
        """One answer's life; errors before admission are the caller's, later ones become its last event."""
        admitted = False
        try:
            with anyio.CancelScope() as scope, answer.deadline_scope() as deadline:

                def started() -> None:
                    nonlocal admitted
                    if not admitted:
                        admitted = True
                        task_status.started(scope)

                ending = await self._through_pools(answer, started)
                answer.finish(ending)
            if deadline.cancelled_caught:
                answer.fail(answer.deadline_error())
                if not admitted:  # while a store was asked
                    raise answer.deadline_error()
        except (EngineError, Overloaded, ExecutorLost, RequestError) as error:
            if not admitted:
                raise
            answer.finish(Ending(error.code, str(error)))
        except Exception as error:  # a door: a broken parser ends its own answer, not the engine
            if not admitted:
                raise
            _log.exception("an answer of %s failed", self.name)
            answer.finish(Ending(EngineError.code, f"the answer failed ({type(error).__name__}); the log says more"))
        finally:
            if admitted and not answer.over:
                # Whoever left reads it no more: who does is met by the end of the engine.
                answer.finish(Ending("cancelled", "the server stopped before the answer was complete"))

    async def _through_pools(self, answer: Answer, started: Callable[[], None]) -> Ending:
        """Prefill and decode, in one pool or in two."""
        first, chain = await self._choose(self._first, answer.spec)
        handoff: Handoff | None = None
        async with first.run(answer.spec, prefill_only=bool(self._last), chain=chain) as live:
            started()
            ending = await self._follow(first, answer, live)
            if ending.reason != "handoff":
                return ending
            spec = answer.handed_off(tuple(live.tokens))
            try:
                handoff = await first.export(live)
            except ExecutorLost:
                handoff = None  # the decode pool computes the prompt itself
        last, chain = await self._choose(self._last, spec)
        async with last.run(spec, handoff=handoff, chain=chain) as live:
            return await self._follow(last, answer, live)

    @staticmethod
    async def _follow(pool: Pool, answer: Answer, live: Live) -> Ending:
        """Follow a sequence; one that is cancelled gets what was computed for it until then."""
        try:
            return await answer.follow(live)
        except anyio.get_cancelled_exc_class():
            pool.catch_up()
            answer.take_rest(live)
            raise

    async def _choose(self, pools: Sequence[Pool], spec: SeqSpec) -> tuple[Pool, Chain]:
        """The pool that takes a sequence, and the keys of its blocks there; pools of the same kin hash them once."""
        chains: dict[Kin, Chain] = {}
        for pool in pools:
            if pool.kin not in chains:
                chains[pool.kin] = await pool.chain(spec)
        serving = [pool for pool in pools if pool.state not in ("failed", "stopped")]
        if not serving:
            raise next((pool.failure for pool in pools if pool.failure is not None), EngineNotRunningError())
        chosen = serving[0]
        if len(serving) > 1:
            index = self._route(spec, [pool.view(chains[pool.kin].keys) for pool in serving])
            if not 0 <= index < len(serving):
                raise ConfigError(f"the route chose pool {index}; there are {len(serving)}, from 0 on")
            chosen = serving[index]
        return chosen, chains[chosen.kin]

    # -- numbers ------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counts since construction and the present state."""
        pools = tuple(pool.stats() for pool in self.pools)
        meters = self._meters
        return EngineStats(
            state=self.state,
            requests=dict(meters.requests),
            waiting=sum(pool.waiting for pool in pools),
            running=sum(pool.running for pool in pools),
            prompt_tokens=meters.prompt_tokens,
            generated_tokens=meters.generated_tokens,
            cached_tokens=dict(meters.cached_tokens),
            ttft=meters.ttft.snapshot(),
            itl=meters.itl.snapshot(),
            queue_wait=meters.queue_wait.snapshot(),
            loop_lag=meters.loop_lag.snapshot(),
            pools=pools,
        )


def _check_apart(pools: Sequence[Pool]) -> None:
    """Refuse pools that are one, and names by which neither a route nor a metric could tell them apart."""
    if len({id(pool) for pool in pools}) != len(pools):
        raise ConfigError("a pool is given twice; the pools of an engine must be different objects")
    names = [pool.name for pool in pools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two pools are named {twice!r}; give each pool of an engine a name of its own")


def _longest_token(recipe: Recipe) -> int:
    """Most characters that one token can stand for: a byte is at most one character. Reads the recipe's files."""
    tokenizer = recipe.tokenizer
    return max(1, max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)))
