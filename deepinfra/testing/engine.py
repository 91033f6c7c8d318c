"""The whole-engine law: any configuration, with any fault, gives the reference text, and gives everything back.

A `Scenario` is one configuration with its requests; `random_scenario` draws one, `run_scenario` runs it over two turns
and returns what is wrong with it (nothing, if the law holds). Pools are tiny on purpose: 4 blocks of 2 tokens find
what 1,000 blocks hide, and only a second turn sees a block that was published one token early.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import anyio
import llguidance

from deepinfra.core.conversation import Constraint
from deepinfra.core.events import Failed, Finished, TextDelta
from deepinfra.core.request import GenerateRequest
from deepinfra.core.sampling import Purpose, SamplingParams, uniform
from deepinfra.engine import Engine, Pool, cache_aware, least_loaded
from deepinfra.executors.toy import ToyExecutor, toy_cell, toy_next
from deepinfra.executors.toy_windows import toy_window
from deepinfra.interfaces.executor import Executor
from deepinfra.interfaces.given import InlineOffload, Offload, ThreadOffload
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.interfaces.scheduler import Scheduler
from deepinfra.interfaces.speculator import Speculator
from deepinfra.kvstores.memory import MemoryStore
from deepinfra.schedulers.bucketed import Bucketed
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.executors import FlakyExecutor
from deepinfra.testing.faults import FlakyStore
from deepinfra.testing.speculators import Hostile, Oracle
from deepinfra.testing.tiny import EOS, TinyRecipe

__all__ = ("Ask", "Coverage", "Scenario", "random_scenario", "reference", "run_scenario")

VOCAB = 260

CONSTRAINTS = (
    Constraint(kind="regex", source="[a-d]{3,30}"),
    Constraint(kind="regex", source="(ab|ba|c)*d?"),
    Constraint(kind="regex", source="[ -~]*"),
    Constraint(kind="json_schema", source='{"type": "array", "items": {"enum": [0, 12, 123, "ab"]}, "maxItems": 4}'),
    Constraint(kind="grammar", source='start: "x" <[258]> /[a-c]{2,6}/ <[257]>?'),
    Constraint(kind="grammar", source="start: /a{1,3}/ <[260]>"),
)
"""What asks may be bound to; nothing that the executor samples can end the last."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt of ids, how it is drawn, and after how many tokens its client leaves (0 = stays)."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    leave_after: int = 0
    tenant: str = "public"
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One configuration and what it is asked."""

    asks: tuple[Ask, ...]
    blocks: int = 8
    block_size: int = 2
    max_step_tokens: int = 16
    max_seqs: int = 4
    num_slots: int = 4
    grid: int = 1
    scheduler: Literal["fcfs", "bucketed"] = "fcfs"
    split: bool = False
    speculator: Literal["none", "oracle", "half", "hostile"] = "none"
    store: Literal["none", "memory", "flaky"] = "none"
    executor: Literal["sound", "failing", "dying"] = "sound"
    lose_handoffs: bool = False
    threads: bool = False
    seed: int = 0
    windows: tuple[int, ...] = ()
    snapshots: Literal["off", "ram", "disk"] = "disk"
    replicas: int = 1
    depth: int = 1


@dataclass(slots=True)
class Coverage:
    """What the scenarios really exercised, so that a soak can show that it tested something."""

    counts: Counter[str] = field(default_factory=Counter)


def reference(ask: Ask, choice: int = 0, windows: tuple[int, ...] = ()) -> list[int]:
    """The tokens that a correct engine gives, computed without one."""
    return _expected(ask, choice, windows)[0]


def _cells(line: Sequence[int], windows: Sequence[int]) -> list[bytes]:
    prefixes = (line[: i + 1] for i in range(len(line)))
    return [toy_cell(prefix, window=toy_window(prefix, windows)) for prefix in prefixes]


def _expected(ask: Ask, choice: int, windows: tuple[int, ...]) -> tuple[list[int], str]:
    """The tokens, and why they end."""
    line = list(ask.prompt)
    cells = _cells(line, windows)
    stops = ask.stop_ids | {EOS}
    out: list[int] = []
    for _ in range(ask.max_tokens):
        draw = uniform(ask.seed, choice, len(line), Purpose.SAMPLE) if ask.temperature > 0 else 0.0
        token = _next(ask, line, [*cells, toy_window(line, windows)], draw)
        if token is None:
            return out, "constraint-failed"
        out.append(token)
        line.append(token)
        cells.append(toy_cell(line, window=toy_window(line, windows)))
        if token in stops or (ask.constraint is not None and _library(ask.constraint, tuple(out)).is_stopped()):
            return out, "stop"
    return out, "length"


def _next(ask: Ask, line: Sequence[int], cells: Sequence[bytes], draw: float) -> int | None:
    """The token after `line`, which begins with the ask's prompt; `None` if its constraint allows none.

    `cells` are what the executor reads back, and what its windows make of the last position.
    """
    allowed: bytes | None = None
    if ask.constraint is not None:
        library = _library(ask.constraint, tuple(line[len(ask.prompt) :]))
        mask = int.from_bytes(library.compute_bitmask(), "little") & ((1 << VOCAB) - 1)
        if library.is_accepting():
            mask |= sum(1 << token for token in ask.stop_ids | {EOS})
        if not mask:
            return None
        allowed = mask.to_bytes(-(-VOCAB // 8), "little")
    return toy_next(b"".join(cells), draw, VOCAB, allowed)


@lru_cache(maxsize=4096)
def _library(constraint: Constraint, tokens: tuple[int, ...]) -> llguidance.LLMatcher:
    """The library behind some tokens, without anything of the engine's; not to be moved on."""
    if tokens:
        library = _library(constraint, tokens[:-1]).deep_copy()
        library.consume_token(tokens[-1])
        return library
    make = llguidance.LLMatcher
    if constraint.kind == "json_schema":
        bounded = {"whitespace_flexible": False, "item_separator": ", "}
        grammar = make.grammar_from_json_schema(constraint.source, overrides=bounded)  # type: ignore[arg-type]
    else:
        grammar = (make.grammar_from_regex if constraint.kind == "regex" else make.grammar_from_lark)(constraint.source)
    return make(_tiny_tokenizer(), grammar, log_level=0)


@lru_cache(maxsize=1)
def _tiny_tokenizer() -> llguidance.LLTokenizer:
    class Bytes:
        eos_token_id, bos_token_id = VOCAB, None
        tokens = (*(bytes((i,)) for i in range(256)), *(b"<%d>" % i for i in range(256, VOCAB + 1)))
        special_token_ids = range(256, VOCAB + 1)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=VOCAB + 1)


def random_scenario(rng: random.Random) -> Scenario:
    """Draw a configuration in which every mechanism is likely to be under pressure."""
    block_size = rng.choice((1, 2, 2, 3, 4))
    longest = 24
    need = -(-(longest + 14) // block_size)
    alphabet = rng.choice((2, 3, 200))
    asks = tuple(
        Ask(
            prompt=tuple(rng.randrange(alphabet) for _ in range(rng.randint(1, longest))),
            max_tokens=rng.randint(1, 12),
            n=rng.choice((1, 1, 1, 2, 3)),
            temperature=rng.choice((0.0, 0.0, 1.0)),
            seed=rng.randrange(1000),
            stop_ids=frozenset(rng.sample(range(256), rng.choice((0, 0, 5, 30)))),
            leave_after=rng.choice((0, 0, 0, 1, 2, 4)),
            tenant=rng.choice(("public", "public", "other")),
            constraint=rng.choice((None, None, *CONSTRAINTS)) if rng.random() < 0.6 else None,
        )
        for _ in range(rng.randint(1, 6))
    )
    return Scenario(
        asks=asks,
        blocks=need + rng.choice((0, 0, 1, 3, need, 3 * need)),
        block_size=block_size,
        max_step_tokens=rng.choice((1, 2, 3, 7, 16, 64)),
        max_seqs=rng.choice((1, 2, 3, 8)),
        num_slots=rng.choice((1, 2, 3, 8)),
        scheduler=rng.choice(("fcfs", "bucketed")),
        split=rng.random() < 0.35,
        speculator=rng.choice(("none", "none", "oracle", "half", "hostile")),
        store=rng.choice(("none", "memory", "flaky")),
        executor=rng.choice(("sound", "sound", "sound", "failing", "dying")),
        lose_handoffs=rng.random() < 0.3,
        threads=rng.random() < 0.8,
        seed=rng.randrange(1 << 30),
        windows=rng.choice(((), (), (1,), (2, 2), (3,), (2, 3, 2), (5, 5))),
        snapshots=rng.choice(("off", "ram", "disk", "disk")),
        replicas=rng.choice((1, 1, 1, 2)),
        depth=rng.choice((1, 2, 2, 3)),
    )


class _Losing(Pool):
    """A pool whose handoffs get lost."""

    async def export(self, live):  # type: ignore[no-untyped-def]
        handoff = await super().export(live)
        # Sometimes only the windows: then the blocks are there, and their windows are not.
        kept = handoff.records if len(live.tokens) % 2 else tuple(bytes(len(r)) for r in handoff.records)
        return replace(handoff, records=kept, snapshot=bytes(len(handoff.snapshot)))


class _Truth:
    """The target's greedy next token, under the constraint of the ask that a prefix belongs to."""

    def __init__(self, asks: Sequence[Ask], windows: tuple[int, ...]) -> None:
        self.asks, self.windows = asks, windows

    def __call__(self, tokens: Sequence[int]) -> int:
        cells = [*_cells(tokens, self.windows), toy_window(tokens, self.windows)]
        for ask in self.asks:
            if ask.constraint is not None and tuple(tokens[: len(ask.prompt)]) == ask.prompt:
                return _next(ask, tokens, cells, 0.0) or 0
        return toy_next(b"".join(cells), 0.0, VOCAB)


def _speculator(scenario: Scenario, rng: random.Random, truth: _Truth) -> Speculator | None:
    made: dict[str, Callable[[], Speculator | None]] = {
        "none": lambda: None,
        "oracle": lambda: Oracle(truth, 1.0, 0, max_drafts=3),
        "half": lambda: Oracle(truth, 0.5, rng.randrange(1000), max_drafts=3),
        "hostile": lambda: Hostile(rng.randrange(1000), vocab_size=VOCAB),
    }
    return made[scenario.speculator]()


def _pool(scenario: Scenario, rng: random.Random, store: KVStore | None, name: str, truth: _Truth) -> Pool:
    executor: Executor = ToyExecutor(
        num_blocks=scenario.blocks,
        block_size=scenario.block_size,
        num_slots=scenario.num_slots,
        max_step_tokens=scenario.max_step_tokens,
        max_seqs=scenario.max_seqs,
        grid=scenario.grid,
        vocab_size=VOCAB,
        windows=scenario.windows,
    )
    executor.depth = scenario.depth
    if scenario.executor != "sound":
        kinds = ("fail", "row") if scenario.executor == "failing" else ("lose",)
        executor = FlakyExecutor(executor, rng, rate=0.15, kinds=kinds)
    scheduler: Scheduler = Fcfs() if scenario.scheduler == "fcfs" else Bucketed()
    kind = _Losing if scenario.lose_handoffs else Pool
    speculator = _speculator(scenario, rng, truth)
    return kind(scheduler, executor, store=store, speculator=speculator, name=name, snapshots=scenario.snapshots)


def _store(scenario: Scenario) -> KVStore | None:
    if scenario.store == "none":
        return None
    store = MemoryStore(capacity_nbytes=1 << 20)
    return FlakyStore(store, random.Random(scenario.seed), rate=0.2) if scenario.store == "flaky" else store


def _build(scenario: Scenario, store: KVStore | None, truth: _Truth) -> Engine:
    """The engine that a scenario describes."""
    rng = random.Random(scenario.seed)
    offload: Offload = ThreadOffload() if scenario.threads else InlineOffload()
    if scenario.split:
        prefill, decode = _pool(scenario, rng, store, "prefill", truth), _pool(scenario, rng, None, "decode", truth)
        return Engine(TinyRecipe(), prefill=[prefill], decode=[decode], offload=offload)
    stores = [store, *(_store(scenario) for _ in range(scenario.replicas - 1))]
    pools = [_pool(scenario, rng, one, f"pool{index}", truth) for index, one in enumerate(stores)]
    return Engine(TinyRecipe(), pools, route=cache_aware() if scenario.seed % 2 else least_loaded, offload=offload)


async def run_scenario(
    scenario: Scenario, coverage: Coverage | None = None, patience_s: float = 60.0, *, store: KVStore | None = None
) -> list[str]:
    """Run two turns of a scenario, cold and then over whatever the first left behind.

    Args:
        scenario: What to run.
        coverage: Counts what was exercised.
        patience_s: A turn that takes longer hangs.
        store: Instead of the scenario's.

    Returns:
        Sentences about what broke the law; empty if it holds.
    """
    store = store or _store(scenario)
    wrong: list[str] = []
    truth = _Truth(scenario.asks, scenario.windows)
    engine = _build(scenario, store, truth)
    async with engine:
        asks = scenario.asks
        for turn in (1, 2):
            answers = await _one_turn(engine, asks, scenario, turn, wrong, patience_s)
            await _settled(engine)
            for pool in engine.pools:
                _check_idle(pool, turn, wrong)
            asks = tuple(
                replace(ask, prompt=(*ask.prompt, *answer, 7)[-38 + ask.max_tokens :], leave_after=0)
                if len((*ask.prompt, *answer, 7)) + ask.max_tokens <= _capacity(scenario)
                else replace(ask, leave_after=0)
                for ask, answer in zip(asks, answers, strict=True)
            )
            truth.asks = asks
        allowed = sum(pool.executor.hit for pool in engine.pools if isinstance(pool.executor, FlakyExecutor))
        if (failed := engine.stats().requests.get("step-failed", 0)) > allowed:
            wrong.append(f"{failed} answers failed, but only {allowed} sequences were hit by faults")
        if scenario.executor == "sound" and (failures := sum(pool.stats().step_failures for pool in engine.pools)):
            wrong.append(f"{failures} steps failed on an executor that only fails what must not be")
        if coverage is not None:
            _cover(engine, store, coverage)
    return wrong


async def _settled(engine: Engine) -> None:
    with anyio.move_on_after(5.0):
        for pool in engine.pools:
            await pool.settle()


def _capacity(scenario: Scenario) -> int:
    return scenario.blocks * scenario.block_size


async def _one_turn(
    engine: Engine, asks: Sequence[Ask], scenario: Scenario, turn: int, wrong: list[str], patience_s: float
) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in asks]

    async def one(index: int, ask: Ask) -> None:
        request = GenerateRequest(
            input=ask.prompt,
            sampling=SamplingParams(temperature=ask.temperature, logprobs=0),
            n=ask.n,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            stop_ids=ask.stop_ids,
            tenant=ask.tenant,
            constraint=ask.constraint,
        )
        got: list[list[int]] = [[] for _ in range(ask.n)]
        async with engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    got[event.choice].extend(token.token for token in event.tokens)
                elif isinstance(event, Finished):
                    _compare(scenario, turn, ask, event, event.reason, got[event.choice], wrong)
                elif isinstance(event, Failed) and event.code == "constraint-failed":
                    _compare(scenario, turn, ask, event, event.code, got[event.choice], wrong)
                elif isinstance(event, Failed) and not _may_fail(scenario, event):
                    wrong.append(f"turn {turn}, {ask}: failed with {event.code}: {event.message}")
                if ask.leave_after and sum(map(len, got)) >= ask.leave_after:
                    return
        answers[index] = got[0]

    with anyio.move_on_after(patience_s) as scope:
        async with anyio.create_task_group() as tasks:
            for index, ask in enumerate(asks):
                tasks.start_soon(one, index, ask)
    if scope.cancelled_caught:
        wrong.append(f"turn {turn} hangs: {[pool.stats() for pool in engine.pools]}")
    return answers


def _compare(
    scenario: Scenario, turn: int, ask: Ask, event: Finished | Failed, ended: str, got: list[int], wrong: list[str]
) -> None:
    want, reason = _expected(ask, event.choice, scenario.windows)
    shown = want[:-1] if want and want[-1] in ask.stop_ids | {EOS} else want
    if got != shown or event.usage.completion_tokens != len(want) or ended != reason:
        wrong.append(
            f"turn {turn}, {ask}, choice {event.choice}: got {got} {ended}, want {shown} {reason}, usage {event.usage}"
        )


def _may_fail(scenario: Scenario, event: Failed) -> bool:
    if scenario.executor == "failing":
        return event.code == "step-failed" and ("out of memory" in event.message or "NaN" in event.message)
    return scenario.executor == "dying" and event.code in ("executor-lost", "pool-failed")


def _check_idle(pool: Pool, turn: int, wrong: list[str]) -> None:
    stats = pool.stats()
    if stats.state != "ready":
        return
    for name, have, want in (
        ("blocks", stats.blocks_free, stats.blocks_total),
        ("slots", stats.slots_free, stats.slots_total),
        ("sequences", stats.waiting + stats.running, 0),
    ):
        if have != want:
            wrong.append(f"turn {turn}: pool {pool.name} has {have} {name}, want {want}")


def _cover(engine: Engine, store: KVStore | None, coverage: Coverage) -> None:
    counts = coverage.counts
    for pool in engine.pools:
        stats = pool.stats()
        counts["steps"] += stats.steps
        counts["steps ahead"] += stats.steps_ahead
        counts["preemptions"] += stats.preemptions
        counts["losses"] += stats.executor_losses
        counts["drafts accepted"] += stats.drafts_accepted
        counts["drafts rejected"] += stats.drafts_verified - stats.drafts_accepted
        counts["records damaged"] += stats.records_damaged
        counts["rows replayed"] += stats.rows_replayed
        counts["hits too short"] += stats.hits_too_short
        counts["snapshots taken"] += stats.snapshots_taken
        counts["snapshots dropped"] += stats.snapshots_dropped
        counts["snapshots restored"] += stats.snapshots_restored
        if isinstance(pool.executor, FlakyExecutor):
            counts.update({f"executor {kind}": number for kind, number in pool.executor.injected.items()})
    for tier, tokens in engine.stats().cached_tokens.items():
        counts[f"cached {tier}"] += tokens
    for reason, number in engine.stats().requests.items():
        counts[f"ended {reason}"] += number
    if isinstance(store, FlakyStore):
        counts.update({f"store {kind}": number for kind, number in store.injected.items()})
