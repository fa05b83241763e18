"""Chain hashes: a name for every prefix of a conversation, without a session id.

    h_0 = H(tenant)        h_i = H(h_(i-1) || digest of message i)

The hash after message i covers the tenant and every message so far, and nothing else: tools, sampling
parameters and the bytes' own spelling do not count. Two tenants never share a hash.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

HASH_BYTES: Final = 32


def root(tenant: str) -> bytes:
    """The hash of a tenant's empty conversation."""
    return blake2b(tenant.encode(), digest_size=HASH_BYTES, person=b"ctxgate root").digest()


def extended(previous: bytes, digest: bytes) -> bytes:
    """The hash of a prefix with one more message."""
    return blake2b(previous + digest, digest_size=HASH_BYTES, person=b"ctxgate chain").digest()


def chain(tenant: str, digests: Iterable[bytes]) -> list[bytes]:
    """The hash after each message, shortest prefix first."""
    hashes: list[bytes] = []
    latest = root(tenant)
    for digest in digests:
        latest = extended(latest, digest)
        hashes.append(latest)
    return hashes
