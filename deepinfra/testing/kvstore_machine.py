"""A hypothesis state machine for KV stores: any history of calls, time and restarts keeps the laws."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from anyio import CancelScope, create_task_group
from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from deepinfra.core.kv import KVRecord, NamespaceFilter, RecordRef, Retention
from deepinfra.interfaces.given import ThreadOffload
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content, load

__all__ = ("run_kvstore_machine",)

TTL_S = 1_000.0

Chain: TypeAlias = tuple[tuple[int, ...], str, str]
"""Tokens, tenant, model."""

chains: st.SearchStrategy[Chain] = st.tuples(
    st.lists(st.integers(0, 1), min_size=2, max_size=8).map(tuple), st.sampled_from("ab"), st.sampled_from("xy")
)
saved: Bundle[Chain] = Bundle("saved")
known_or_new = st.one_of(saved, chains)


def run_kvstore_machine(
    make: Callable[[Path], KVStore],
    folder: Path,
    *,
    persistent: bool,
    lossy: bool = False,
    backend: str = "asyncio",
    examples: int = 25,
    steps: int = 30,
    shrink: bool = True,
) -> None:
    """Try histories until one breaks a law, which raises what it raised.

    The laws: what is loaded is what was saved under that ref; what was forgotten, whose life is over or that was never
    saved is not matched; while nothing was dropped, evicted or damaged, everything else is matched; the cap holds; the
    count of records is right; after a restart all this is as before, or everything is gone if not `persistent`.

    Args:
        make: Makes a store in a folder, as `KVStoreConformance.make` does; large enough to keep a few dozen records.
        folder: Each history gets a new one inside.
        persistent: Whether records survive leaving the store.
        lossy: Whether it may lose records without counting them: then anything may be missing, and nothing be wrong.
        backend: Of anyio.
        examples: Histories.
        steps: Calls per history.
        shrink: Whether to look for the shortest history that fails, which takes minutes.
    """
    numbers = count()
    with start_blocking_portal(backend) as portal:

        class Machine(_Machine):
            def __init__(self) -> None:
                super().__init__(make, folder / f"history-{next(numbers)}", persistent, lossy, portal)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )


class _Machine(RuleBasedStateMachine):
    saved = saved

    def __init__(
        self, make: Callable[[Path], KVStore], folder: Path, persistent: bool, lossy: bool, portal: BlockingPortal
    ) -> None:
        super().__init__()
        self._always_lossy = lossy
        self._make, self._folder, self._persistent, self._portal = make, folder, persistent, portal
        folder.mkdir()
        self._clock = ManualClock()
        self._known: dict[RecordRef, KVRecord] = {}  # what must be held, unless the store says that it lost something
        self._dead_at: dict[RecordRef, float] = {}
        self._sure_until: dict[RecordRef, float] = {}
        self._lossy = lossy
        self._stack = ExitStack()
        self._enter()

    def _enter(self) -> None:
        self._store = self._make(self._folder)
        self._store.give(self._clock, ThreadOffload())
        self._stack.enter_context(self._portal.wrap_async_context_manager(self._store))

    def _call(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> Any:
        return self._portal.call(function, *args)

    def teardown(self) -> None:
        self._stack.close()
        shutil.rmtree(self._folder)

    def _note_losses(self) -> None:
        stats = self._store.stats()
        self._lossy = self._lossy or bool(stats.dropped or stats.evicted or stats.damaged)

    @rule(target=saved, chain_=known_or_new, snapshots=st.booleans())
    def save(self, chain_: Chain, snapshots: bool) -> Chain:
        records = _records(chain_, "block") + (_records(chain_, "snapshot") if snapshots else [])
        self._call(self._store.save, records)
        self._saved(records)
        return chain_

    def _saved(self, records: list[KVRecord]) -> None:
        now = self._clock.wall()
        for record in records:
            if record.ref not in self._known or self._dead_at[record.ref] <= now:
                self._known[record.ref] = record
                self._sure_until[record.ref] = now + TTL_S
            self._dead_at[record.ref] = now + TTL_S  # at the latest: a life may slide, or not

    @rule(chain_=known_or_new, turns=st.integers(0, 6))
    def save_cancelled(self, chain_: Chain, turns: int) -> None:
        async def call() -> None:
            async with create_task_group() as tasks:
                tasks.start_soon(self._store.save, records)
                for _ in range(turns):
                    await checkpoint()
                tasks.cancel_scope.cancel()

        records = _records(chain_, "block")
        self._portal.call(call)
        match = self._call(self._store.match, [record.ref.key for record in records])
        self._saved(records[: len(match.refs)])
        for record in records[len(match.refs) :]:  # a later one may have been saved all the same
            self._known.setdefault(record.ref, record)
            self._sure_until.setdefault(record.ref, 0.0)
            self._dead_at[record.ref] = self._clock.wall() + TTL_S

    @rule(chain_=known_or_new)
    def match_and_load(self, chain_: Chain) -> None:
        records, now = _records(chain_, "block"), self._clock.wall()
        match = self._call(self._store.match, [record.ref.key for record in records])
        assert list(match.refs) == [record.ref for record in records[: len(match.refs)]]
        for ref in match.refs:
            assert ref in self._known, "matched what was never saved, or was forgotten"
            assert self._dead_at[ref] > now, "matched what is dead"
        self._note_losses()
        sure = 0
        while sure < len(records) and self._sure_until.get(records[sure].ref, 0.0) > now:
            sure += 1
        assert self._lossy or len(match.refs) >= sure, "missed what must be there"
        delivered = self._call(load, self._store, list(match.refs))
        assert delivered == [content(ref) for ref in match.refs[: len(delivered)]]
        self._note_losses()
        assert self._lossy or len(delivered) == len(match.refs)
        for ref in match.refs:
            self._dead_at[ref] = now + TTL_S

    @rule(chain_=known_or_new, turns=st.integers(0, 6))
    def load_cancelled(self, chain_: Chain, turns: int) -> None:
        async def call() -> None:
            async with create_task_group() as tasks:
                scope = CancelScope()
                tasks.start_soon(load, self._store, [record.ref for record in _records(chain_, "block")])
                with scope:
                    for _ in range(turns):
                        await checkpoint()
                tasks.cancel_scope.cancel()

        self._portal.call(call)
        for record in _records(chain_, "block"):
            if record.ref in self._dead_at and self._dead_at[record.ref] > self._clock.wall():
                self._dead_at[record.ref] = self._clock.wall() + TTL_S

    @rule(which=st.builds(NamespaceFilter, tenant=st.sampled_from(["", "a", "b"]), model=st.sampled_from(["", "x"])))
    def forget(self, which: NamespaceFilter) -> None:
        self._call(self._store.forget, which)
        for ref, record in list(self._known.items()):
            if which.tenant in ("", record.tenant) and which.model in ("", record.model):
                del self._known[ref], self._dead_at[ref], self._sure_until[ref]

    @rule(seconds=st.sampled_from([1.0, 300.0, 3_600.0]))
    def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    @rule(chain_=known_or_new, seconds=st.sampled_from([300.0, 900.0, 1_100.0]))
    def save_and_come_back_later(self, chain_: Chain, seconds: float) -> None:
        self.save(chain_, False)
        self.pass_time(seconds)
        self.match_and_load(chain_)

    @rule()
    def restart(self) -> None:
        self._note_losses()
        now = self._clock.wall()
        lasting = sum(until > now for until in self._sure_until.values())
        self._stack.close()
        self._enter()
        if not self._persistent:
            self._known.clear()
            self._dead_at.clear()
            self._sure_until.clear()
            self._lossy = self._always_lossy
        elif not self._lossy:
            assert self._store.stats().records >= lasting, "lost by a restart"

    @invariant()
    def accounts_are_right(self) -> None:
        stats = self._store.stats()
        assert not stats.capacity_nbytes or stats.nbytes <= stats.capacity_nbytes
        assert 0 <= stats.records <= len(self._known)
        assert stats.nbytes > 0 or stats.records == 0


def _records(chain_: Chain, kind: Any) -> list[KVRecord]:
    tokens, tenant, model = chain_
    return chain(*tokens, tenant=tenant, model=model, kind=kind, nbytes=500, retention=Retention(ttl_s=TTL_S))
