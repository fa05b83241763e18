"""The listening socket of `ctxgate serve`, and what its connections inherit."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.commands.serve import KEEP_ALIVE_S, STALLED_MS, listen, make_server
from ctxgate.inference.client import IDLE_CONNECTION_S
from support.gateway import until

if TYPE_CHECKING:
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
    settings = make_server(lambda: None, "info").config
    assert settings.timeout_keep_alive == KEEP_ALIVE_S
    assert (settings.access_log, settings.proxy_headers, settings.server_header) == (False, False, False)
