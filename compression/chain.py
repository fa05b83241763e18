"""Chain hashes: a name for every prefix of a conversation, without a session id.

    h_0 = H(tenant)        h_i = H(h_(i-1) || link of message i)

The hash after message i covers the tenant and every message so far, and nothing else: tools, sampling
parameters and the bytes' own spelling do not count. Two tenants never share a hash.

Nor do the ids of tool calls count, which some clients make up anew in every turn: the link of an assistant
message is its shape, that of a result its shape and which call of the message before it answers. Only
where ids do not tell this (a call without an id, two of one name, a result of no call of its round) are
they part of the link. Cache marks do not count either, for clients move them on from turn to turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import xxhash

from ctxgate.compression.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ctxgate.compression.dialects.chat import Facts

HASH_BYTES: Final = 32
REMEMBERED_HASHES: Final = 300_000  # of all conversations together: some 30 MB
_PIECE: Final = 1024  # messages that are hashed at a time: about a millisecond
_NEW_MESSAGES: Final = 24  # a turn brings fewer; one that brings more is hashed from its beginning


@dataclass(frozen=True, slots=True)
class Chain:
    """The names of all prefixes of a conversation.

    `hashes`: the hash after each message, shortest prefix first. `batches`: the indices of the assistant
    messages whose calls have one id each, so that a link goes without them.
    """

    hashes: tuple[bytes, ...] = field(repr=False)
    batches: tuple[int, ...]


NOTHING: Final = Chain((), ())


class Chains:
    """Chain hashes, and a memory of those of the last turns.

    A prefix is remembered by a fast hash of its messages' digests; `seed` should be a secret of the
    process: whoever could make two prefixes collide could have one taken for the other, within one tenant.
    """

    def __init__(self, seed: int = 0, limit: int = REMEMBERED_HASHES) -> None:
        self._seed = seed
        self._known: Recent[bytes, Chain] = Recent(limit, lambda known: len(known.hashes) + 1)

    def of(self, tenant: str, facts: Sequence[Facts]) -> Chain:
        """The chain of a conversation; only what is new since a turn that is remembered is hashed."""
        digests = _named(tenant, facts)
        known = self._remembered(digests, len(facts))
        if len(known.hashes) == len(facts):
            return known
        chain = _extended(tenant, known, facts)
        self._known.put(xxhash.xxh3_128_digest(digests, self._seed), chain)
        return chain

    def in_pieces(self, tenant: str, facts: Sequence[Facts]) -> Iterator[None]:
        """Do what `of` does and keep the result, a piece of the work between two values."""
        if len(facts) <= _PIECE:
            return
        digests = _named(tenant, facts)
        chain = self._remembered(digests, len(facts))
        if len(facts) - len(chain.hashes) <= _PIECE:
            return
        for stop in (*range(len(chain.hashes) + _PIECE, len(facts), _PIECE), len(facts)):
            yield
            chain = _extended(tenant, chain, facts[:stop])
        self._known.put(xxhash.xxh3_128_digest(digests, self._seed), chain)

    def _remembered(self, digests: bytes, count: int) -> Chain:
        """The chain of the longest prefix that is remembered."""
        start = len(digests) - count * HASH_BYTES
        for length in range(count, max(0, count - _NEW_MESSAGES), -1):
            key = xxhash.xxh3_128_digest(digests[: start + length * HASH_BYTES], self._seed)
            found = self._known.get(key)
            if found is not None:
                return found
        return NOTHING


def _named(tenant: str, facts: Sequence[Facts]) -> bytes:
    """What a prefix is remembered by, before it is hashed."""
    return b"".join([tenant.encode() + b"\0", *[each.digest for each in facts]])


def chain(tenant: str, links: Iterable[bytes]) -> list[bytes]:
    """The hash after each message, shortest prefix first."""
    hashes: list[bytes] = []
    latest = root(tenant)
    for link in links:
        latest = extended(latest, link)
        hashes.append(latest)
    return hashes


def root(tenant: str) -> bytes:
    """The hash of a tenant's empty conversation."""
    return blake2b(tenant.encode(), digest_size=HASH_BYTES, person=b"ctxgate root").digest()


def extended(previous: bytes, link: bytes) -> bytes:
    """The hash of a prefix with one more message."""
    return blake2b(previous + link, digest_size=HASH_BYTES, person=b"ctxgate chain").digest()


def ordinals(facts: Facts) -> Mapping[str, int]:
    """The place of each id among a message's calls; empty where ids do not tell them apart."""
    places = {id_: place for place, id_ in enumerate(facts.calls)}
    return {} if len(places) != len(facts.calls) or "" in places else places


def _extended(tenant: str, known: Chain, facts: Sequence[Facts]) -> Chain:
    """The chain of messages of which the first ones are known."""
    hashes, batches = list(known.hashes), list(known.batches)
    start = len(hashes)
    latest = hashes[-1] if hashes else root(tenant)
    caller, calls = _open_round(facts, start)
    for at in range(start, len(facts)):
        each = facts[at]
        link = each.unmarked or each.digest
        if each.role == "tool":
            place = calls.get(each.answers or "")
            if place is not None:
                link = _answer_link(each.lasting, at - caller, place)
            else:
                calls = {}  # the round is over: what follows answers none of its calls
        elif each.calls:
            caller, calls = at, ordinals(each)
            if calls:
                link = each.lasting
                batches.append(at)
        else:
            calls = {}
        latest = extended(latest, link)
        hashes.append(latest)
    return Chain(tuple(hashes), tuple(batches))


def _open_round(facts: Sequence[Facts], stop: int) -> tuple[int, Mapping[str, int]]:
    """The assistant message whose results may follow at `stop`, and the places of its calls."""
    at = stop - 1
    while at >= 0 and facts[at].role == "tool":
        at -= 1
    if at < 0 or not facts[at].calls:
        return 0, {}
    calls = ordinals(facts[at])
    answered = (facts[result].answers or "" for result in range(at + 1, stop))
    return (at, calls) if all(answer in calls for answer in answered) else (at, {})


def _answer_link(shape: bytes, distance: int, place: int) -> bytes:
    reference = distance.to_bytes(8, "big") + place.to_bytes(8, "big")
    return blake2b(shape + reference, digest_size=HASH_BYTES, person=b"ctxgate answer").digest()
