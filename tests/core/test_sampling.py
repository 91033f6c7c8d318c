import statistics

from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.sampling import Purpose, uniform

SEEDS = st.integers(-(2**70), 2**70)


@given(seed=SEEDS, choice=st.integers(0, 10**6), position=st.integers(0, 2**31), purpose=st.sampled_from(Purpose))
def test_draws_are_in_the_half_open_unit_interval(seed: int, choice: int, position: int, purpose: Purpose):
    assert 0.0 <= uniform(seed, choice, position, purpose) < 1.0


def test_draws_are_what_they_were():
    """Recorded answers promise replay: these numbers never change."""
    assert uniform(0, 0, 0, Purpose.SAMPLE) == uniform(2**64, 0, 0, Purpose.SAMPLE)
    found = [uniform(42, choice, position, Purpose.SAMPLE) for choice, position in ((0, 0), (0, 1), (1, 0))]
    assert found == [0.3869742762400409, 0.024385666325350996, 0.577125795355946]


def test_every_argument_gives_another_stream():
    base = [uniform(7, 0, position, Purpose.SAMPLE) for position in range(100)]
    for other in (
        [uniform(8, 0, position, Purpose.SAMPLE) for position in range(100)],
        [uniform(7, 1, position, Purpose.SAMPLE) for position in range(100)],
        [uniform(7, 0, position, Purpose.ACCEPT) for position in range(100)],
        [uniform(7, 0, position + 1, Purpose.SAMPLE) for position in range(100)],
    ):
        assert not set(base[:50]) & {a for a, b in zip(other, base, strict=True) if a == b}
        correlation = statistics.correlation(base, other)
        assert abs(correlation) < 0.4


def test_no_two_of_many_draws_are_equal():
    draws = {
        uniform(seed, choice, position, purpose)
        for seed in range(10)
        for choice in range(4)
        for position in range(250)
        for purpose in Purpose
    }
    assert len(draws) == 10 * 4 * 250 * 3


def test_draws_are_evenly_spread():
    draws = [uniform(1, 0, position, Purpose.SAMPLE) for position in range(20_000)]
    cells = [0] * 20
    for draw in draws:
        cells[int(draw * 20)] += 1
    chi_squared = sum((cell - 1000) ** 2 / 1000 for cell in cells)
    assert chi_squared < 44  # 19 degrees of freedom, p = 0.001
    assert abs(statistics.correlation(draws[:-1], draws[1:])) < 0.03
