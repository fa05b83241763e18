"""Which requests may share cached prompt blocks: the `cache_salt` that each request carries to its engine.

The engine finds a prompt's blocks by a hash that the salt goes into. Who shares a salt can hit, and by
the clock measure, what the others have sent; who does not, cannot. A salt is an HMAC over its tenant, so
that it is the same in every process and nobody can make another tenant's.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from ctxgate.gateway.errors import Kind, Refused

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ctxgate.gateway.config import Key
    from ctxgate.inference.wire import Body

FIELD: Final = "cache_salt"
SECRET_BYTES: Final = 32
MAX_LENGTH: Final = 128  # of a salt, as vLLM takes it
_FORBIDDEN: Final = frozenset("@/\\\0")
_TENANT: Final = "/ctxgate"  # no tenant's name begins with a slash: no client can reach what lies under it
_SECRET_KEY: Final = blake2b(b"cache salt", digest_size=32, person=b"ctxgate secret").digest()


class Isolation(StrEnum):
    """Who shares cached prompt blocks on a pool."""

    TEAM = "team"
    ORGANISATION = "organisation"
    NONE = "none"


_STRICTEST_FIRST: Final = (Isolation.TEAM.value, Isolation.ORGANISATION.value, Isolation.NONE.value)


def strictest(isolations: Iterable[str]) -> str:
    """Who may share a prompt that may go to any of several pools: only whom all of them let share."""
    return min(isolations, key=_STRICTEST_FIRST.index)


class SecretStore(Protocol):
    """Where a secret is kept so that the first one claimed stays; see `forms.FormStore`."""

    async def claim(
        self, tenant: str, claims: Mapping[bytes, bytes], reads: Collection[bytes], now_us: int
    ) -> dict[bytes, bytes]: ...


async def kept_secret(store: SecretStore, fresh: bytes, now_us: int) -> bytes:
    """The secret that all processes on a store share: `fresh` if there was none. Raises LedgerError."""
    return (await store.claim(_TENANT, {_SECRET_KEY: fresh}, (), now_us))[_SECRET_KEY]


@dataclass(frozen=True, slots=True)
class Salts:
    """Makes the salts of one gateway from its secret.

    The tenants' own are remembered: there are as many as are configured.
    """

    secret: bytes = field(repr=False)
    _known: dict[tuple[str, str, str], str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of(self, isolation: str, key: Key, body: Body) -> str | None:
        """The salt of a request, or None where its body goes as it is. Raises `Refused`.

        The client's own salt, where its key may set one, parts its domain further: it goes into the
        HMAC, so that no value of it leads to another's.
        """
        level = Isolation(isolation)
        if level is Isolation.NONE:
            return None
        if (own := _own(body)) is not None:
            return self._made(level, key, own)
        domain = (level.value, key.organisation, key.team)
        salt = self._known.get(domain)
        if salt is None:
            salt = self._known[domain] = self._made(level, key, None)
        return salt

    def _made(self, level: Isolation, key: Key, own: str | None) -> str:
        tenant = [key.organisation] if level is Isolation.ORGANISATION else [key.organisation, key.team]
        message = msgspec.json.encode([level.value, *tenant, own])
        return hmac.digest(self.secret, message, "sha256").hex()


def _own(body: Body) -> str | None:
    """The salt that the client sent, None without one. Raises `Refused` for what the engine would refuse."""
    try:
        value = body.value(FIELD)
    except msgspec.DecodeError:
        value = False
    if value is None:
        return None
    if isinstance(value, str) and 0 < len(value) <= MAX_LENGTH and _FORBIDDEN.isdisjoint(value):
        return value
    message = f"'{FIELD}' must be a string of 1 to {MAX_LENGTH} characters without '@', '/', '\\' and NUL."
    raise Refused(Kind.INVALID_VALUE, message, FIELD)
