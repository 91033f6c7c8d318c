import math
import statistics
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.sampling import Purpose, stream_key, token_uniform, uniform

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


def test_a_token_s_number_is_what_it_was():
    """Recorded answers promise replay: these numbers never change."""
    key = stream_key(42, 0, 1, Purpose.SAMPLE)
    assert key == 0x063E23975BCA03DE
    assert [token_uniform(key, token) for token in (0, 1, 49_151, 2**31)] == [
        0.3028661854145588,
        0.7200428303183365,
        0.6599192466119165,
        0.36591063533631474,
    ]


def test_a_key_is_the_draw_s_number():
    assert uniform(42, 0, 1, Purpose.SAMPLE) == (stream_key(42, 0, 1, Purpose.SAMPLE) >> 11) * 2.0**-53


def test_tokens_numbers_are_those_of_splitmix64():
    """Its first outputs for the state 1234567, as published with the reference implementation."""
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
    assert [token_uniform(1234567, n) for n in range(4)] == [((x >> 12) + 0.5) * 2.0**-52 for x in published]


@given(key=st.integers(0, 2**64 - 1), token=st.integers(0, 2**31))
def test_a_token_s_number_is_strictly_inside_the_unit_interval(key: int, token: int):
    assert 0.0 < token_uniform(key, token) < 1.0


def test_no_bits_give_a_number_of_zero_or_one():
    least, most = _key_of(0), _key_of(2**64 - 1)
    assert token_uniform(least, 0) == 2.0**-53
    assert token_uniform(most, 0) == 1 - 2.0**-53


def _key_of(bits: int) -> int:
    """The key whose token 0 has these bits: SplitMix64 backwards."""
    mask = 2**64 - 1
    z = _unshift(bits, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
    z = _unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return (_unshift(z, 30) - 0x9E3779B97F4A7C15) & mask


def _unshift(z: int, by: int) -> int:
    return z ^ (z >> by) ^ (z >> 2 * by)


def test_tokens_numbers_are_evenly_spread_alone_and_in_pairs():
    """Neighbours by token and by position, 20 and 10 by 10 cells; bounds are p = 0.0001."""
    keys = [stream_key(3, 0, position, Purpose.SAMPLE) for position in range(200)]
    table = [[token_uniform(key, token) for token in range(200)] for key in keys]
    flat = [number for line in table for number in line]
    assert chi_squared([int(number * 20) for number in flat], 20) < 52.2
    assert (
        chi_squared([int(-math.log(number) < 1e-2) for number in flat], 2, [math.exp(-1e-2), 1 - math.exp(-1e-2)])
        < 15.2
    )
    for pairs in (
        [(a, b) for line in table for a, b in pairwise(line)],
        [(a, b) for one, two in pairwise(table) for a, b in zip(one, two, strict=True)],
    ):
        assert chi_squared([int(a * 10) * 10 + int(b * 10) for a, b in pairs], 100) < 160.1


def chi_squared(cells: list[int], count: int, shares: list[float] | None = None) -> float:
    found = [cells.count(cell) for cell in range(count)]
    expected = [len(cells) * share for share in shares or [1 / count] * count]
    return sum((a - b) ** 2 / b for a, b in zip(found, expected, strict=True))
