"""The listening socket of `ctxgate serve`, and what its connections inherit."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.cli import main
from ctxgate.gateway.commands.serve import KEEP_ALIVE_S, STALLED_MS, listen, make_server
from ctxgate.inference.connections import IDLE_CONNECTION_S
from support.gateway import until
from support.serving import configuration

if TYPE_CHECKING:
    from pathlib import Path

    from support.gateway import Gateway


async def test_connections_send_at_once_and_notice_clients_that_stall_or_vanish(gateway: Gateway) -> None:
    async with gateway.wire():
        await until(lambda: gateway.state.connections)
        (connection,) = gateway.state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == STALLED_MS


def test_a_taken_port_is_an_error_and_leaves_no_socket_open() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])


def test_api_a14_the_gateway_outlasts_its_clients_connections_and_not_its_upstreams() -> None:
    vllm_closes_after_s = 5.0
    assert vllm_closes_after_s - 1 >= IDLE_CONNECTION_S
    assert KEEP_ALIVE_S >= 75
    settings = make_server(lambda: None, "info").config  # type: ignore[arg-type]  # nothing is served
    assert settings.timeout_keep_alive == KEEP_ALIVE_S
    assert (settings.access_log, settings.proxy_headers, settings.server_header) == (False, False, False)


CLOSING_FAILS = """
import sys
from ctxgate.gateway.cli import main
from ctxgate.gateway.ledger import LedgerUnavailable
from ctxgate.gateway.stores.sqlite import SqliteLedger

async def close(self):
    raise LedgerUnavailable("settlements were lost at close")

if sys.argv.pop(1) == "fails":
    SqliteLedger.close = close
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.integration
@pytest.mark.parametrize(("closing", "code"), [("works", 0), ("fails", 1)])
async def test_the_exit_code_tells_when_settlements_were_lost_at_the_end(
    tmp_path: Path, closing: str, code: int
) -> None:
    file = configuration(tmp_path, "http://127.0.0.1:9")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLOSING_FAILS, closing, "serve", "-c", str(file), "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert await process.stdout.readline()
    async for line in process.stderr:  # the application runs: it has asked the replica
        if b"is down" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, errors = await process.communicate()
    assert process.returncode == code
    assert (b"lost at close" in errors) is (code == 1)


def test_a_ledger_that_cannot_be_used_is_one_line_and_leaves_no_socket_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = configuration(tmp_path, "http://127.0.0.1:9")
    database = tmp_path / "ledger.db"
    database.write_bytes(b"not SQLite at all" * 99)
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    assert main(["serve", "-c", str(file), "--port", str(port)]) == 2
    assert capsys.readouterr().err == f"cannot use the ledger {database}: file is not a database\n"
    listen("127.0.0.1", port).close()
