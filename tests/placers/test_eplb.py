import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.experts import ExpertLoad, Placement, Topology
from deepinfra.placers import Eplb
from deepinfra.placers.eplb import keep_slots, peak, replicate, spread
from deepinfra.testing.placer import peak_tokens, random_load


def tokens_of(load: ExpertLoad) -> np.ndarray:
    return np.array(load.tokens, dtype=np.float64).transpose(1, 0, 2)


def test_the_expert_that_makes_the_peaks_is_copied():
    # Expert 1 has the larger sum, but expert 0 makes every step's peak in turn with 2.
    tokens = np.array([[[90.0, 50.0, 0.0], [0.0, 50.0, 90.0]]])
    assert replicate(tokens, Topology(5, 1)).tolist() == [[2, 1, 2]]


def test_no_expert_has_more_copies_than_there_are_devices():
    tokens = np.array([[[1000.0, 1.0, 1.0, 1.0]]])
    assert replicate(tokens, Topology(2, 4)).max() == 2


def test_with_more_slots_than_copies_apart_every_slot_is_filled():
    tokens = np.array([[[5.0, 1.0]]])
    counts = replicate(tokens, Topology(2, 4))
    assert counts.sum() == 8
    assert counts.min() >= 2


@given(seed=st.integers(0, 999), experts=st.integers(2, 20), devices=st.integers(1, 6), more=st.integers(0, 3))
def test_copies_fill_all_slots(seed: int, experts: int, devices: int, more: int):
    topology = Topology(devices, -(-experts // devices) + more)
    counts = replicate(tokens_of(random_load(seed, steps=3, layers=2, experts=experts)), topology)
    assert (counts >= 1).all()
    assert (counts.sum(axis=1) == topology.slots).all()


def test_experts_that_are_hot_in_the_same_steps_are_put_apart():
    # Sums are all equal: only the steps tell that 0 and 1 collide, and so do 2 and 3.
    tokens = np.array([[10.0, 10.0, 0.0, 0.0], [0.0, 0.0, 10.0, 10.0]])
    held = spread(tokens, np.array([1, 1, 1, 1]), Topology(2, 2))
    assert all(not {0, 1} <= set(device) and not {2, 3} <= set(device) for device in held)


def test_copies_are_apart_even_when_the_greedy_order_runs_into_a_corner():
    for seed in range(200):
        load = random_load(seed, steps=2, layers=1, experts=5, skew=2.0)
        topology = Topology(3, 3)
        tokens = tokens_of(load)
        held = spread(tokens[0], replicate(tokens, topology)[0], topology)
        assert all(len(set(device)) == 3 for device in held)


def test_experts_that_stay_keep_their_slots():
    assert keep_slots([[3, 1], [2, 0]], (1, 0, 2, 3), Topology(2, 2)) == (1, 3, 2, 0)


def test_an_equal_load_moves_nothing():
    load = random_load(1, steps=5, layers=2, experts=12)
    topology = Topology(4, 4)
    first = Eplb().place(load, topology, None)
    assert Eplb().place(load, topology, first) == first


def test_only_the_window_counts():
    old = random_load(1, steps=5, layers=1, experts=8)
    new = random_load(2, steps=5, layers=1, experts=8)
    both = ExpertLoad(old.tokens + new.tokens)
    topology = Topology(4, 3)
    assert Eplb(window=5).place(both, topology, None) == Eplb().place(new, topology, None)


def test_a_current_placement_of_another_shape_is_not_used():
    load = random_load(1, steps=2, layers=1, experts=8)
    topology = Topology(4, 3)
    stale = Placement(((0, 1, 2),))
    assert Eplb().place(load, topology, stale) == Eplb().place(load, topology, None)


def test_peak_agrees_with_the_kits_own_count():
    load = random_load(3, steps=4, layers=1, experts=9)
    topology = Topology(4, 3)
    placed = Eplb().place(load, topology, None)
    assert peak(tokens_of(load)[0], placed.experts[0], topology) == pytest.approx(peak_tokens(load, placed, topology))


def test_a_skewed_load_comes_near_the_ideal():
    load = random_load(4, steps=20, layers=2, experts=64)
    topology = Topology(8, 9)
    ideal = sum(sum(layer) for step in load.tokens for layer in step) / 8
    assert peak_tokens(load, Eplb().place(load, topology, None), topology) < 1.25 * ideal
    plain = Placement((tuple(slot % 64 for slot in range(72)),) * 2)
    assert peak_tokens(load, plain, topology) > 1.5 * ideal


def test_a_load_without_steps_is_refused():
    with pytest.raises(ValueError, match="no steps"):
        Eplb().place(ExpertLoad(()), Topology(2, 2), None)
