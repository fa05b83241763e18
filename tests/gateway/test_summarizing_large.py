"""Summaries of histories that are too large for a thread of the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxgate.gateway.apart import Apart
from ctxgate.gateway.summarizing import summarize
from support.summaries import conversation, large, work_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]


async def test_a_large_history_is_written_in_another_process_and_reads_the_same(
    upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(upstream)
    work = await work_of(gateway.services, large(conversation(), 60_000))
    apart = await summarize(gateway.services, work, "extractive")
    asked: list[str] = []
    run = Apart.run

    async def noted(self: Apart, function: str, data: bytes) -> bytes:
        asked.append(function)
        return await run(self, function, data)

    monkeypatch.setattr(Apart, "run", noted)
    assert await summarize(gateway.services, work, "extractive") == apart
    assert asked == ["ctxgate.compression.summary_record:made"]
    monkeypatch.setattr("ctxgate.gateway.summarizing.SMALL_BYTES", 10**9)
    assert await summarize(gateway.services, work, "extractive") == apart
    assert len(asked) == 1


async def test_a_process_that_fails_costs_the_summary_and_nothing_else(
    upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(upstream)
    work = await work_of(gateway.services, large(conversation(), 60_000))
    monkeypatch.setattr("ctxgate.gateway.summarizing._MADE", "ctxgate.compression.summary_record:no_such")
    assert await summarize(gateway.services, work, "extractive") is None
    samples = await gateway.metrics()
    assert samples['ctxgate_summary_fallbacks_total{kind="failed"}'] == 1
