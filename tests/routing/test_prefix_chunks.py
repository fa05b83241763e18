"""Prompts that share the beginning of a long element: how much a replica should find of the common part."""

from __future__ import annotations

from ctxgate.routing.prefix_chunks import CHUNK, Chunks, ReadChunks, Shared
from ctxgate.routing.prefix_index import PrefixIndex

HERE, THERE = ("standard", "a"), ("standard", "b")


def chunks(common: int, tail: str, own: int = 1, at: int = 1) -> Chunks:
    """An element of `common` KB that others have, too, and `own` of its own."""
    links = [b"common %d" % number for number in range(common)]
    links += [f"{tail} {number}".encode() for number in range(own)]
    return Chunks(at, len(links) * CHUNK, tuple(links))


def learn(index: PrefixIndex, name: str, lead: Chunks, place: tuple[str, str] = HERE, **more: int) -> None:
    """A prompt of one token for 4 bytes whose whole head is the lead."""
    figures = {"prompt": lead.size // 4, "cached": 0, "now_us": 1} | more
    index.learn(place, [b"f", name.encode()], [0, lead.size], chunks=lead, **figures)


def expect(index: PrefixIndex, name: str, lead: Chunks, place: tuple[str, str] = HERE) -> int:
    found = index.expected(place, [b"f", name.encode()], lead)
    return 0 if found is None else found.tokens


def test_routing_b13_other_tails_behind_the_same_long_head_find_the_common_part() -> None:
    index = PrefixIndex()
    learn(index, "one", chunks(6, "one", 2))
    assert expect(index, "two", chunks(6, "two", 30)) == 6 * 256  # 6 KB of the first head's 8 KB, 2048 tokens
    assert expect(index, "two", chunks(3, "two")) == 3 * 256
    assert expect(index, "two", chunks(0, "two")) == 0
    assert expect(index, "two", chunks(6, "two"), THERE) == 0
    found = index.expected(HERE, [b"f", b"two"], chunks(6, "two"))
    assert found is not None
    assert (found.known, found.counted, found.elements) == (0, False, 1)  # no miss is told by an estimate


def test_routing_b6_a_shared_system_prompt_is_warm_on_every_replica_that_read_it() -> None:
    """Four replicas, a hundred tails: none is ahead of the others by what all have read."""
    index = PrefixIndex()
    places = [("standard", f"standard-{number}") for number in range(4)]
    for user in range(100):
        learn(index, f"user {user}", chunks(4, f"user {user}"), places[user % 4])
    hits = index.hits(places, [b"f", b"another"], chunks(4, "another"))
    assert [hits.tokens[place] for place in places] == [4 * 256] * 4


def test_only_what_stands_behind_the_known_links_is_shared() -> None:
    index = PrefixIndex()
    learn(index, "one", chunks(4, "one"))
    assert expect(index, "two", chunks(4, "two", at=2)) == 0
    known = index.expected(HERE, [b"f", b"one", b"u"], chunks(4, "two"))
    assert known is not None
    assert known.tokens == 5 * 256  # its whole head is known: chunks of it add nothing


def test_a_hit_inside_an_element_does_not_correct_the_tokens_before_it() -> None:
    index = PrefixIndex()
    lead = chunks(4, "one", at=2)
    index.learn(
        HERE, [b"f", b"s", b"one"], [0, 4096, lead.size], chunks=lead, prompt=2304, cached=0, now_us=1
    )
    other = chunks(4, "two", at=2)
    chain = [b"f", b"s", b"two"]
    # 2304 tokens for 9 KB: 1024 for the head, and 4 of 5 KB of the message.
    found = index.expected(HERE, chain, other)
    assert found is not None
    assert found.tokens == 2048
    index.learn(HERE, chain, [0, 4096, other.size], chunks=other, prompt=2304, cached=2048, now_us=2)
    head = index.expected(HERE, [b"f", b"s", b"three"])
    assert head is not None
    assert (head.tokens, head.counted) == (1024, False)


def test_what_was_evicted_is_not_shared_and_what_was_read_again_is() -> None:
    index = PrefixIndex()
    index.tell_size(HERE, 4096)
    learn(index, "one", chunks(4, "one"))  # 1280 tokens
    index.learn(HERE, [b"x"], [0], prompt=2048, cached=0, now_us=2)
    learn(index, "two", chunks(4, "two"), cached=1024)
    index.learn(HERE, [b"y"], [0], prompt=2048, cached=0, now_us=4)
    assert expect(index, "three", chunks(4, "three")) == 1024  # of "two", read 2048 tokens ago
    index.learn(HERE, [b"z"], [0], prompt=3968, cached=0, now_us=5)
    assert expect(index, "three", chunks(4, "three")) == 0


def test_chunks_are_forgotten_with_their_prompts_and_count_as_links() -> None:
    index = PrefixIndex(entries=8)
    learn(index, "one", chunks(4, "one"))
    assert index.links == 2 + 5
    for number in range(8):  # two generations
        index.learn(HERE, [b"x%d" % number], [0], prompt=100, cached=0, now_us=2)
    assert expect(index, "two", chunks(4, "two")) == 0
    assert index.links <= 8


def test_no_more_than_so_many_are_kept_the_last_ones_and_whole_beginnings() -> None:
    read = ReadChunks(10)
    read.put(b"one", chunks(2, "one", 4))
    read.put(b"two", chunks(2, "two", 4))
    assert len(read) == 10
    read.put(b"three", chunks(2, "three", 4))
    assert len(read) == 6
    assert read.shared(chunks(2, "one", 4)) == Shared(b"three", 2 * CHUNK, 6 * CHUNK)
    assert read.shared(chunks(2, "three", 3)) == Shared(b"three", 5 * CHUNK, 6 * CHUNK)
    read.put(b"four", chunks(2, "four", 40))
    assert len(read) == 6
    read.keep(b"four".__eq__)
    assert not read


def test_a_place_that_is_dropped_is_not_known() -> None:
    index = PrefixIndex()
    learn(index, "one", chunks(4, "one"))
    index.drop(HERE)
    index.drop(THERE)
    assert index.links == 0
    assert index.expected(HERE, [b"f"]) is None
