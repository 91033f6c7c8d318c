from deepinfra.core.experts import Topology
from deepinfra.placers import StaticPlacer
from deepinfra.testing.placer import random_load


def test_experts_are_in_order_and_begin_again_in_spare_slots():
    placed = StaticPlacer().place(random_load(0, steps=1, layers=2, experts=6), Topology(4, 2), None)
    assert placed.experts == ((0, 1, 2, 3, 4, 5, 0, 1),) * 2


def test_the_load_changes_nothing():
    topology = Topology(4, 2)
    first = StaticPlacer().place(random_load(0, steps=1, layers=1, experts=6), topology, None)
    assert StaticPlacer().place(random_load(9, steps=3, layers=1, experts=6), topology, first) == first
