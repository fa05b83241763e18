"""Pooled connections against vLLM's keep-alive: no request meets a connection that the engine is closing.

uvicorn closes a connection that has been idle for 5 s. A client that keeps one for as long or longer
sends, now and then, into a closing socket, and the request is lost.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import pytest

from ctxgate.gateway.ledger import Outcome
from e2e.gateway_process import SECRET, GatewayConfig, serving
from e2e.leaving import Visit, pay

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

KEEP_ALIVE_S: Final = 5.0  # vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE
GAPS_S: Final = (KEEP_ALIVE_S - 0.02, KEEP_ALIVE_S, KEEP_ALIVE_S + 0.02, 3.5)
BURST: Final = 16
BODY: Final[dict[str, Any]] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 1,
}


async def test_the_engine_does_close_idle_connections(engines: Mapping[str, Engine]) -> None:
    """The hazard is real: without it the test below would show nothing."""
    address = urlsplit(engines["standard"].url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(f"GET /health HTTP/1.1\r\nhost: {address.netloc}\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    answered = time.monotonic()
    async with asyncio.timeout(2 * KEEP_ALIVE_S):
        assert await reader.read() == b""
    assert time.monotonic() - answered > KEEP_ALIVE_S / 2, "it had been kept alive until then"
    writer.close()


async def test_api_a14_routing_e9_requests_around_the_idle_time_out_all_succeed(
    engines: Mapping[str, Engine], tmp_path: Path
) -> None:
    """Bursts, so that many pooled connections are idle at once, spaced to meet the engine's closing."""
    with serving(GatewayConfig(tmp_path, {"standard": [engines["standard"].url]})) as gateway:
        for gap_s in (*GAPS_S, 0.0):
            seen = await asyncio.gather(
                *(pay(gateway.url, SECRET, Visit("/v1/chat/completions", BODY)) for _ in range(BURST))
            )
            assert [one.status for one in seen] == [200] * BURST
            await asyncio.sleep(gap_s)  # the wait is the scenario
        rows = gateway.rows()
    assert len(rows) == BURST * (len(GAPS_S) + 1)
    assert {row.settled.outcome for row in rows} == {Outcome.COMPLETED}
    assert {row.opened.attempt_number for row in rows} == {1}
