"""The prefix index beside the cache it describes: eviction, answers, prompts under way, bounds."""

from __future__ import annotations

import random
import tracemalloc
from hashlib import blake2b

import pytest

from ctxgate.inference.twin_cache import BlockPool, extend_chain
from ctxgate.routing.lru_stack import LruStack, Use
from ctxgate.routing.prefix_ahead import LIMIT_US
from ctxgate.routing.prefix_index import PrefixIndex
from ctxgate.routing.snapshot import Knowledge

HERE, THERE = ("standard", "standard-0"), ("standard", "standard-1")
PLACES = [("standard", f"standard-{number}") for number in range(4)]


def chain(name: str, count: int) -> list[bytes]:
    """Links of a conversation; the first is the same one for all."""
    return [b"fields", *(blake2b(f"{name}{at}".encode(), digest_size=16).digest() for at in range(1, count))]


def tokens(index: PrefixIndex, links: list[bytes], place: tuple[str, str] = HERE) -> int | None:
    found = index.expected(place, links)
    return None if found is None else found.tokens


def read(
    index: PrefixIndex,
    links: list[bytes],
    prompt: int,
    cached: int | None = 0,
    answer: int = 0,
    place: tuple[str, str] = HERE,
) -> None:
    sizes = [0, *[10] * (len(links) - 1)]
    index.learn(place, links, sizes, prompt=prompt, cached=cached, now_us=1, answer=answer)


# ---- the order of eviction -------------------------------------------------------------------------------


def test_tokens_read_after_a_use_are_each_counted_once() -> None:
    stack, uses = LruStack(), [Use(at, 0) for at in range(4)]
    for use, size in zip(uses, (10, 20, 30, 40), strict=True):
        stack.push(use, size)
    assert [stack.above(use) for use in uses] == [90, 70, 40, 0]
    stack.take(uses[1], 15)
    stack.take(uses[2], 99)
    assert [stack.above(use) for use in uses] == [45, 40, 40, 0]
    assert stack.total == 55


def test_the_order_agrees_with_a_plain_sum_through_many_renewals() -> None:
    rng, stack = random.Random(3), LruStack(slots=16)
    plain: list[Use] = []
    for step in range(500):
        use, size = Use(step, 0), rng.randrange(1, 100)
        stack.push(use, size)
        plain = [one for one in plain if one.slot >= 0] + [use]
        stack.take(rng.choice(plain), rng.randrange(60))
        for at, one in enumerate(plain):
            assert stack.above(one) == sum(later.held for later in plain[at + 1 :])
        assert len(plain) <= 16


def test_a_use_that_is_too_long_ago_is_not_in_the_order() -> None:
    stack, uses = LruStack(slots=4), [Use(at, 0) for at in range(6)]
    for use in uses:
        stack.push(use, 10)
    assert stack.above(uses[0]) is None
    assert stack.above(uses[-1]) == 0


# ---- what is evicted -------------------------------------------------------------------------------------


def test_routing_f5_what_a_cache_has_no_room_for_is_not_expected_and_the_front_goes_last() -> None:
    index = PrefixIndex()
    index.tell_size(HERE, 1_000)
    one, two = chain("one", 4), chain("two", 4)
    read(index, one, 640)
    assert tokens(index, [*one, b"next"]) == 640
    read(index, two, 641)  # 40 blocks: 360 tokens are left to the first one
    found = index.expected(HERE, [*one, b"next"])
    assert found is not None
    assert (found.tokens, found.known, found.foreign) == (352, 640, 641)
    read(index, chain("three", 4), 993)
    assert tokens(index, [*one, b"next"]) == 0
    assert tokens(index, [*two, b"next"]) == 0


def test_a_prompt_that_is_read_again_and_again_evicts_the_others_once() -> None:
    index = PrefixIndex()
    index.tell_size(HERE, 2_000)
    read(index, chain("one", 4), 801)
    for turn in range(4, 40):
        read(index, chain("two", turn), 801, cached=0 if turn == 4 else 800)
    assert tokens(index, [*chain("one", 4), b"next"]) == 800  # and not none, as after 28,836 others


def test_without_a_size_nothing_is_held_to_be_evicted() -> None:
    index = PrefixIndex()
    read(index, chain("one", 4), 640)
    for number in range(50):
        read(index, chain(f"other{number}", 4), 100_000)
    assert tokens(index, [*chain("one", 4), b"next"]) == 640


@pytest.mark.parametrize("room", [100_000, 12_000, 6_000])
def test_expected_hits_are_those_of_a_block_pool_within_a_percent(room: int) -> None:
    """Sixteen conversations of one head, eight at a time; each turn goes on from the answer before it."""
    rng, index, pool = random.Random(room), PrefixIndex(), BlockPool(room // 16 + 1)
    index.tell_size(HERE, room)
    head = [rng.randrange(1000) for _ in range(400)]
    waiting = [f"c{number}" for number in range(16)]
    live: list[tuple[str, list[bytes], list[int]]] = []
    expected = reported = 0
    while waiting or live:
        while waiting and len(live) < 8:
            live.append((waiting.pop(), [b"fields", b"head"], list(head)))
        at = rng.randrange(len(live))
        name, links, text = live[at]
        links.append(f"{name}/{len(links)}".encode())
        text += [rng.randrange(1000) for _ in range(rng.randrange(20, 200))]
        sizes = [0, 4 * len(head), *[400] * (len(links) - 2)]
        expected += tokens(index, links) or 0
        keys: list[bytes] = []
        extend_chain(keys, text, 16)
        hit = pool.longest_hit(keys, (len(text) - 1) // 16)
        pool.touch(hit)
        answer = [rng.randrange(1000) for _ in range(rng.randrange(2, 120))]
        whole = [*text, *answer][:-1]
        extend_chain(keys, whole, 16)
        blocks = hit + pool.allocate(-(-len(whole) // 16) - len(hit))
        for number in range(len(hit), len(keys)):
            pool.publish(blocks[number], keys[number])
        pool.release(reversed(blocks))
        cached = 16 * len(hit)
        index.learn(HERE, links, sizes, prompt=len(text), cached=cached, now_us=1, answer=len(answer))
        reported += cached
        text += answer
        links.append(f"{name}/{len(links)}".encode())
        if len(links) > 16:
            live.pop(at)
    assert abs(expected - reported) <= reported // 100


# ---- answers ---------------------------------------------------------------------------------------------


def test_routing_d12_the_next_turn_finds_the_answer_as_well() -> None:
    index = PrefixIndex()
    read(index, chain("one", 4), 1_000, answer=4_000)
    found = index.expected(HERE, [*chain("one", 4), b"answer", b"question"])
    assert found is not None
    # The last token generated was never read: 4,999 are 312 blocks.
    assert (found.tokens, found.known) == (4_992, 992)
    assert tokens(index, chain("one", 4)) == 992  # the same prompt again finds no more than itself


def test_answers_that_a_template_prints_otherwise_are_not_expected() -> None:
    index = PrefixIndex()
    index.tell_answers(HERE, kept=False)
    read(index, chain("one", 4), 1_000, answer=4_000)
    assert tokens(index, [*chain("one", 4), b"answer"]) == 992


def test_routing_d12_hits_teach_how_far_answers_are_kept() -> None:
    index = PrefixIndex()
    for turn in range(4, 60, 2):
        read(
            index,
            chain("one", turn),
            100 * turn,
            cached=0 if turn == 4 else 100 * (turn - 2) // 16 * 16,
            answer=160,
        )
    links = [*chain("one", 58), b"answer", b"question"]
    assert 5_792 <= (tokens(index, links) or 0) <= 5_808


# ---- prompts under way -----------------------------------------------------------------------------------


def sent(index: PrefixIndex, ticket: str, links: list[bytes], prompt: int, *, now_us: int = 1) -> None:
    sizes = [0, *[10] * (len(links) - 1)]
    index.dispatched(ticket, HERE, links, sizes, prompt=prompt, now_us=now_us)


def test_routing_a8_a_burst_of_one_cold_prompt_follows_the_first() -> None:
    index, links, chosen = PrefixIndex(), chain("burst", 3), []
    for number in range(30):
        hits = index.hits(PLACES, links).tokens
        place = max(PLACES, key=lambda one: hits.get(one, -1))
        chosen.append(place)
        index.dispatched(str(number), place, links, [0, 10, 10], prompt=20_000, now_us=number)
    assert set(chosen) == {PLACES[0]}
    for number in range(30):
        index.withdraw(str(number), PLACES[0])
    assert index.hits(PLACES, links) == ({}, 0)
    assert index.links == 0


def test_a_prompt_under_way_counts_until_its_attempt_failed_and_longer_for_another() -> None:
    index, links = PrefixIndex(), chain("one", 3)
    sent(index, "a", links, 1_600)
    sent(index, "b", links, 1_600)
    found = index.expected(HERE, [*links, b"next"])
    assert found is not None
    assert (found.tokens, found.known, found.counted, found.ahead) == (1_600, 0, False, True)
    index.withdraw("a", HERE)
    index.withdraw("a", HERE)  # only its own, once
    assert tokens(index, [*links, b"next"]) == 1_600
    index.withdraw("b", HERE)
    assert tokens(index, links) is None


def test_what_is_learned_takes_the_place_of_what_was_under_way() -> None:
    index = PrefixIndex()
    read(index, chain("one", 3), 320)
    sent(index, "a", chain("one", 5), 960)
    assert tokens(index, [*chain("one", 5), b"next"]) == 960
    assert tokens(index, [*chain("one", 4), b"next"]) == 640  # half of the bytes behind what is known
    index.withdraw("a", HERE)
    assert tokens(index, [*chain("one", 5), b"next"]) == 320
    read(index, chain("one", 5), 800, cached=320)
    assert tokens(index, [*chain("one", 5), b"next"]) == 800


def test_a_prompt_that_nobody_settles_is_forgotten_in_time() -> None:
    index = PrefixIndex()
    sent(index, "a", chain("one", 3), 320)
    sent(index, "b", chain("two", 3), 320, now_us=LIMIT_US)
    assert tokens(index, chain("one", 3)) is not None
    sent(index, "c", chain("three", 3), 320, now_us=LIMIT_US + 1)
    assert tokens(index, [*chain("one", 3)][1:]) is None
    assert index.links == 5  # two prompts, and the first link that they share


# ---- all places ------------------------------------------------------------------------------------------


def test_all_places_at_once_are_each_place_by_itself() -> None:
    rng, index = random.Random(5), PrefixIndex(entries=60)
    chains = [chain(name, 12) for name in "abc"]
    for step in range(300):
        place, links = rng.choice(PLACES), rng.choice(chains)[: rng.randrange(1, 13)]
        if rng.random() < 0.3:
            sizes = [10] * len(links)
            index.dispatched(str(step), place, links, sizes, prompt=500, now_us=step)
        else:
            read(index, links, 50 * len(links), place=place)
        links = rng.choice(chains)
        one_by_one = {place: index.expected(place, links) for place in PLACES}
        known = {place: found for place, found in one_by_one.items() if found is not None}
        deepest = max((found.elements for found in known.values()), default=0)
        hits = {place: found.tokens for place, found in known.items()}
        assert index.hits(PLACES, links) == (hits, deepest)
        for place, found in known.items():
            assert index._places[place].depth(links[::-1]) == found.elements
            assert index.expected(place, links, guess=rng.randrange(13)) == found
    assert index.hits(PLACES, []) == ({}, 0)


class Link(bytes):
    """A link that counts how often it is looked up."""

    lookups = 0

    def __hash__(self) -> int:
        Link.lookups += 1
        return super().__hash__()


def test_routing_h5_all_places_together_take_less_than_one_walk_along_a_long_prompt() -> None:
    places = [("standard", str(number)) for number in range(64)]
    links, index = chain("long", 4_096), PrefixIndex()
    for number, place in enumerate(places):
        read(index, links[: 60 * (number + 1)], 500 * (number + 1), place=place)
    Link.lookups = 0
    found = index.hits(places, [Link(link) for link in links])
    assert list(found.tokens.values()) == [500 * (number + 1) // 16 * 16 for number in range(64)]
    assert found.elements == 60 * 64
    assert 64 <= Link.lookups < 4_096


# ---- what is known, and how much of it -------------------------------------------------------------------


def test_a_restarted_replica_is_cold_and_keeps_its_configuration() -> None:
    index = PrefixIndex()
    assert index.knowledge(HERE) is Knowledge.COLD
    index.tell_block(HERE, 32)
    index.tell_size(HERE, 1_000)
    read(index, chain("one", 3), 320)
    assert index.knowledge(HERE) is Knowledge.DEGRADED
    index.forget(HERE)
    index.forget(THERE)
    assert index.knowledge(HERE) is Knowledge.COLD
    assert tokens(index, chain("one", 3)) is None
    assert index.block(HERE) == 32
    read(index, chain("one", 3), 3_200)
    read(index, chain("two", 3), 3_200)
    assert tokens(index, [*chain("one", 3), b"next"]) == 0  # there is room for 1,000


def test_routing_g1_reports_of_all_but_one_token_are_not_believed() -> None:
    index = PrefixIndex()
    for number in range(12):
        read(index, chain(f"{number}", 3), 1_002 + 2 * number, cached=1_001 + 2 * number)
    assert not index.trusts(HERE)
    assert index.trusts(THERE)
    assert index.block(HERE) == 16
    read(index, chain("other", 4), 500, cached=320)
    assert index.trusts(HERE)


def test_routing_h1_many_long_prompts_stay_within_the_bound_of_all_places() -> None:
    index = PrefixIndex(entries=1_000, all_entries=1_500)
    for number in range(600):
        read(index, chain(str(number), 20), 10_000, place=PLACES[number % 4])
    assert index.links <= 1_500 + 64 * 20  # it is looked at every 64 prompts
    assert tokens(index, [*chain("599", 20), b"next"], PLACES[3]) == 10_000


def test_a_conversation_of_a_million_tokens_takes_a_few_hundred_kilobytes() -> None:
    """1,162 messages, twenty more with each turn; the links themselves belong to whoever made them."""
    links, index = chain("long", 1_163), PrefixIndex()
    index.tell_size(HERE, 2_000_000)
    sizes = [0, *[4_000] * 1_162]
    tracemalloc.start()
    try:
        for turn in range(3, 1_164, 20):
            index.learn(
                HERE, links[:turn], sizes[:turn], prompt=860 * turn, cached=0, now_us=turn, answer=400
            )
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 400_000
    assert used / 2 < index.size_bytes < used * 2
