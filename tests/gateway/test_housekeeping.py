"""Unused forms are forgotten in small steps; used ones are asked for again."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.ask import Ask
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway import housekeeping
from ctxgate.gateway.config import Key
from ctxgate.gateway.flow import Identified, Inbound, Surface, Task
from ctxgate.gateway.forms import FRESH_US, Forms
from ctxgate.gateway.layout import LayoutStage
from ctxgate.gateway.ledger import LedgerUnavailable
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.inference import wire
from support.ledgers import price

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

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
        assert await forms.answer("t", Ask({KEY: b"mine"}), now_us, forms.deadline()) == {KEY: b"first"}
    assert store.claimed == [0, FRESH_US + 1]


@pytest.mark.parametrize("level", [Level.SAFE, Level.DECLARED])
async def test_what_is_in_use_outlives_what_is_not(tmp_path: Path, level: Level) -> None:
    """A conversation that goes on each day for two months is the same to a process that then starts."""
    policy = Policy(level, kinds=frozenset({VolatileKind.CLOCK}))
    ledger = SqliteLedger(tmp_path / "ledger.db", price=price)
    try:
        stage = LayoutStage(Forms(ledger.forms), pytest.fail)
        sent: list[Any] = []
        for day in range(60):
            now_us = (day + 100) * (FRESH_US + 1)
            await ledger.forms.forget(now_us - 30 * FRESH_US, 1_000)
            sent.append(await laid(stage, request(day), policy, now_us))
        restarted = LayoutStage(Forms(ledger.forms), pytest.fail)
        again = await laid(restarted, request(59), policy, now_us)
    finally:
        await ledger.close()
    assert again == sent[-1]
    assert [tool["function"]["name"] for tool in again["tools"]] == ["b", "a"]
    if level is Level.DECLARED:  # the notes of the first days are where they were
        assert again["messages"][:6] == sent[5]["messages"][:6]
        assert all("As of" in each["content"] or each["role"] == "system" for each in again["messages"][:6])


def request(day: int) -> bytes:
    """The conversation after so many days: a message each, a clock in the head, tools in turn."""
    messages = [
        {"role": "system", "content": f"Be brief.\nCurrent time: 2026-01-{1 + day % 28:02}T09:00:00Z"}
    ]
    messages += [{"role": "user", "content": f"Day {number}. " + "word " * 200} for number in range(day + 1)]
    names = ("b", "a") if day % 2 == 0 else ("a", "b")
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]
    return json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()


async def laid(stage: LayoutStage, raw: bytes, policy: Policy, now_us: int) -> Any:
    """What one request goes out as."""
    body = wire.parse(raw)
    messages = tuple(body.items("messages"))
    inbound = Inbound("r", Surface.CHAT, {}, body, messages, "m", stream=False, received_at_us=now_us)
    key = Key("k", b"", "alpha", "acme")
    identified = Identified(inbound, key, Task("t", "header"), b"")
    return json.loads((await stage.lay_out(identified, policy, now_us)).body.raw)


@dataclass
class OldOriginals:
    """Holds so many originals that were kept long ago."""

    old: int
    expired: list[tuple[int, int]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def expire(self, kept_before_us: int, limit: int) -> int:
        self.expired.append((kept_before_us, limit))
        gone = min(self.old, limit)
        self.old -= gone
        if not self.old:
            self.gone.set()
        return gone


async def test_old_originals_go_in_steps() -> None:
    originals: Any = OldOriginals(old=700)
    task = asyncio.create_task(housekeeping.expire_originals(originals, 30, lambda: 31 * FRESH_US))
    await originals.gone.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert originals.expired == [(FRESH_US, 500)] * 2
