"""Fixtures of the tests that talk to a running gateway in front of a scripted upstream."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from support.gateway import Gateway
    from support.upstream import Upstream

# Time judges no test: a busy machine is slow, not wrong. `make unit` tries fewer examples than `make test`.
_UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("full", **_UNTIMED)
settings.register_profile("quick", max_examples=15, **_UNTIMED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "full"))

# Fixtures that start a server or open a database file: whoever uses one is no unit test.
_SERVERS = frozenset({"upstream", "other_upstream", "start_gateway", "gateway"})
_STORES = frozenset({"ledger", "open_ledger", "opened", "ledger_file", "database"})
# What starts a process or opens such a file without a fixture, by the names that a test's code uses.
_EFFECTS = frozenset({"subprocess", "printed", "SqliteLedger", "SqliteForms", "SqliteArchive"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests with servers, processes and database files, so that `make unit` can leave them out."""
    for item in items:
        if isinstance(item, pytest.Function) and (
            (_SERVERS | _STORES) & set(item.fixturenames) or not _EFFECTS.isdisjoint(_names(item.obj))
        ):
            item.add_marker(pytest.mark.integration)


def pytest_configure() -> None:
    """Collect garbage seldom: thousands of small tests leave hardly any cycles behind."""
    gc.set_threshold(50_000, 20, 100)


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of every later collection."""
    gc.collect()
    gc.freeze()


def _names(test: Any) -> tuple[str, ...]:
    """The global names that a test's own code uses; those of a property are its inner test's."""
    inner = getattr(getattr(test, "hypothesis", None), "inner_test", test)
    names: tuple[str, ...] = inspect.unwrap(inner).__code__.co_names
    return names


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
