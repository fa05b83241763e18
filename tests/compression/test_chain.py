"""Chain hashes name prefixes: of one tenant, in order, and by nothing but the messages."""

from __future__ import annotations

from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.chain import chain, extended, root

digests = st.lists(st.binary(min_size=32, max_size=32), max_size=8)


def test_the_hash_is_what_the_module_says() -> None:
    first = blake2b(b"acme/alpha", digest_size=32, person=b"ctxgate root").digest()
    second = blake2b(first + b"d" * 32, digest_size=32, person=b"ctxgate chain").digest()
    assert root("acme/alpha") == first
    assert chain("acme/alpha", [b"d" * 32]) == [second]


@given(digests, digests)
def test_a_longer_conversation_begins_with_the_hashes_of_the_shorter(
    start: list[bytes], more: list[bytes]
) -> None:
    assert chain("t", start + more)[: len(start)] == chain("t", start)


@given(digests, digests)
def test_equal_hashes_mean_equal_prefixes(one: list[bytes], two: list[bytes]) -> None:
    same = 0
    while same < min(len(one), len(two)) and one[same] == two[same]:
        same += 1
    pairs = list(zip(chain("t", one), chain("t", two), strict=False))
    assert [a == b for a, b in pairs] == [at < same for at in range(len(pairs))]


@given(digests.filter(bool))
def test_gateways_l9_tenants_share_no_hash_where_one_name_begins_another(
    messages: list[bytes],
) -> None:
    found = [set(chain(tenant, messages)) for tenant in ("acme/session-1", "acme/session-12", "acme")]
    assert len(set.union(*found)) == 3 * len(messages)
    assert extended(root("a"), b"b" * 32) != root("a")
