from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.experts import ExpertLoad, Placement, Topology


def test_the_shape_of_a_load_is_steps_layers_experts():
    assert ExpertLoad((((1, 2, 3), (4, 5, 6)),)).shape == (1, 2, 3)
    assert ExpertLoad(()).shape == (0, 0, 0)


def test_slots_count_all_devices():
    assert Topology(devices=3, slots_per_device=5).slots == 15


@given(layer=st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_replicas_are_the_inverse_of_a_placement(layer: list[int]):
    replicas = Placement((tuple(layer),)).replicas(0, 6)
    assert len(replicas) == 6
    for expert, slots in enumerate(replicas):
        assert list(slots) == [slot for slot, held in enumerate(layer) if held == expert]
