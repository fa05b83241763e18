"""What the twin's server needs from ASGI: event streams, request ids, and noticing that a client left."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")


class EventStream(Response):
    """Server-sent events; closing the generator is what ends the work when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send events as they come until they end or the client is gone."""
        try:
            await unless_disconnected(receive, self._send(send))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class RequestIdHeader:
    """Answers carry the request's X-Request-Id, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wrap `send` for HTTP; everything else passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id") or uuid.uuid4().hex

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, stamped)


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, T]) -> T | None:
    """The result of `work`, or None when the client left first; then `work` has been cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
