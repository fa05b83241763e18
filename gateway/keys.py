"""Client keys: made once, stored as SHA-256, found by hash and compared in constant time.

A secret carries 256 random bits, so a plain hash of it cannot be searched; a slow or salted hash
would add nothing but latency to every request.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ctxgate.gateway.config import Key

PREFIX: Final = "cg-"
RANDOM_BYTES: Final = 32
MIN_SECRET_CHARS: Final = 32  # for keys made elsewhere; shorter ones can be guessed
MAX_SECRET_CHARS: Final = 256


def new_key(random_bytes: bytes) -> tuple[str, bytes]:
    """A secret made of at least 32 random bytes, and its digest.

    The secret is `cg-` and the bytes in URL-safe base64 without padding: 46 characters for 32 bytes.
    Raises ValueError for fewer bytes.
    """
    if len(random_bytes) < RANDOM_BYTES:
        raise ValueError(f"a key needs at least {RANDOM_BYTES} random bytes")
    secret = PREFIX + urlsafe_b64encode(random_bytes).rstrip(b"=").decode("ascii")
    return secret, digest(secret)


def digest(secret: str) -> bytes:
    """The SHA-256 of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def secret_problem(secret: str) -> str | None:
    """Why a text cannot serve as a secret, None where it can. Never shows the text."""
    if not MIN_SECRET_CHARS <= len(secret) <= MAX_SECRET_CHARS:
        return f"a secret has {MIN_SECRET_CHARS} to {MAX_SECRET_CHARS} characters"
    if not _is_token(secret):
        return "a secret is printable ASCII without spaces, as a bearer token must be"
    return None


class KeyRing:
    """The configured keys by digest. Holds no secret."""

    __slots__ = ("_by_digest",)

    def __init__(self, keys: Iterable[Key]) -> None:
        self._by_digest = {key.digest: key for key in keys}

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, secret: str) -> Key | None:
        """The key of a presented secret, None where there is none.

        Text that no key can be (empty, over 256 characters, not printable ASCII) is refused before it
        is hashed. The table is entered by digest, which a caller cannot steer; the final comparison
        takes the same time wherever the digests differ.
        """
        if not 0 < len(secret) <= MAX_SECRET_CHARS or not _is_token(secret):
            return None
        presented = digest(secret)
        key = self._by_digest.get(presented)
        if key is None or not hmac.compare_digest(key.digest, presented):
            return None
        return key


def _is_token(secret: str) -> bool:
    return secret.isascii() and secret.isprintable() and " " not in secret
