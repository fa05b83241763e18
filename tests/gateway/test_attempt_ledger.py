"""An attempt and a ledger that is slow or fails: what the client gets, and what is booked in the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.ledger import LedgerUnavailable, Outcome
from ctxgate.gateway.patience import Patience
from ctxgate.gateway.stores.results import deliver
from support.gateway import HELLO, STREAM, bearer, until
from support.upstream import by_hand

if TYPE_CHECKING:
    from support.gateway import Gateway
    from support.upstream import Upstream


class Held:
    """A ledger whose steps wait for the test, in front of the real one."""

    def __init__(self, gateway: Gateway) -> None:
        self._ledger = gateway.services.ledger
        gateway.services.ledger = self
        self.opening: asyncio.Future[None] | None = None
        self.settling: asyncio.Future[bool] | None = None
        self.settled: list[Any] = []
        self.healthy = True

    def open(self, row: Any) -> asyncio.Future[None]:
        done = self._ledger.open(row)
        return done if self.opening is None else self.opening

    def settle(self, row: Any) -> asyncio.Future[bool]:
        self.settled.append(row)
        done = self._ledger.settle(row)
        return done if self.settling is None else self.settling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_store_that_refuses_the_opening_now_does_not_throw_the_answer_away(
    gateway: Gateway, upstream: Upstream, stream: bool
) -> None:
    ledger = Held(gateway)
    ledger.opening = asyncio.get_running_loop().create_future()
    deliver([(ledger.opening, LedgerUnavailable("disk full"))])
    answer = await gateway.post(HELLO | {"stream": stream})
    assert answer.status == 200
    (row,) = ledger.settled  # with its opening kept by the ledger, which writes both when it can
    assert (row.outcome, row.usage.prompt) == (Outcome.COMPLETED, 40)
    await gateway.quiet()


async def test_while_the_store_fails_no_engine_is_asked(gateway: Gateway, upstream: Upstream) -> None:
    ledger = Held(gateway)
    ledger.healthy = False
    answer = await gateway.post(HELLO)
    assert (answer.status, answer.error["code"]) == (503, "ledger_unavailable")
    assert answer.header("retry-after") == "2"
    assert (upstream.calls, ledger.settled) == ([], [])
    ledger.healthy = True
    assert (await gateway.post(HELLO)).status == 200


async def test_no_byte_of_an_answer_leaves_before_the_attempt_is_open(
    gateway: Gateway, upstream: Upstream
) -> None:
    ledger = Held(gateway)
    ledger.opening = asyncio.get_running_loop().create_future()
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()  # the call itself does not wait for the disk
        exchange.head()
        exchange.text("x")
        head = asyncio.create_task(wire.head())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not head.done()
        ledger.opening.set_result(None)
        assert (await head).status == 200
        exchange.chunk({}, "stop")
        exchange.done()
        while await wire.chunk():
            pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_store_that_is_slow_to_settle_does_not_keep_the_answer_for_long(
    gateway: Gateway, upstream: Upstream, stream: bool
) -> None:
    gateway.services.patience = Patience(0.02)
    ledger = Held(gateway)
    ledger.settling = asyncio.get_running_loop().create_future()
    answer = await gateway.post(HELLO | {"stream": stream})
    assert answer.status == 200
    if stream:
        assert answer.events[-1] == b"[DONE]"
    assert len(ledger.settled) == 1
    assert ledger.settling.result() is None  # given up


async def test_an_exchange_that_runs_out_of_time_while_it_is_booked_is_answered_all_the_same(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.attempt._AFTER_DONE_S", 0.01)
    gateway.services.patience = Patience(0.1)
    ledger = Held(gateway)
    ledger.settling = asyncio.get_running_loop().create_future()
    answer = await gateway.post(STREAM)
    assert answer.events[-1] == b"[DONE]"
    assert [row.outcome for row in ledger.settled] == [Outcome.COMPLETED]
    assert ledger.settling.done()  # given up


async def test_a_client_that_leaves_while_its_answer_is_booked_changes_nothing(
    gateway: Gateway, upstream: Upstream
) -> None:
    ledger = Held(gateway)
    ledger.settling = asyncio.get_running_loop().create_future()
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        await wire.head()
        await until(lambda: ledger.settled)
    await until(lambda: not gateway.state.connections)
    ledger.settling.set_result(True)
    await gateway.quiet()
    assert [row.outcome for row in ledger.settled] == [Outcome.COMPLETED]
    assert upstream.abort_calls == []


async def test_a_store_and_an_upstream_that_both_fail_leave_no_exception_behind(
    gateway: Gateway, upstream: Upstream
) -> None:
    await upstream.stop()
    ledger = Held(gateway)
    ledger.opening = asyncio.get_running_loop().create_future()
    deliver([(ledger.opening, LedgerUnavailable("disk full"))])
    ledger.settling = asyncio.get_running_loop().create_future()
    deliver([(ledger.settling, LedgerUnavailable("disk full"))])
    answer = await gateway.post(HELLO)
    assert answer.status in (502, 503)
    ledger.opening = ledger.settling = None  # dropped, as the ledger does; the fixture sees what is left
    await upstream.start()
