"""The block pool: hits, eviction order, duplicates, salts."""

from __future__ import annotations

import pytest

from ctxgate.inference.twin_cache import BlockPool, block_key, extend_chain


def chain(tokens: list[int], block_size: int = 4, salt: str | None = None) -> list[bytes]:
    keys: list[bytes] = []
    extend_chain(keys, tokens, block_size, salt)
    return keys


def store(pool: BlockPool, keys: list[bytes]) -> list[int]:
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    return blocks


def test_a_chain_covers_full_blocks_only() -> None:
    assert [len(chain([7] * count)) for count in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_a_chain_grows_without_changing() -> None:
    keys = chain(list(range(8)))
    longer = list(keys)
    extend_chain(longer, list(range(13)), 4)
    assert longer == chain(list(range(13)))
    assert longer[:2] == keys


def test_equal_blocks_after_different_parents_differ() -> None:
    assert chain([1, 1, 1, 1, 5, 5, 5, 5])[1] != chain([2, 2, 2, 2, 5, 5, 5, 5])[1]


def test_a_salt_changes_the_first_key_and_so_all() -> None:
    plain, salted, other = (chain(list(range(8)), salt=salt) for salt in (None, "a", "b"))
    assert len({plain[0], salted[0], other[0]}) == len({plain[1], salted[1], other[1]}) == 3
    assert salted[1] == block_key(salted[0], [4, 5, 6, 7])  # no salt of its own: the chain carries it


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert (pool.free, pool.usage) == (0, 1.0)
    with pytest.raises(ValueError, match="cannot allocate 1 of 0"):
        pool.allocate(1)


def test_a_pool_of_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_a_hit_is_the_leading_run_within_the_limit() -> None:
    pool = BlockPool(10)
    keys = chain(list(range(16)))
    blocks = store(pool, keys[:3])
    assert pool.longest_hit(keys, 4) == blocks
    assert pool.longest_hit(keys, 2) == blocks[:2]
    assert pool.longest_hit(keys[1:], 4) == blocks[1:]  # keys are positions in a chain, not prefixes
    assert pool.longest_hit(chain([9] * 16), 4) == []


def test_a_finished_requests_tail_is_evicted_first() -> None:
    pool = BlockPool(5)
    keys = chain(list(range(16)))
    pool.release(reversed(store(pool, keys)))
    assert len(pool.longest_hit(keys, 4)) == 4
    pool.allocate(1)
    assert len(pool.longest_hit(keys, 4)) == 3
    pool.allocate(2)
    assert len(pool.longest_hit(keys, 4)) == 1
    assert pool.evicted == 3


def test_blocks_without_a_hash_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    keys = chain([1, 2, 3, 4, 5, 6, 7, 8])
    cached = store(pool, keys)
    loose = pool.allocate(1)
    pool.release([*loose, *reversed(cached)])
    assert pool.allocate(1) == loose
    assert pool.evicted == 0
    assert len(pool.longest_hit(keys, 2)) == 2


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(5)
    first, second = chain([1] * 8), chain([2] * 8)
    pool.release(reversed(store(pool, first)))
    pool.release(reversed(store(pool, second)))
    hit = pool.longest_hit(first, 2)
    pool.touch(hit)
    pool.release(reversed(hit))  # used again: now the youngest
    pool.allocate(2)
    assert len(pool.longest_hit(first, 2)) == 2
    assert pool.longest_hit(second, 2) == []


def test_a_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(4)
    keys = chain([1] * 8)
    pool.release(reversed(store(pool, keys)))
    pool.touch(pool.longest_hit(keys, 2))
    assert pool.free == 1
    pool.allocate(1)
    assert len(pool.longest_hit(keys, 2)) == 2


def test_equal_blocks_are_not_merged() -> None:
    pool = BlockPool(4)
    keys = chain([1] * 4)
    (one,) = store(pool, keys)
    (two,) = store(pool, keys)
    assert pool.longest_hit(keys, 1) == [one]
    pool.release([one])
    pool.release([two])
    pool.allocate(2)  # the never-used block, then the older copy
    assert pool.longest_hit(keys, 1) == [two]


def test_a_reset_waits_for_running_requests() -> None:
    pool = BlockPool(4)
    keys = chain([1] * 4)
    blocks = store(pool, keys)
    assert not pool.reset()
    pool.release(blocks)
    assert pool.reset()
    assert pool.longest_hit(keys, 1) == []
