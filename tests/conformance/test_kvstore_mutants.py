"""Stores that break one law each: the kit must catch every one, or a law cannot fail."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import Forgotten, KVRecord, KVStats, Loaded, Match, NamespaceFilter, RecordRef, Retention
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.kvstores import MemoryStore, SsdStore
from deepinfra.kvstores.ssd.format import Erased
from deepinfra.testing.kvstore import KVStoreConformance
from deepinfra.testing.kvstore_machine import run_kvstore_machine


class AnyRecordWillDo(MemoryStore):
    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        held = [record for record in self._held.values() if refs and len(record.data) == refs[0].nbytes]
        for buffer in into:
            buffer[:] = held[0].data
        return Loaded(count=len(refs))


class KeepsTheCallersMemory(MemoryStore):
    async def save(self, records: Sequence[KVRecord]) -> None:
        await super().save(records)
        for record in records:
            if (held := self._held.get(record.ref.key)) is not None:
                held.data = record.data  # type: ignore[assignment]


class Overwrites(MemoryStore):
    async def save(self, records: Sequence[KVRecord]) -> None:
        await super().save(records)
        for record in records:
            if (held := self._held.get(record.ref.key)) is not None:
                held.data = bytes(record.data)


class CountsGaps(SsdStore):
    async def match(self, keys: Sequence[BlockKey]) -> Match:
        matches = [await super(CountsGaps, self).match([key]) for key in keys]
        refs = tuple(ref for match in matches for ref in match.refs)
        missed = "" if len(refs) == len(keys) else "absent"
        snapshots = tuple(i for i, match in enumerate(matches) if match.snapshots)
        return Match(
            refs=refs, tiers=tuple(t for match in matches for t in match.tiers), snapshots=snapshots, missed=missed
        )


class LoadsPastGaps(SsdStore):
    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        counts = [(await super(LoadsPastGaps, self).load([r], [b])).count for r, b in zip(refs, into, strict=True)]
        return Loaded(count=sum(counts), stopped="" if all(counts) else "absent")


class ClaimsOneMore(MemoryStore):
    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        count = min(len(refs), (await super().load(refs, into)).count + 1)
        return Loaded(count=count, stopped="" if count == len(refs) else "absent")


class MixesKinds(MemoryStore):
    async def save(self, records: Sequence[KVRecord]) -> None:
        await super().save([replace(r, ref=r.ref._replace(kind="block")) for r in records])


class IgnoresSizes(MemoryStore):
    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        for i, (ref, buffer) in enumerate(zip(refs, into, strict=True)):
            held = self._held.get(ref.key if ref.kind == "block" else ref.key + ref.kind.encode())
            if held is None:
                return Loaded(count=i, stopped="absent")
            buffer[: len(held.data)] = held.data[: len(buffer)]
        return Loaded(count=len(refs))


class ReadsOnePageOnly(MemoryStore):
    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        loaded = await super().load(refs, into)
        for buffer in into:
            buffer[4096:] = bytes(max(0, len(buffer) - 4096))
        return loaded


class HasNoCap(MemoryStore):
    def _make_room(self, tenant: str, nbytes: int) -> bool:
        return True


class NeverEvicts(MemoryStore):
    def _make_room(self, tenant: str, nbytes: int) -> bool:
        return self._nbytes + nbytes <= self.capacity_nbytes


class KeepsWhatIsNotToBeKept(MemoryStore):
    async def save(self, records: Sequence[KVRecord]) -> None:
        await super().save([replace(record, retention=Retention()) for record in records])


class WritesWhatIsForRamOnly(SsdStore):
    async def save(self, records: Sequence[KVRecord]) -> None:
        await super().save([replace(r, retention=replace(r.retention, disk=True)) for r in records])


class NeverExpires(MemoryStore):
    async def save(self, records: Sequence[KVRecord]) -> None:
        lasting = [replace(r, retention=replace(r.retention, ttl_s=1e9)) for r in records]
        await super().save([r for r in lasting if r.retention.traffic != "none"])


class DiesEarly(MemoryStore):
    async def save(self, records: Sequence[KVRecord]) -> None:
        short = [replace(r, retention=replace(r.retention, ttl_s=50.0)) for r in records]
        await super().save([r for r in short if r.retention.traffic != "none"])


class ForgetsTooLittle(MemoryStore):
    async def forget(self, which: NamespaceFilter) -> Forgotten:
        return await super().forget(which) if which.tenant else Forgotten(records=0, nbytes=0)


class BansWhatItForgot(MemoryStore):
    async def forget(self, which: NamespaceFilter) -> Forgotten:
        self.banned = set(self._held)
        return await super().forget(which)

    async def save(self, records: Sequence[KVRecord]) -> None:
        await super().save([r for r in records if r.ref.key not in getattr(self, "banned", ())])


class ForgetsTooMuch(MemoryStore):
    async def forget(self, which: NamespaceFilter) -> Forgotten:
        return await super().forget(NamespaceFilter(tenant=which.tenant))


class ForgetsAllOfATenant(MemoryStore):
    async def forget(self, which: NamespaceFilter) -> Forgotten:
        return await super().forget(replace(which, namespace=b""))


class HidesRatherThanForgets(SsdStore):
    async def forget(self, which: NamespaceFilter) -> Forgotten:
        await self._writer.end()
        gone = self._follower.erase(Erased.of(which)).values()
        return Forgotten(records=sum(records for records, _ in gone), nbytes=sum(nbytes for _, nbytes in gone))


class ForgetsAtRestart(MemoryStore):
    pass


class LivesForEverOnDisk(SsdStore):
    async def save(self, records: Sequence[KVRecord]) -> None:
        await super().save([replace(r, retention=replace(r.retention, ttl_s=1e9)) for r in records])


class LiesInItsAccounts(MemoryStore):
    def stats(self) -> KVStats:
        return replace(super().stats(), records=self._saved)


class RaisesOnAMiss(MemoryStore):
    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        for ref in refs:
            if ref.key not in self._held:
                raise KeyError(ref.key)
        return await super().load(refs, into)


class LetsGoOfARead(MemoryStore):
    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        def read() -> None:
            for ref, buffer in zip(refs, into, strict=True):
                buffer[:] = self._held[ref.key].data

        await self.offload(read)
        return Loaded(count=len(refs))


class LeaksFilesWhenCancelled(MemoryStore):
    async def match(self, keys: Sequence[BlockKey]) -> Match:
        file = open("/dev/null")  # noqa: SIM115
        files.append(file)
        match = await super().match(keys)
        file.close()
        return match


class MixesUpConcurrentLoads(MemoryStore):
    async def load(self, refs: Sequence[RecordRef], into: Sequence[memoryview]) -> Loaded:
        self._latest = list(refs)
        await anyio.lowlevel.checkpoint()
        return await super().load((self._latest * 20)[: len(refs)], into)


class CannotBeEnteredAgain(MemoryStore):
    entered = False

    async def save(self, records: Sequence[KVRecord]) -> None:
        if not self.entered:
            await super().save(records)
        self.entered = True


class TouchRaises(MemoryStore):
    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        for key in keys:
            self._held[key].rank = 1
        return ()


class TouchReturnsNothing(MemoryStore):
    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> None:  # type: ignore[override]
        await super().touch(keys, retention)


class WantsTailsFirst(MemoryStore):
    async def touch(self, keys: Sequence[BlockKey], retention: Retention) -> Sequence[BlockKey]:
        return keys[::-1]


files: list[object] = []

SMALL = KVStoreConformance.capacity_nbytes

MUTANTS: list[tuple[type[KVStore], str]] = [
    (AnyRecordWillDo, "test_what_was_saved_is_matched_and_loaded"),
    (AnyRecordWillDo, "test_what_was_not_saved_is_a_miss"),
    (KeepsTheCallersMemory, "test_data_may_be_reused_when_save_returns"),
    (Overwrites, "test_a_record_already_held_is_not_replaced"),
    (CountsGaps, "test_a_match_ends_before_the_first_gap"),
    (LoadsPastGaps, "test_a_load_stops_before_what_is_missing"),
    (ClaimsOneMore, "test_what_was_not_saved_is_a_miss"),
    (AnyRecordWillDo, "test_any_slice_of_a_match_can_be_loaded"),
    (ReadsOnePageOnly, "test_records_of_many_sizes_come_back"),
    (MixesKinds, "test_kinds_do_not_mix"),
    (IgnoresSizes, "test_a_ref_of_another_size_is_a_miss"),
    (HasNoCap, "test_the_cap_holds_and_the_newest_is_held"),
    (NeverEvicts, "test_the_cap_holds_and_the_newest_is_held"),
    (HasNoCap, "test_a_record_larger_than_the_store_is_dropped_and_harms_nothing"),
    (KeepsWhatIsNotToBeKept, "test_retention_none_is_never_kept"),
    (WritesWhatIsForRamOnly, "test_without_disk_a_record_stays_in_ram"),
    (NeverExpires, "test_a_record_dies_when_its_life_is_over"),
    (DiesEarly, "test_a_record_dies_when_its_life_is_over"),
    (TouchRaises, "test_touching_hurts_nothing"),
    (TouchReturnsNothing, "test_touching_hurts_nothing"),
    (WantsTailsFirst, "test_touching_hurts_nothing"),
    (ForgetsAllOfATenant, "test_a_namespace_is_forgotten_and_no_other_of_its_tenant"),
    (BansWhatItForgot, "test_what_was_forgotten_can_be_saved_again"),
    (MixesUpConcurrentLoads, "test_concurrent_calls_give_everybody_the_right_bytes"),
    (LeaksFilesWhenCancelled, "test_cancelled_calls_leak_nothing"),
    (LetsGoOfARead, "test_a_cancelled_load_writes_nothing_after_it_returned"),
    (CannotBeEnteredAgain, "test_a_store_can_be_entered_again"),
    (ForgetsAtRestart, "test_what_was_saved_survives_reopening_iff_persistent"),
    (LivesForEverOnDisk, "test_lives_go_on_while_the_store_is_closed"),
    (RaisesOnAMiss, "test_a_load_stops_before_what_is_missing"),
]
"""A mutant, and the law that it must break."""

HISTORIES: list[type[KVStore]] = [
    AnyRecordWillDo,
    NeverExpires,
    DiesEarly,
    ForgetsTooLittle,
    ForgetsAtRestart,
    HidesRatherThanForgets,
    LiesInItsAccounts,
    RaisesOnAMiss,
]
"""Mutants that the state machine must find by itself."""


def kit(mutant: type[KVStore]) -> KVStoreConformance:
    class Kit(KVStoreConformance):
        persistent = issubclass(mutant, SsdStore) or mutant is ForgetsAtRestart

        def make(self, tmp_path: Path) -> KVStore:
            if issubclass(mutant, SsdStore):
                return mutant(tmp_path / "kv", capacity_nbytes=SMALL, min_free_nbytes=0, fsync="none")
            return mutant(capacity_nbytes=SMALL)  # type: ignore[call-arg]

    return Kit()


@pytest.mark.parametrize(
    ("mutant", "law"), MUTANTS, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_a_broken_store_breaks_its_law(mutant: type[KVStore], law: str, tmp_path: Path) -> None:
    check: Callable[[Path], Awaitable[None]] = getattr(kit(mutant), law)
    with pytest.raises((AssertionError, KeyError, ValueError, ExceptionGroup)):
        anyio.run(check, tmp_path)
    while files:
        files.pop().close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("which", [NamespaceFilter(model="x"), NamespaceFilter(tenant="a", model="x")])
@pytest.mark.parametrize("mutant", [ForgetsTooLittle, ForgetsTooMuch, HidesRatherThanForgets])
def test_a_store_that_forgets_wrongly_is_caught(mutant: type[KVStore], which: NamespaceFilter, tmp_path: Path) -> None:
    if mutant is ForgetsTooLittle and which.tenant:
        which = NamespaceFilter()
    with pytest.raises(AssertionError):
        anyio.run(kit(mutant).test_forgotten_records_are_gone_and_others_are_not, tmp_path, which)


@pytest.mark.parametrize("mutant", HISTORIES, ids=lambda mutant: mutant.__name__)
def test_the_state_machine_finds_a_broken_store(mutant: type[KVStore], tmp_path: Path) -> None:
    broken = kit(mutant)
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        run_kvstore_machine(broken.make, tmp_path, persistent=broken.persistent, examples=200, shrink=False)


def test_every_law_has_a_mutant() -> None:
    laws = {name for name, _ in inspect.getmembers(KVStoreConformance) if name.startswith("test_")}
    caught = {law for _, law in MUTANTS}
    elsewhere = {"test_any_history_keeps_the_laws", "test_forgotten_records_are_gone_and_others_are_not"}
    assert laws == caught | elsewhere
