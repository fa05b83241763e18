"""Connections to replicas, kept for the next request while they are young.

Idle ones are closed before vLLM's own 5 s keep-alive ends, or a request could meet a connection that
the engine is just closing.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import partial
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, IPPROTO_TCP, SOCK_STREAM
from typing import TYPE_CHECKING, Final

from aiohappyeyeballs import start_connection

from ctxgate.inference.http_connection import Connection, Origin

if TYPE_CHECKING:
    from aiohappyeyeballs import AddrInfoType

IDLE_CONNECTION_S: Final = 3.5
_NEXT_ADDRESS_S: Final = 0.25  # then a host's next address is tried beside the one that is silent


class ConnectionPool:
    """Belongs to one event loop. `connect_timeout_s` covers name, connection and TLS."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._open: set[Connection] = set()
        self._idle: dict[Origin, list[Connection]] = {}  # each list the youngest last
        self._timer: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    async def take(self, origin: Origin) -> Connection:
        """An idle connection, else a new one. Raises OSError, of which TimeoutError is a kind."""
        idle = self._idle.get(origin)
        if idle:
            connection = idle.pop()
            if connection.reusable and not self._is_old(connection):
                return connection
            connection.abort()
            for older in idle:
                older.abort()
            idle.clear()
        return await self._connect(origin)

    def give_back(self, connection: Connection) -> None:
        """The exchange is over; a connection that cannot carry another one is closed."""
        connection.rest()
        if not connection.reusable or connection not in self._open:
            connection.abort()
            return
        self._idle.setdefault(connection.origin, []).append(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_CONNECTION_S, self._sweep)

    async def close(self) -> None:
        """Close every connection, also those in use."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in tuple(self._open):
            connection.abort()
        self._open.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # let the transports' close callbacks run

    @staticmethod
    def _is_old(connection: Connection) -> bool:
        return asyncio.get_running_loop().time() - connection.since >= IDLE_CONNECTION_S

    def _sweep(self) -> None:
        """Close what has been idle for long enough, and look again when the next one has."""
        self._timer = None
        young: list[float] = []
        for idle in self._idle.values():
            for connection in idle:
                if self._is_old(connection):
                    connection.abort()
            idle[:] = [connection for connection in idle if not self._is_old(connection)]
            young += [connection.since for connection in idle]
        if young:
            self._timer = asyncio.get_running_loop().call_at(min(young) + IDLE_CONNECTION_S, self._sweep)

    async def _connect(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            sock = await start_connection(
                await _addresses(origin), happy_eyeballs_delay=_NEXT_ADDRESS_S, interleave=1, loop=loop
            )
            _, connection = await loop.create_connection(
                partial(Connection, origin, self._ended),
                sock=sock,
                ssl=self._tls_context() if origin.tls else None,
                server_hostname=origin.host if origin.tls else None,
            )
        if not connection.closed:  # else it is gone again, which its user is told
            self._open.add(connection)
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _ended(self, connection: Connection) -> None:
        """A connection is gone, perhaps while it was idle."""
        self._open.discard(connection)
        idle = self._idle.get(connection.origin, [])
        if connection in idle:
            idle.remove(connection)


async def _addresses(origin: Origin) -> list[AddrInfoType]:
    """What a host's name stands for; an address stands for itself, and is not looked up."""
    try:
        version = ip_address(origin.host).version
    except ValueError:
        loop = asyncio.get_running_loop()
        return [*await loop.getaddrinfo(origin.host, origin.port, type=SOCK_STREAM)]
    if version == 4:  # IPv4
        return [(AF_INET, SOCK_STREAM, IPPROTO_TCP, "", (origin.host, origin.port))]
    return [(AF_INET6, SOCK_STREAM, IPPROTO_TCP, "", (origin.host, origin.port, 0, 0))]
