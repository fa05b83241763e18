"""The ASGI application: hot routes as raw ASGI, everything else on FastAPI.

This is the composition root: the one place where the working parts are made and put together.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.edge import WHEN_LEFT, ClientGone, Reply, Stopping, read_body, read_headers
from ctxgate.gateway.errors import Kind, Refused
from ctxgate.gateway.fleet import Fleet
from ctxgate.gateway.flow import PATHS
from ctxgate.gateway.forms import Forms
from ctxgate.gateway.identity import authenticate
from ctxgate.gateway.inbound import read_inbound
from ctxgate.gateway.keys import KeyRing
from ctxgate.gateway.layout import LayoutStage
from ctxgate.gateway.pipeline import Pipeline
from ctxgate.gateway.routes import management
from ctxgate.gateway.services import Services, random_id
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.gateway.telemetry import Telemetry
from ctxgate.inference import rates
from ctxgate.inference.chat_stream import error_event
from ctxgate.inference.client import UpstreamClient
from ctxgate.inference.probe import probe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

    from ctxgate.gateway.config import Config
    from ctxgate.gateway.edge import Message, Receive, Send
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.flow import Surface
    from ctxgate.gateway.ledger import AttemptOpened
    from ctxgate.inference.rates import Charge
    from ctxgate.inference.usage import Usage

log = logging.getLogger(__name__)
_BROKEN_OFF: Final = error_event(
    "The gateway failed inside this answer.", kind="server_error", code="internal_error"
)
PROBE_EVERY_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 5.0


class Application:
    """The gateway as an ASGI application for one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.services: Services | None = None
        self.stopping = Stopping()
        self._keys = KeyRing(config.keys)
        self._rest: FastAPI = management(self)
        self._rest.router.lifespan_context = self._lifespan

    def begin_shutdown(self) -> None:
        """The server takes no new connections; requests that are being read need not wait for their rest."""
        self.stopping.set()

    def call_off(self) -> None:
        """End every open call at its engine, so that what it used is booked before the process ends."""
        if self.services is not None:
            for attempt in tuple(self.services.attempts):
                attempt.call_off()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http":
            surface = PATHS.get(scope["path"].rstrip("/"))
            if surface is not None and self.services is not None:
                await self._hot(surface, scope, receive, send, self.services)
                return
        await self._rest(scope, receive, send)

    async def _hot(
        self, surface: Surface, scope: Message, receive: Receive, send: Send, services: Services
    ) -> None:
        """One request on a metered surface, and whatever becomes of it."""
        reply = Reply(receive, send)
        request_id = f"req_{random_id()}"
        services.telemetry.clients.inc()
        try:
            await self._answer(request_id, surface, scope, receive, reply, services)
        except Refused as refused:
            headers = [(b"x-request-id", request_id.encode())]
            if refused.kind is Kind.METHOD_NOT_ALLOWED:
                headers.append((b"allow", b"POST"))
            if refused.kind in (Kind.BODY_TOO_LARGE, Kind.UNKNOWN_KEY, Kind.MISSING_KEY):
                headers.append((b"connection", b"close"))  # the rest of the body is not read
            await reply.refuse(refused, headers)
        except asyncio.CancelledError:
            if not self.stopping.is_set():
                raise
            log.warning("request %s was cut off at the end of the shutdown's grace", request_id)
        except ClientGone:
            pass  # it left before its request was whole: there is nobody to answer and nothing to book
        except Exception:  # whatever the defect, its client gets an answer, and the server goes on
            log.exception("request %s failed", request_id)
            if not reply.started:
                internal = Refused(Kind.INTERNAL, "The gateway failed to handle this request.")
                await reply.refuse(internal, [(b"x-request-id", request_id.encode())])
            else:
                await reply.end(_BROKEN_OFF if reply.streams else b"")
        finally:
            reply.unwatch()
            services.telemetry.clients.dec()
            services.telemetry.request(surface.value, reply.status)

    async def _answer(
        self,
        request_id: str,
        surface: Surface,
        scope: Message,
        receive: Receive,
        reply: Reply,
        services: Services,
    ) -> None:
        if scope["method"] != "POST":
            raise Refused(Kind.METHOD_NOT_ALLOWED, "This path takes POST requests only.")
        received_at_us = services.now_us()
        headers = read_headers(scope["headers"])
        authenticate(headers, self._keys.find)  # before the body: a stranger's body is not worth reading
        raw = await read_body(receive, headers, self.config.limits.max_body_bytes, self.stopping)
        inbound = read_inbound(request_id, surface, headers, raw, received_at_us)
        reply.watch(scope.get("extensions", {}).get(WHEN_LEFT))
        await Pipeline(services).serve(inbound, reply)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Start the working parts, recover what a dead process left, and end everything in order."""
        ledger = SqliteLedger(self.config.store, price=self._price)
        crashed = list(await ledger.recover())
        if crashed:
            log.warning("settled %d attempts that a dead gateway process had left open", len(crashed))
        client = UpstreamClient(self.config.limits.connect_timeout_s)
        fleet = Fleet(self.config.pools)
        telemetry = Telemetry()
        layout = LayoutStage(
            Forms(ledger.forms), lambda reason: telemetry.layout_dropped.labels(reason).inc()
        )
        services = Services(self.config, self._keys, ledger, client, fleet, telemetry, layout)
        prober = asyncio.create_task(_probe_all(services))
        self.services = services
        try:
            yield
        finally:
            self.services = None
            prober.cancel()
            await asyncio.gather(prober, *services.background, return_exceptions=True)
            await client.close()
            await ledger.close()

    def _price(self, attempt: AttemptOpened, usage: Usage) -> Charge:
        """The price of an attempt found open after a crash, at the rates of the day it was opened."""
        day = datetime.fromtimestamp(attempt.opened_at_us / 1e6, UTC).date()
        return rates.charge(usage, self.config.pools[attempt.pool].rates, day)


async def _probe_all(services: Services) -> None:
    """Ask every replica how it is, for as long as the gateway runs; a slow one holds no other back."""
    await asyncio.gather(*(_keep_probing(services, record) for record in services.fleet.records()))


async def _keep_probing(services: Services, record: ReplicaRecord) -> None:
    while True:
        try:
            await _probe_one(services, record)
        except Exception:  # an answer nobody thought of must not end the probing
            log.exception("probing replica %s/%s failed", record.pool.name, record.replica.name)
        await asyncio.sleep(PROBE_EVERY_S)


async def _probe_one(services: Services, record: ReplicaRecord) -> None:
    pool, replica = record.pool.name, record.replica.name
    headers = services.upstream_headers(record.pool)
    result = await probe(services.client, record.replica.url, headers, PROBE_TIMEOUT_S)
    was_up = record.health.probe_ok
    services.fleet.probed(pool, replica, result)
    if record.health.probe_ok and not was_up:
        log.info("replica %s/%s is up", pool, replica)
    elif was_up and not record.health.probe_ok:
        log.warning("replica %s/%s is down (%s)", pool, replica, result.finding.name.lower())
