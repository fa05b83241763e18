"""The ASGI application: hot routes as raw ASGI, everything else on FastAPI."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.assembly import assembled
from ctxgate.gateway.edge import (
    BODY_IS_WHOLE,
    WHEN_LEFT,
    ClientGone,
    Reply,
    Stopping,
    read_body,
    read_headers,
)
from ctxgate.gateway.errors import Kind, Refused
from ctxgate.gateway.flow import PATHS
from ctxgate.gateway.hosted import serve_hosted
from ctxgate.gateway.identity import authenticate
from ctxgate.gateway.inbound import read_inbound
from ctxgate.gateway.keys import KeyRing
from ctxgate.gateway.kv_watch import watch_events
from ctxgate.gateway.pipeline import Pipeline
from ctxgate.gateway.replica_watch import watch
from ctxgate.gateway.routes import management
from ctxgate.gateway.services import random_id
from ctxgate.inference.chat_stream import error_event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from fastapi import FastAPI

    from ctxgate.gateway.config import Config
    from ctxgate.gateway.edge import Message, Receive, Send
    from ctxgate.gateway.flow import Surface
    from ctxgate.gateway.reload import Reloader
    from ctxgate.gateway.services import Services

log = logging.getLogger(__name__)
_BROKEN_OFF: Final = error_event(
    "The gateway failed inside this answer.", kind="server_error", code="internal_error"
)


class Application:
    """The gateway as an ASGI application for one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.services: Services | None = None
        self.stopping = Stopping()
        self.generation = 1  # of the configuration
        self.reloader: Reloader | None = None  # told by SIGHUP
        self._keys = KeyRing(config.keys)
        self._rest: FastAPI = management(self)
        self._rest.router.lifespan_context = self._lifespan

    def reconfigure(self, config: Config) -> None:
        """Serve by another configuration from now on; requests that run end under the old one."""
        self.config = config
        self._keys = KeyRing(config.keys)
        self.generation += 1
        if self.services is not None:
            self.services.reconfigure(config, self._keys)
            serve_hosted(self.services.client, config)
            self.services.telemetry.generation.set(self.generation)

    def begin_shutdown(self) -> None:
        """The server takes no new connections; requests that are being read need not wait for their rest."""
        self.stopping.set()

    def call_off(self) -> None:
        """End every open call at its engine, so that what it used is booked before the process ends."""
        if self.services is not None:
            self.services.called_off = True
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
        # Before the body: a stranger's body is not worth reading.
        key = authenticate(headers, self._keys.find)
        extensions = scope.get("extensions", {})
        raw = await read_body(
            receive, headers, self.config.limits.max_body_bytes, self.stopping, extensions.get(BODY_IS_WHOLE)
        )
        inbound = read_inbound(request_id, surface, headers, raw, received_at_us)
        reply.watch(extensions.get(WHEN_LEFT))
        await Pipeline(services).serve(inbound, key, reply)

    @contextmanager
    def _hearing_reloads(self) -> Iterator[None]:
        """Read the configuration again at each SIGHUP."""
        if self.reloader is None:
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self.reloader.ask)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Start the working parts and the watch over the replicas, and end everything in order."""
        async with assembled(self.config, self._keys) as services:
            watching = asyncio.gather(watch(services), watch_events(services))
            self.services = services
            try:
                services.telemetry.generation.set(self.generation)
                with self._hearing_reloads():
                    yield
            finally:
                self.services = None
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
