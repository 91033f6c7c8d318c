"""The index against a dictionary, and how many bytes it takes."""

from __future__ import annotations

import hashlib
import random
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfra.core.kv import NamespaceFilter
from deepinfra.kvstores.ssd import places as places_module
from deepinfra.kvstores.ssd.format import PREFIX_NBYTES, Entry, Erased, Owner, snapshot_id
from deepinfra.kvstores.ssd.index import Index
from deepinfra.kvstores.ssd.places import Places
from deepinfra.kvstores.ssd.segment import Segment

NOW = 1_000.0


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def entry(id_: bytes, *, owner: int = 0, offset: int = 0, expires: float = 2_000.0) -> Entry:
    kind = 1 if len(id_) == 32 else 2
    return Entry(id_[:PREFIX_NBYTES], offset, NOW, expires, 1_000.0, 256, 200, owner << 2 | kind)


def segment(serial: int, numbers: range, *, owner: str = "a") -> Segment:
    made = Segment("agent", 0, serial)
    number = made.owner(Owner(bytes(32), owner, "m"))
    for i in numbers:
        made.add(entry(key(i), owner=number, offset=i))
    return made


# -- places ---------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.sampled_from(["put", "pop", "wrong pop", "get"]), st.integers(0, 60)), max_size=300)


@given(steps, st.booleans())
@settings(max_examples=200, deadline=None)
def test_places_are_a_dictionary(steps: list[tuple[str, int]], loaded: bool) -> None:
    spread = (1 << 64) // 61
    known = {i * spread: i for i in range(0, 60, 2)} if loaded else {}
    with_pages = places_module.PAGE
    places_module.PAGE = 4
    try:
        tried = Places()
        for part in (list(known)[:13], list(known)[13:]):
            tried.extend(np.array(part, np.uint64), np.array([known[at] for at in part], np.uint64))
        for i, (what, number) in enumerate(steps):
            at = number * spread
            if what == "put":
                assert tried.put(at, i) == known.get(at)
                known[at] = i
            elif what == "pop":
                place = known.pop(at, None)
                assert tried.pop(at, 0 if place is None else place) == place
            elif what == "wrong pop":
                assert tried.pop(at, 1 << 40) is None
            assert tried.get(at) == known.get(at)
        assert all(tried.get(number * spread) == known.get(number * spread) for number in range(61))
    finally:
        places_module.PAGE = with_pages


# -- index ----------------------------------------------------------------------------------------


def test_it_finds_what_was_adopted_and_what_was_inserted_and_nothing_else() -> None:
    index = Index()
    index.adopt([segment(1, range(300)), segment(2, range(300, 900))])
    third = Segment("agent", 0, index.next_serial())
    third.owner(Owner(bytes(32), "a", "m"))
    index.begin(third)
    for i in range(900, 1_200):
        index.insert(third, key(i), entry(key(i), offset=i))
    found = [index.seek(key(i), NOW) for i in range(1_500)]
    assert [place is not None for place in found] == [True] * 1_200 + [False] * 300
    assert all(place[1].offset == i for i, place in enumerate(found) if place is not None)
    assert (len(index), third.serial) == (1_200, 3)
    assert index.seek(snapshot_id(key(7)), NOW) is None


def test_of_rows_for_one_record_the_last_one_wins() -> None:
    index = Index()
    old, new = segment(1, range(100)), segment(2, range(50, 150))
    index.adopt([old, new])
    assert (len(index), old.live, new.live) == (150, 50, 100)
    assert [(index.seek(key(i), NOW) or (None,))[0] for i in range(150)] == [old] * 50 + [new] * 100
    assert sorted(old.live_rows()["offset"].tolist()) == list(range(50))


def test_keys_that_agree_in_62_bits_are_not_taken_for_each_other() -> None:
    index = Index()
    index.adopt([segment(1, range(10))])
    alike = key(3)[:8] + bytes(24)
    assert index.seek(alike, NOW) is None
    assert index.seek(key(3), NOW) is not None


def test_a_removed_segment_is_gone_at_once_and_says_why_before_and_after_it_is_purged() -> None:
    index = Index()
    big, other = segment(1, range(5_000)), segment(2, range(5_000, 5_010))
    index.adopt([big, other])
    index.remove(big, "evicted")
    numbers = random.Random(1).sample(range(5_000), 200)
    assert all(index.seek(key(i), NOW) is None and index.why(key(i)) == "evicted" for i in numbers)
    assert (len(index), index.evicted) == (10, 5_000)
    turns = 0
    while index.purge():
        turns += 1
    assert turns > 10
    assert all(index.why(key(i)) == "evicted" for i in numbers)
    assert index.seek(key(5_005), NOW) is not None


def test_what_was_saved_again_survives_the_purge_of_its_old_segment() -> None:
    index = Index()
    old = segment(1, range(1_000))
    index.adopt([old])
    index.remove(old, "expired")
    new = Segment("agent", 0, 2)
    index.begin(new)
    index.insert(new, key(999), entry(key(999)))
    while index.purge():
        pass
    assert index.seek(key(999), NOW) == (new, entry(key(999)))


def test_forgetting_takes_the_owners_rows_and_name() -> None:
    index = Index()
    shared = segment(1, range(10), owner="mine")
    others = shared.owner(Owner(bytes(32), "others", "m"))
    for i in range(10, 20):
        shared.add(entry(key(i), owner=others))
    index.adopt([shared])
    assert shared.forget(Erased.of(NamespaceFilter(tenant="mine"))) == (10, 10 * 256)
    assert [index.seek(key(i), NOW) is not None for i in range(20)] == [False] * 10 + [True] * 10
    assert [owner.tenant for owner in shared.owners] == ["mine", "others"], "until its bytes are overwritten"
    shared.settle(Erased.of(NamespaceFilter(tenant="mine")))
    assert [owner.tenant for owner in shared.owners] == ["", "others"]


def test_a_record_takes_less_than_100_bytes() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = Index()
        open_ = Segment("agent", 0, 1)
        index.begin(open_)
        for i in range(20_000):
            index.insert(open_, key(i), entry(key(i), offset=i))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 60 < grown / len(index) < 100
