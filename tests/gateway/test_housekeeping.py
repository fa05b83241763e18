"""Unused forms are forgotten in small steps; used ones are asked for again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctxgate.compression.ask import Ask
from ctxgate.gateway import housekeeping
from ctxgate.gateway.forms import FRESH_US, Forms
from ctxgate.gateway.ledger import LedgerUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import pytest

KEY = b"k" * 32


@dataclass
class Store:
    """Holds so many unused forms; fails where it is told to."""

    unused: int = 0
    fails: bool = False
    forgotten: list[tuple[int, int]] = field(default_factory=list)
    claimed: list[int] = field(default_factory=list)

    async def claim(
        self, tenant: str, claims: Mapping[bytes, bytes], reads: Collection[bytes], now_us: int
    ) -> dict[bytes, bytes]:
        self.claimed.append(now_us)
        return dict.fromkeys((*claims, *reads), b"first")

    async def forget(self, unused_since_us: int, limit: int) -> int:
        self.forgotten.append((unused_since_us, limit))
        if self.fails:
            raise LedgerUnavailable("busy")
        gone = min(self.unused, limit)
        self.unused -= gone
        return gone


async def rounds(store: Store, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """So many hours of housekeeping."""
    waits = iter(range(count))
    over = asyncio.Event()

    async def pause(_: float) -> None:
        if next(waits, None) == count - 1:
            over.set()
            await asyncio.Event().wait()

    monkeypatch.setattr("ctxgate.gateway.housekeeping.asyncio.sleep", pause)
    task = asyncio.create_task(housekeeping.forget_forms(store, 30, lambda: 31 * FRESH_US))
    await over.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_all_unused_forms_go_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(unused=1_200)
    await rounds(store, monkeypatch, 1)
    assert store.unused == 0
    assert store.forgotten == [(FRESH_US, 500)] * 3


async def test_a_store_that_fails_is_asked_again_an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(unused=3, fails=True)
    await rounds(store, monkeypatch, 2)
    assert (store.unused, len(store.forgotten)) == (3, 2)


async def test_a_remembered_form_is_asked_for_once_a_day() -> None:
    store = Store()
    forms = Forms(store)
    for now_us in (0, 1, FRESH_US, FRESH_US + 1, FRESH_US + 2):
        assert await forms.answer("t", Ask({KEY: b"mine"}), now_us) == {KEY: b"first"}
    assert store.claimed == [0, FRESH_US + 1]
