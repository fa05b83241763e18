"""Fixtures of the tests that talk to a running gateway in front of a scripted upstream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from support.gateway import Gateway
    from support.upstream import Upstream


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    """A scripted upstream."""
    from support.upstream import Upstream

    server = Upstream()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def other_upstream() -> AsyncIterator[Upstream]:
    """A second scripted upstream."""
    from support.upstream import Upstream

    server = Upstream()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def start_gateway(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Gateway]]]:
    """Start gateways in front of given upstreams; keyword arguments are those of `support.gateway.config`."""
    from support.gateway import Gateway, config

    started: list[Gateway] = []
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    async def start(*upstreams: Upstream, **options: Any) -> Gateway:
        store = options.pop("store", tmp_path / f"ledger-{len(started)}.db")
        gateway = await Gateway.start(config(store, [one.url for one in upstreams], **options))
        started.append(gateway)
        return gateway

    yield start
    for gateway in started:
        await gateway.stop()
    assert unhandled == []  # an exception in a task or callback that nobody saw


@pytest.fixture
async def gateway(upstream: Upstream, start_gateway: Callable[..., Awaitable[Gateway]]) -> Gateway:
    """A gateway with one replica, the scripted upstream."""
    return await start_gateway(upstream)
