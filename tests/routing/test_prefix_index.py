"""What a replica is expected to find of a prompt, from what it has read before."""

from __future__ import annotations

import pytest

from ctxgate.routing.prefix_index import DEFAULT_BLOCK, Expected, PrefixIndex

HERE = ("standard", "standard-0")
THERE = ("standard", "standard-1")


def chain(*names: str) -> list[bytes]:
    """A link per element that covers all before it."""
    return ["/".join(names[: at + 1]).encode() for at in range(len(names))]


def learn(
    index: PrefixIndex,
    names: str,
    prompt: int,
    cached: int | None = 0,
    *,
    place: tuple[str, str] = HERE,
    sizes: list[int] | None = None,
    now_us: int = 1,
) -> None:
    """A prompt of one-letter elements of ten bytes each behind the fields, which have none."""
    sizes = sizes or [0, *[10] * (len(names) - 1)]
    index.learn(place, chain(*names), sizes, prompt=prompt, cached=cached, now_us=now_us)


def expect(index: PrefixIndex, names: str, place: tuple[str, str] = HERE) -> Expected:
    found = index.expected(place, chain(*names))
    assert found is not None
    return found


def test_nothing_is_known_of_a_place_that_has_read_nothing() -> None:
    index = PrefixIndex()
    assert index.expected(HERE, chain(*"fsu")) is None
    learn(index, "fsu", 100)
    assert index.expected(THERE, chain(*"fsu")) is None
    assert index.expected(HERE, chain(*"gsu")) is None  # another model: another first link


def test_the_next_turn_is_expected_to_find_the_whole_prompt_before_it() -> None:
    index = PrefixIndex()
    learn(index, "fsu", 100)
    found = expect(index, "fsuab")
    assert (found.tokens, found.elements, found.counted) == (96, 3, True)  # six blocks of 16


def test_routing_b9_a_prompt_shorter_than_a_block_is_known_as_soon_as_it_has_grown() -> None:
    index, names = PrefixIndex(block=16), "fs"
    for prompt, expected in ((5, 0), (12, 0), (40, 32), (90, 80)):
        learn(index, names, prompt)
        names += chr(ord("a") + len(names))
        found = expect(index, names)
        assert (found.tokens, found.elements) == (expected, len(names) - 1)


def test_routing_g4_a_repeat_of_whole_blocks_computes_the_last_one_anew() -> None:
    """vLLM: 128 tokens, blocks of 32, the same prompt again finds 96; of 126 it finds 96 as well."""
    index = PrefixIndex(block=32)
    learn(index, "fu", 128)
    learn(index, "gu", 126)
    assert expect(index, "fu").tokens == 96
    assert expect(index, "gu").tokens == 96
    assert expect(index, "fuab").tokens == 128  # a longer prompt finds all of it


def test_a_prompt_that_only_shares_the_head_finds_that() -> None:
    """Two elements of ten bytes behind the fields: half of 320 tokens each."""
    index = PrefixIndex()
    learn(index, "fsu", 320)
    found = expect(index, "fsv")
    assert (found.tokens, found.elements, found.counted) == (160, 2, False)


def test_routing_b13_different_tails_share_the_head_by_their_bytes() -> None:
    index = PrefixIndex()
    learn(index, "fsu", 1_000, sizes=[0, 90, 10])
    assert expect(index, "fsv").tokens == 896  # 900 tokens are 56 blocks


def test_routing_d10_tokens_between_two_counted_ends_are_apportioned_between_them() -> None:
    """The first prompt has ten tokens a byte, what follows one: not the mean of both."""
    index = PrefixIndex(block=1)
    learn(index, "fs", 100, sizes=[0, 10])
    learn(index, "fsuab", 400, sizes=[0, 10, 100, 100, 100])
    assert [expect(index, f"fsua{other}").tokens for other in "bx"] == [399, 300]
    assert expect(index, "fsux").tokens == 200
    assert expect(index, "fsx").tokens == 100


def test_what_a_reply_found_corrects_where_the_prompts_part() -> None:
    index = PrefixIndex()
    learn(index, "fsu", 320)
    learn(index, "fsv", 330, cached=240)
    found = expect(index, "fsw")
    assert (found.tokens, found.counted) == (240, True)


@pytest.mark.parametrize("cached", [0, 16, 64])
def test_a_hit_far_below_what_was_expected_corrects_nothing(cached: int) -> None:
    """Then part of it was gone from the cache: that says nothing of its length."""
    index = PrefixIndex()
    learn(index, "fsu", 320)
    learn(index, "fsv", 320, cached=cached)
    found = expect(index, "fsw")
    assert (found.tokens, found.counted) == (160, False)


def test_use_tells_when_and_how_much_was_written_since() -> None:
    index = PrefixIndex()
    learn(index, "fsu", 100, now_us=5)
    assert (expect(index, "fsua").used_us, expect(index, "fsua").foreign) == (5, 0)
    learn(index, "gsu", 1_000, cached=400, now_us=7)
    learn(index, "gsuab", 1_100, cached=992, now_us=8)
    assert (expect(index, "fsua").used_us, expect(index, "fsua").foreign) == (5, 708)
    learn(index, "fsuab", 140, cached=96, now_us=9)
    assert (expect(index, "fsx").used_us, expect(index, "fsx").foreign) == (9, 0)


def test_a_hit_that_was_not_told_is_no_zero_and_the_prompt_is_known_all_the_same() -> None:
    index = PrefixIndex()
    learn(index, "fsu", 160, cached=None)
    assert expect(index, "fsua").tokens == 160


def test_the_block_is_learned_from_enough_different_hits() -> None:
    index = PrefixIndex()
    for number in range(1, 8):
        learn(index, "fu" + "x" * number, 32 * number + 40, cached=32 * number)
        assert (index.block(HERE), index.least_shortfall(HERE)) == (DEFAULT_BLOCK, 256)
    learn(index, "fuz", 400, cached=320)
    assert (index.block(HERE), index.least_shortfall(HERE)) == (32, 64)
    assert index.block(THERE) == DEFAULT_BLOCK
    assert expect(index, "fuza").tokens == 384


def test_the_block_that_an_engine_tells_counts_until_its_hits_say_otherwise() -> None:
    index = PrefixIndex()
    index.tell_block(HERE, 128)
    assert (index.block(HERE), index.least_shortfall(HERE)) == (128, 256)
    learn(index, "fu", 1_000)
    assert expect(index, "fua").tokens == 896
    for number in range(1, 9):
        learn(index, "fu" + "x" * number, 64 * number + 40, cached=64 * number)
    assert (index.block(HERE), index.least_shortfall(HERE)) == (64, 128)
    index.tell_block(THERE, None)
    assert (index.block(THERE), index.least_shortfall(THERE)) == (DEFAULT_BLOCK, 256)


def test_the_same_hit_again_and_again_teaches_no_block() -> None:
    index = PrefixIndex()
    for number in range(50):
        learn(index, f"fu{number % 10}", 3_000, cached=2_080)
    assert index.block(HERE) == DEFAULT_BLOCK


def test_a_prompt_shorter_than_its_beginning_was_is_never_expected_to_find_more() -> None:
    """A template that drops old reasoning makes a longer conversation a shorter prompt."""
    index = PrefixIndex()
    learn(index, "fsu", 900)
    learn(index, "fsuab", 400)
    assert expect(index, "fsuabcd").tokens == 400
    assert expect(index, "fsuabcd").elements == 5
    assert expect(index, "fsux").tokens <= 400


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    index = PrefixIndex(entries=1_000)
    learn(index, "fsu", 100)
    for number in range(2_000):
        learn(index, "fsu", 100)
        links = [b"%d-%d" % (number, at) for at in range(10)]
        index.learn(HERE, links, [1] * 10, prompt=50, cached=0, now_us=1)
    known = index._places[HERE]
    assert len(known.young) + len(known.old) <= 1_000
    assert expect(index, "fsua").tokens == 96
    assert index.expected(HERE, [b"0-0"]) is None
    assert index.expected(HERE, [b"1999-0"]) is not None


def test_a_prompt_of_more_elements_than_are_kept_is_left_out() -> None:
    index = PrefixIndex(entries=10)
    index.learn(HERE, [b"%d" % at for at in range(6)], [1] * 6, prompt=50, cached=0, now_us=1)
    assert index.expected(HERE, [b"0"]) is None
    index.learn(HERE, [], [], prompt=50, cached=0, now_us=1)


def test_routing_e10_places_of_one_name_in_two_pools_are_two() -> None:
    index = PrefixIndex()
    learn(index, "fsu", 320, place=("fast", "replica-0"))
    assert index.expected(("standard", "replica-0"), chain(*"fsu")) is None
