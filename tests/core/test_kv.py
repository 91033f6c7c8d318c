from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.core.kv import (
    KVGroup,
    KVLayout,
    Namespace,
    PublicBlocks,
    block_keys,
    namespace_digest,
    parent_key,
    root_key,
)

BASE = Namespace(weights="w", recipe="r", kv_dtype="float32", layout="l", tenant="public")
ROOT = root_key(BASE)
TOKENS = st.lists(st.integers(0, 2**31), max_size=40)


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_every_field_of_a_namespace_changes_every_key(field: str):
    other = root_key(replace(BASE, **{field: "something else"}))
    tokens = list(range(12))
    assert not set(block_keys(ROOT, tokens, 4)) & set(block_keys(other, tokens, 4))


def test_fields_are_framed_so_that_joining_cannot_collide():
    one = replace(BASE, weights="ab", adapter="c")
    two = replace(BASE, weights="a", adapter="bc")
    assert namespace_digest(one) != namespace_digest(two)


@given(tokens=TOKENS, size=st.integers(1, 8))
def test_there_is_a_key_for_each_full_block(tokens: list[int], size: int):
    keys = block_keys(ROOT, tokens, size)
    assert len(keys) == len(tokens) // size
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


@given(tokens=TOKENS, more=TOKENS, size=st.integers(1, 8))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(tokens: list[int], more: list[int], size: int):
    keys = block_keys(ROOT, tokens, size)
    assert block_keys(ROOT, tokens + more, size)[: len(keys)] == keys


@given(tokens=TOKENS, size=st.integers(1, 8), known=st.integers(0, 40))
def test_known_keys_change_nothing_but_the_work(tokens: list[int], size: int, known: int):
    keys = block_keys(ROOT, tokens, size)
    assert block_keys(ROOT, tokens, size, known=keys[:known]) == keys


@given(tokens=st.lists(st.integers(0, 1000), min_size=4, max_size=24), place=st.integers(0, 23))
def test_one_other_token_changes_every_key_from_its_block_on(tokens: list[int], place: int):
    place %= len(tokens)
    other = list(tokens)
    other[place] += 1
    before, after = block_keys(ROOT, tokens, 2), block_keys(ROOT, other, 2)
    assert before[: place // 2] == after[: place // 2]
    assert all(a != b for a, b in zip(before[place // 2 :], after[place // 2 :], strict=True))


def test_media_change_the_keys_from_their_block_on():
    tokens = [0] * 8
    plain = block_keys(ROOT, tokens, 2)
    image = block_keys(ROOT, tokens, 2, media=[(5, b"x" * 32)])
    moved = block_keys(ROOT, tokens, 2, media=[(4, b"x" * 32)])
    assert plain[:2] == image[:2]
    assert not set(plain[2:]) & set(image[2:])
    assert not set(moved[2:]) & set(image[2:])


def test_keys_are_what_they_were():
    """Stores outlive releases: a change of these must come with another FORMAT_VERSION."""
    assert [key.hex()[:16] for key in block_keys(ROOT, [1, 2, 3, 4], 2)] == ["8ecc68fba75c04a8", "1bb1c940d3828096"]


@given(tokens=TOKENS, size=st.integers(1, 4), blocks=st.integers(1, 12), known=st.integers(0, 40))
def test_public_blocks_have_public_keys_and_the_rest_are_a_tenants_alone(
    tokens: list[int], size: int, blocks: int, known: int
):
    public = PublicBlocks(root_key(replace(BASE, tenant="public")), blocks)
    roots = [root_key(replace(BASE, tenant=tenant)) for tenant in ("a", "b")]
    plain = block_keys(public.root, tokens, size)
    one, other = (block_keys(root, tokens, size, public=public) for root in roots)
    assert one[:blocks] == other[:blocks] == plain[:blocks]
    own = [*one[blocks:], *other[blocks:], *plain[blocks:], *block_keys(roots[0], tokens, size)]
    assert len(set(own)) == len(own)
    assert block_keys(roots[0], tokens, size, known=one[:known], public=public) == one


def test_where_a_tenant_branches_off_is_part_of_its_keys():
    tenant, public = root_key(replace(BASE, tenant="a")), ROOT
    keys = [block_keys(tenant, range(12), 2, public=PublicBlocks(public, blocks)) for blocks in range(7)]
    assert len({key for each in keys for key in each}) == 6 + 6 + 5 + 4 + 3 + 2 + 1
    for blocks, each in enumerate(keys):
        parents = [parent_key(tenant, each, index, PublicBlocks(public, blocks)) for index in range(6)]
        assert [i for i in range(1, 6) if parents[i] != each[i - 1]] == [blocks] * (0 < blocks < 6)
        assert parents[0] == (public if blocks else tenant)


def test_a_salt_is_not_the_end_of_a_tenants_name():
    assert namespace_digest(replace(BASE, tenant="ab")) != namespace_digest(replace(BASE, tenant="a", salt="b"))
    assert namespace_digest(replace(BASE, salt="")) == namespace_digest(BASE)


def test_a_layout_has_another_fingerprint_when_its_bytes_mean_something_else():
    group = KVGroup(name="full", kind="full", layers=(0, 1), nbytes_per_token=64)
    layout = KVLayout(block_size=16, block_nbytes=1024, dtype="float32", groups=(group,))
    others = [
        replace(layout, block_size=32),
        replace(layout, dtype="bfloat16"),
        replace(layout, groups=(replace(group, layers=(1, 0)),)),
    ]
    assert len({layout.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert replace(layout).fingerprint == layout.fingerprint
