"""Waits that end even where what they wait for does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ctxgate.gateway.ledger import LedgerUnavailable
from ctxgate.gateway.patience import Patience


async def test_a_wait_ends_with_its_step_whatever_becomes_of_it() -> None:
    patience = Patience(1000.0)
    loop = asyncio.get_running_loop()
    good, bad = loop.create_future(), loop.create_future()
    waits = [asyncio.create_task(patience.wait(step)) for step in (good, bad)]
    await asyncio.sleep(0)
    assert not any(wait.done() for wait in waits)
    good.set_result(True)
    bad.set_exception(LedgerUnavailable("disk full"))
    await asyncio.gather(*waits)
    await patience.wait(good)
    await patience.wait(None)


async def test_steps_that_take_too_long_are_given_up_and_one_timer_serves_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    patience, later, timers = Patience(0.01), loop.call_later, list[float]()

    def counted(delay: float, *rest: Any) -> asyncio.TimerHandle:
        timers.append(delay)
        return later(delay, *rest)

    monkeypatch.setattr(loop, "call_later", counted)
    steps = [loop.create_future() for _ in range(3)]
    waits = [asyncio.create_task(patience.wait(step)) for step in steps]
    await asyncio.sleep(0)
    steps[1].set_result(True)
    await asyncio.gather(*waits)
    assert [step.result() for step in steps] == [None, True, None]
    assert timers == [0.01]
    late = loop.create_future()
    await patience.wait(late)  # after all of them were given up, the next one is, too
    assert late.result() is None
    assert timers == [0.01, 0.01]


async def test_a_wait_that_is_cancelled_ends_and_holds_no_other_back() -> None:
    patience = Patience(0.001)
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    cancelled, waiting = (asyncio.create_task(patience.wait(step)) for step in (first, second))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await waiting
    assert second.result() is None
