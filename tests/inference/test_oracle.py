"""The bound of the prefix cache, against counts worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference.oracle import PrefixOracle, chain_hashes


def hits(block_size: int, *prompts: list[int]) -> list[int]:
    oracle = PrefixOracle(block_size)
    return [oracle.observe(prompt) for prompt in prompts]


def test_the_first_prompt_has_no_hit() -> None:
    assert hits(4, list(range(100))) == [0]


@pytest.mark.parametrize(
    ("prompt_tokens", "block_size", "hit"),
    # floor((P - 1) / b) * b; the first two rows are what a real engine reported for an exact repeat.
    [(128, 32, 96), (126, 32, 96), (129, 32, 128), (16, 16, 0), (17, 16, 16), (6074, 16, 6064), (1, 1, 0)],
)
def test_an_exact_repeat_keeps_one_token_to_compute(prompt_tokens: int, block_size: int, hit: int) -> None:
    prompt = list(range(prompt_tokens))
    assert hits(block_size, prompt, prompt) == [0, hit]


def test_a_growing_conversation_hits_its_full_blocks() -> None:
    # 10 tokens are 2 full blocks of 4; 23 tokens are 5; the third prompt begins with all 20 of those.
    assert hits(4, list(range(10)), list(range(23)), list(range(40))) == [0, 8, 20]


def test_a_fork_hits_up_to_the_block_before_the_difference() -> None:
    trunk = list(range(20))
    left, right = [*trunk, 100, 101, 102, 103], [*trunk[:9], 200, *trunk[10:], 201, 202]
    assert hits(4, trunk, left, right) == [0, 20, 8]


def test_any_earlier_prompt_counts_not_only_the_last() -> None:
    a, b = list(range(16)), list(range(50, 66))
    assert hits(4, a, b, a, b) == [0, 0, 12, 12]


def test_equal_blocks_after_a_difference_are_no_hit() -> None:
    assert hits(4, [1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 2, 3, 4, 5, 6, 7, 8, 9]) == [0, 0]


def test_a_prompt_shorter_than_an_earlier_one_stops_before_its_own_last_token() -> None:
    # 8 tokens are 2 blocks that are both known, but the 8th token is computed: 1 block.
    assert hits(4, list(range(40)), list(range(8)), list(range(9))) == [0, 4, 8]


def test_domains_do_not_share() -> None:
    oracle = PrefixOracle(4)
    prompt = list(range(9))
    assert [oracle.observe(prompt, domain) for domain in ("a", "b", "a", "")] == [0, 0, 8, 0]


def test_the_empty_prompt_has_no_hit() -> None:
    assert hits(4, [], []) == [0, 0]


def test_memory_grows_with_distinct_blocks_only() -> None:
    oracle = PrefixOracle(4)
    for length in range(1, 41):
        oracle.observe(list(range(length)))
    assert len(oracle) == 10


def test_a_block_needs_a_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PrefixOracle(0)


def test_a_trailing_partial_block_has_no_hash() -> None:
    assert len(list(chain_hashes(list(range(11)), 4))) == 2
    assert list(chain_hashes([1, 2, 3], 4)) == []


def slow_bound(earlier: list[list[int]], prompt: list[int], block_size: int) -> int:
    """The definition: longest common prefix with any earlier prompt, in whole blocks, short of the end."""
    best = 0
    for other in earlier:
        common = 0
        while common < min(len(other), len(prompt)) and other[common] == prompt[common]:
            common += 1
        best = max(best, common // block_size * block_size)
    return min(best, max(len(prompt) - 1, 0) // block_size * block_size)


@given(st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=12), st.integers(1, 5))
def test_the_bound_is_its_definition(prompts: list[list[int]], block_size: int) -> None:
    expected = [slow_bound(prompts[:at], prompt, block_size) for at, prompt in enumerate(prompts)]
    assert hits(block_size, *prompts) == expected
