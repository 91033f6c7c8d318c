import pytest

from deepinfra.core.buckets import DEFAULT_EDGES, bucket_of


@pytest.mark.parametrize(
    ("uncached", "bucket"), [(1, 0), (511, 0), (512, 1), (4095, 1), (4096, 2), (32767, 2), (32768, 3), (10**7, 3)]
)
def test_an_edge_belongs_to_the_bucket_that_it_begins(uncached: int, bucket: int):
    assert bucket_of(uncached) == bucket


def test_there_are_four_buckets():
    assert len(DEFAULT_EDGES) + 1 == 4


def test_without_edges_there_is_one_bucket():
    assert bucket_of(10**9, ()) == 0
