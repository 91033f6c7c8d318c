"""What is kept, for whom, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.api.responses.content import InputText
from deepinfra.api.responses.items import InputMessage
from deepinfra.api.responses.store import ResponseStore, Turn
from deepinfra.errors import NotStoredError
from deepinfra.testing.clock import ManualClock


def turn(name: str, before: Turn | None = None, nbytes: int = 100) -> Turn:
    message = InputMessage(role="user", content=[InputText(type="input_text", text=name)])
    return Turn(before, [(f"msg_{name}", message)], asked=1, nbytes=nbytes)


def texts(found: Turn) -> list[str]:
    return [name for name, _ in found.context()]


def missing(call: Callable[..., object], *args: str) -> str:
    with pytest.raises(NotStoredError) as caught:
        call(*args)
    return str(caught.value)


def test_a_response_belongs_to_its_tenant(store: ResponseStore) -> None:
    store.put("ann", "resp_1", b"{}", turn("a"))
    assert store.body("ann", "resp_1") == b"{}"
    assert missing(store.body, "bob", "resp_1") == "Response with id 'resp_1' not found."
    unknown = missing(store.body, "bob", "resp_2")
    assert missing(store.body, "bob", "resp_1").replace("resp_1", "resp_2") == unknown
    missing(store.turn, "bob", "resp_1")
    missing(store.item, "bob", "msg_a", "input.0.id")
    missing(store.delete, "bob", "resp_1")
    assert store.body("ann", "resp_1") == b"{}"


def test_a_chain_is_its_turns_in_order(store: ResponseStore) -> None:
    first = turn("a")
    store.put("ann", "resp_1", b"{}", first)
    store.put("ann", "resp_2", b"{}", turn("b", first))
    assert texts(store.turn("ann", "resp_2")) == ["msg_a", "msg_b"]
    assert texts(store.turn("ann", "resp_1")) == ["msg_a"]


def test_a_chain_may_be_as_long_as_it_likes(clock: ManualClock) -> None:
    store, before, long = ResponseStore(clock, max_responses=3), None, 20_000
    for number in range(long):
        before = turn(str(number), before)
        store.put("ann", f"resp_{number}", b"{}", before)
    assert len(texts(store.turn("ann", f"resp_{long - 1}"))) == long
    assert store.nbytes == 3 * 2 + 100 * long
    del before
    for number in range(long - 3, long):
        store.delete("ann", f"resp_{number}")
    assert store.nbytes == 0


def test_deleting_a_parent_leaves_its_children_whole(store: ResponseStore) -> None:
    first = turn("a")
    store.put("ann", "resp_1", b"{}", first)
    store.put("ann", "resp_2", b"{}", turn("b", first))
    store.delete("ann", "resp_1")
    missing(store.body, "ann", "resp_1")
    assert texts(store.turn("ann", "resp_2")) == ["msg_a", "msg_b"]
    assert store.item("ann", "msg_a", "input.0.id")
    store.delete("ann", "resp_2")
    missing(store.item, "ann", "msg_a", "input.0.id")
    assert store.nbytes == 0


def test_a_parent_that_is_gone_before_its_child_is_kept_comes_back_with_it(store: ResponseStore) -> None:
    first = turn("a")
    store.put("ann", "resp_1", b"{}", first)
    store.delete("ann", "resp_1")  # while the child's answer is written
    store.put("ann", "resp_2", b"{}", turn("b", first))
    assert store.nbytes == 2 + 200
    assert store.item("ann", "msg_a", "input.0.id")


def test_the_least_recently_used_of_too_many_goes(clock: ManualClock) -> None:
    store = ResponseStore(clock, max_responses=2)
    store.put("ann", "resp_1", b"{}", turn("a"))
    store.put("ann", "resp_2", b"{}", turn("b"))
    store.body("ann", "resp_1")
    store.put("ann", "resp_3", b"{}", turn("c"))
    assert len(store) == 2
    missing(store.body, "ann", "resp_2")
    store.body("ann", "resp_1")


def test_bytes_are_limited_too(clock: ManualClock) -> None:
    store = ResponseStore(clock, max_nbytes=1000)
    for number in range(20):
        store.put("ann", f"resp_{number}", b"x" * 50, turn(str(number)))
        assert store.nbytes <= 1000
    assert len(store) == 6
    store.put("ann", "huge", b"x" * 2000, turn("huge"))
    assert store.nbytes == len(store) == 0


def test_what_nobody_uses_goes_after_a_while(clock: ManualClock) -> None:
    store = ResponseStore(clock, ttl_s=60)
    store.put("ann", "resp_1", b"{}", turn("a"))
    store.put("ann", "resp_2", b"{}", turn("b"))
    clock.advance(50)
    store.body("ann", "resp_1")
    clock.advance(50)
    missing(store.body, "ann", "resp_2")
    store.body("ann", "resp_1")
    clock.advance(61)
    missing(store.item, "ann", "msg_a", "input.0.id")
    assert store.nbytes == len(store) == 0


def test_one_id_in_two_responses_is_found_while_either_is_kept(store: ResponseStore) -> None:
    store.put("ann", "resp_1", b"{}", turn("a"))
    store.put("ann", "resp_2", b"{}", turn("a"))
    store.delete("ann", "resp_2")
    assert store.item("ann", "msg_a", "input.0.id")
    store.delete("ann", "resp_1")
    missing(store.item, "ann", "msg_a", "input.0.id")


def test_a_tenant_that_keeps_much_pushes_out_its_own(clock: ManualClock) -> None:
    store = ResponseStore(clock, max_responses=4)
    store.put("ann", "resp_ann", b"{}", turn("a"))
    for number in range(20):
        store.put("bob", f"resp_{number}", b"{}", turn(str(number)))
    assert store.body("ann", "resp_ann")
    assert [name for name in (f"resp_{number}" for number in range(20)) if name in store] == [
        "resp_17",
        "resp_18",
        "resp_19",
    ]
    store.put("ann", "resp_two", b"{}", turn("b"))  # two of each: nobody is above a half
    assert [name in store for name in ("resp_ann", "resp_two", "resp_17")] == [True, True, False]


def test_a_tenant_that_keeps_large_things_pushes_out_its_own(clock: ManualClock) -> None:
    store = ResponseStore(clock, max_nbytes=1000)
    store.put("ann", "resp_ann", b"x" * 200, turn("a"))
    for number in range(9):
        store.put("bob", f"resp_{number}", b"x" * 300, turn(str(number)))
        assert store.nbytes <= 1000
    store.put("bob", "huge", b"x" * 2000, turn("huge"))
    assert (store.nbytes, len(store)) == (300, 1)
    assert store.body("ann", "resp_ann")


OPERATIONS = st.tuples(
    st.sampled_from(["put", "chain", "read", "delete", "wait"]), st.integers(0, 9), st.sampled_from(["ann", "bob"])
)


@given(st.lists(OPERATIONS, max_size=60))
def test_bytes_are_those_of_what_can_be_reached(operations: list[tuple[str, int, str]]) -> None:
    clock = ManualClock()
    store, made, count = ResponseStore(clock, max_responses=6, max_nbytes=1500, ttl_s=30), dict[str, Turn](), 0
    for what, number, tenant in operations:
        try:
            match what:
                case "put" | "chain":
                    before = store.turn(tenant, _latest(made, number, tenant)) if what == "chain" else None
                    count += 1
                    name = f"{tenant}_{count % 10}_{count}"
                    made[name] = turn(str(count), before)
                    other = "bob" if tenant == "ann" else "ann"
                    missing(store.body, other, "none")  # what is too old goes
                    others, share = _kept(store, made, other), _nbytes(store, made, other)
                    store.put(tenant, name, b"x" * 50, made[name])
                    if len(others) <= 3 and share <= 750:  # who holds no more than half loses nothing
                        assert others == _kept(store, made, other)
                case "read":
                    store.body(tenant, _latest(made, number, tenant))
                case "delete":
                    store.delete(tenant, _latest(made, number, tenant))
                case "wait":
                    clock.advance(number)
        except NotStoredError:
            pass
        both = [_kept(store, made, each) for each in ("ann", "bob")]
        assert store.nbytes == sum(_nbytes(store, made, each) for each in ("ann", "bob")) <= 1500
        assert len(store) == sum(map(len, both)) <= 6


def _kept(store: ResponseStore, made: dict[str, Turn], tenant: str) -> list[str]:
    return [name for name in made if name in store and name.startswith(tenant)]


def _nbytes(store: ResponseStore, made: dict[str, Turn], tenant: str) -> int:
    names = _kept(store, made, tenant)
    reached = {id(each): each for name in names for each in _chain(made[name])}
    return 50 * len(names) + sum(each.nbytes for each in reached.values())


def _latest(made: dict[str, Turn], number: int, tenant: str) -> str:
    return next((name for name in reversed(made) if name.startswith(f"{tenant}_{number}_")), "none")


def _chain(turn: Turn) -> list[Turn]:
    found = [turn]
    while (before := found[-1].before) is not None:
        found.append(before)
    return found
