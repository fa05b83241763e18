"""The first-seen forms of prompts: the port of their store, and a bounded memory in front of it.

A form is a text under a key of 32 bytes, per tenant. The first text claimed under a key stays for as long
as it is used, whichever process claims it, so that all of them send the same bytes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from ctxgate.compression.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ctxgate.compression.ask import Ask

MEMORY_BYTES: Final = 64 * 2**20
ANSWER_WITHIN_S: Final = 5.0  # then the request goes out as it came, and may miss the whole cache
FRESH_US: Final = 86_400_000_000  # a day: how exactly it is known when a form was last used
RESERVED: Final = "/"  # begins the names of the gateway's own tenants, whose forms are never forgotten
_OVERHEAD: Final = 200  # bytes of bookkeeping per remembered form, roughly


class FormStore(Protocol):
    """Where forms are kept. All methods raise LedgerError where the store cannot serve."""

    async def claim(
        self, tenant: str, claims: Mapping[bytes, bytes], reads: Collection[bytes], now_us: int
    ) -> dict[bytes, bytes]:
        """Keep each text whose key has none yet, in one atomic step; then read.

        Returns the kept text for every key of `claims`, durable for other processes, and for each of
        `reads` that has one. Nothing of one tenant is ever seen by another.
        """
        ...

    async def forget(self, unused_since_us: int, limit: int) -> int:
        """Drop at most `limit` forms that were last used before then; returns how many there were.

        When a form was last used is known to a day (`FRESH_US`). Reserved tenants keep theirs.
        """
        ...


class Forms:
    """A `FormStore` behind a memory of `limit` bytes. Belongs to one event loop."""

    def __init__(self, store: FormStore, limit: int = MEMORY_BYTES) -> None:
        self._store = store
        self._known: Recent[tuple[str, bytes], tuple[bytes, int]] = Recent(
            limit, lambda known: len(known[0]) + _OVERHEAD
        )
        self._wipes = 0

    def wiped(self, tenant: str, keys: Collection[bytes], now_us: int) -> None:
        """Know that the texts under these keys are gone from the store: each is an empty one now."""
        self._wipes += 1
        for key in keys:
            self._known.put((tenant, key), (b"", now_us))

    @staticmethod
    def deadline() -> float:
        """When, by the event loop's clock, a request that begins now has waited long enough."""
        return asyncio.get_running_loop().time() + ANSWER_WITHIN_S

    async def answer(self, tenant: str, ask: Ask, now_us: int, deadline: float) -> dict[bytes, bytes]:
        """What layout asked for; what is not remembered comes from the store in one step.

        Raises LedgerError, or TimeoutError when the store has given no answer by the deadline.
        """
        answer: dict[bytes, bytes] = {}
        claims: dict[bytes, bytes] = {}
        reads: list[bytes] = []
        fresh_us = now_us - FRESH_US  # what was asked for before then is asked for again: it is in use
        for key, text in ask.claims.items():
            known = self._known.get((tenant, key))
            if known is None or known[1] < fresh_us:
                claims[key] = bytes(text)
            else:
                answer[key] = known[0]
        for key in ask.reads:
            known = self._known.get((tenant, key))
            if known is None or known[1] < fresh_us:
                reads.append(key)
            else:
                answer[key] = known[0]
        if claims or reads:
            wipes = self._wipes
            async with asyncio.timeout_at(deadline):
                found = await self._store.claim(tenant, claims, reads, now_us)
            if wipes == self._wipes:  # else one of them may have been read before its text went
                for key, text in found.items():
                    self._known.put((tenant, key), (text, now_us))
            answer |= found
        return answer
