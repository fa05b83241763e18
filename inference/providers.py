"""Pools at hosted providers, called through LiteLLM behind the interface of the client for servers.

Providers.serve()    LiteLLM gets ready in a thread; until it is, calls wait and probes find nobody
Providers.open()     one chat call; its answer reads like a server's
response.close()     hangs up, which is all the abort that a provider offers
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.inference import provider_start
from ctxgate.inference import provider_wire as wire
from ctxgate.inference.client import Dropped, Unreachable, UpstreamClient, UpstreamResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from ctxgate.inference.engine_load import EngineLoad
    from ctxgate.inference.wire import Pieces

log = logging.getLogger(__name__)
CHAT_PATH: Final = "/v1/chat/completions"
_LONGEST_S: Final = 86_400.0  # the gateway's own limits are shorter
_QUEUED: Final = 256
_DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Hosted:
    """A pool at a provider: its model by LiteLLM's name, its key, the names of the models that lead here."""

    model: str
    api_key: str
    base_url: str | None
    names: tuple[str, ...]
    window: int | None

    @property
    def hidden(self) -> tuple[str, ...]:
        """What no client is to read in an error that the provider reports."""
        return self.api_key, self.base_url or ""

    def call(self) -> dict[str, Any]:
        """The arguments that every call of the pool has. Retries are the gateway's."""
        own = {"model": self.model, "api_key": self.api_key, "timeout": _LONGEST_S}
        place = {} if self.base_url is None else {"api_base": self.base_url}
        return own | place | {"num_retries": 0, "max_retries": 0, "drop_params": True}


class ProviderResponse(UpstreamResponse):
    """An answer of a provider, in the bytes that a server would have sent."""

    __slots__ = ("_chunks", "_ended", "_pump")

    def __init__(self, status: int, body: bytes | None = None) -> None:
        self.status = status
        self.raw_content_type = b"application/json" if body is not None else b"text/event-stream"
        self._chunks: asyncio.Queue[bytes | Dropped] = asyncio.Queue(_QUEUED)
        self._ended: Dropped | bool = False
        self._pump: asyncio.Task[None] | None = None
        if body is not None:
            self._chunks.put_nowait(body)
            self._chunks.put_nowait(b"")

    @property
    def metadata(self) -> bytes:
        """Nothing: only vLLM has that header."""
        return b""

    @property
    def load(self) -> EngineLoad | None:
        """Nothing: a provider does not tell its load."""
        return None

    async def next_chunk(self) -> bytes:
        """The bytes that have arrived since the last call; none at the end. Raises `Dropped`."""
        if self._ended:
            if isinstance(self._ended, Dropped):
                raise self._ended
            return b""
        parts: list[bytes] = []
        item = await self._chunks.get()
        while True:
            if isinstance(item, Dropped) or not item:
                self._ended = item if isinstance(item, Dropped) else True
                break
            parts.append(item)
            if self._chunks.empty():
                break
            item = self._chunks.get_nowait()
        return b"".join(parts) if parts else await self.next_chunk()

    async def drain(self, seconds: float) -> None:
        """Nothing: the provider's connection is not ours to keep."""

    def close(self) -> None:
        """The exchange is over; a stream that still runs is hung up on."""
        if self._pump is not None:
            self._pump.cancel()

    def pump(self, stream: Any, first: Sequence[Any], model: str | None, hidden: Sequence[str]) -> None:
        """Read a stream of LiteLLM's in the background, behind its `first` chunks."""
        self._pump = asyncio.get_running_loop().create_task(self._pumped(stream, first, model, hidden))

    async def _pumped(
        self, stream: Any, first: Sequence[Any], model: str | None, hidden: Sequence[str]
    ) -> None:
        try:
            async for chunk in _behind(first, stream):
                dumped = chunk.model_dump(exclude_none=True)
                if _finishes(dumped) and getattr(stream, "received_finish_reason", True) is None:
                    await self._chunks.put(Dropped("the stream ended early"))  # the reason is LiteLLM's own
                    return
                document = wire.answer(dumped, model, usage_reported=_reported(stream))
                if document["choices"] or "usage" in document:
                    await self._chunks.put(b"data: " + msgspec.json.encode(document) + b"\n\n")
            await self._chunks.put(_DONE)
            await self._chunks.put(b"")
        except Exception as error:  # noqa: BLE001 - LiteLLM's errors have no common base
            if wire.is_broken(error) or wire.not_connected(error):
                await self._chunks.put(Dropped(type(error).__name__))
                return
            _, body = wire.refusal(error, hidden)
            await self._chunks.put(b"data: " + body + b"\n\n" + _DONE)
            await self._chunks.put(b"")
        finally:
            with suppress(Exception):  # what is left of a connection that is given up
                await stream.aclose()


async def _behind(first: Sequence[Any], stream: Any) -> AsyncIterator[Any]:
    for chunk in first:
        yield chunk
    async for chunk in stream:
        yield chunk


def _finishes(dumped: Mapping[str, Any]) -> bool:
    return any(choice.get("finish_reason") is not None for choice in dumped.get("choices") or ())


def _reported(stream: Any) -> bool:
    """Whether the provider told its usage: LiteLLM counts by itself where it did not."""
    return any(getattr(chunk, "usage", None) is not None for chunk in getattr(stream, "chunks", ()))


class Providers:
    """The calls of all pools at providers."""

    def __init__(self) -> None:
        self._pools: dict[str, Hosted] = {}
        self._library: Any = None
        self._starting: dict[str, asyncio.Task[None]] = {}  # by model; done once it may be called
        self._begun: asyncio.Task[None] | None = None  # the latest of them

    def serve(self, pools: Mapping[str, Hosted]) -> None:
        """Call these pools too; for models that are new, get LiteLLM ready in a thread.

        Pools that are given no more are kept: calls that were begun end as they began.
        """
        self._pools |= pools
        for model in dict.fromkeys(hosted.model for hosted in pools.values()):
            if model not in self._starting:
                starting = asyncio.get_running_loop().create_task(self._start(model, self._begun))
                self._starting[model] = self._begun = starting

    @property
    def ready(self) -> bool:
        """Whether all pools may be called, or never can be."""
        return self._begun is None or self._begun.done()

    async def _start(self, model: str, before: asyncio.Task[None] | None) -> None:
        """One model after the other: LiteLLM's imports are no place for two threads."""
        if before is not None:
            await before
        elif self._library is None:
            try:
                self._library = await asyncio.to_thread(provider_start.imported)
            except Exception:  # what a broken installation raises is not known beforehand
                log.exception("LiteLLM cannot be imported; pools at providers stay out")
        if self._library is not None:
            await asyncio.to_thread(provider_start.rehearse, self._library, model)

    async def close(self) -> None:
        """Close the connections, once LiteLLM has started: a thread cannot be ended."""
        if self._begun is not None:
            await self._begun
        closing = getattr(self._library, "close_litellm_async_clients", None)
        if closing is not None:
            with suppress(Exception):  # connections of a gateway that ends
                await closing()

    async def open(self, pool: str, path: str, body: bytes) -> UpstreamResponse:
        """One call; returns once the provider has answered. Raises `Unreachable` or `Dropped`."""
        if path != CHAT_PATH:
            return _refused(404, "This pool serves chat completions only.")
        hosted = self._pools[pool]
        await asyncio.shield(self._starting[hosted.model])  # a call in the first seconds waits
        if self._library is None:
            raise Unreachable("LiteLLM cannot be imported")
        try:
            asked = wire.arguments(body)
            if not hosted.model.startswith("openai/"):
                wire.check_media(asked["messages"])
        except wire.BadRequest as error:
            return _refused(400, str(error))
        model = wire.asked_model(body)
        try:
            answer = await self._library.acompletion(**asked | hosted.call())
            if asked.get("stream"):
                return await _begun(answer, model, hosted.hidden)
        except Exception as error:  # LiteLLM's errors have no common base
            if wire.not_connected(error):
                raise Unreachable(type(error).__name__) from error
            if wire.is_broken(error):
                raise Dropped(type(error).__name__) from error
            return ProviderResponse(*wire.refusal(error, hosted.hidden))
        document = wire.answer(answer.model_dump(exclude_none=True), model, usage_reported=True)
        return ProviderResponse(200, msgspec.json.encode(document))

    async def get(self, pool: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        """What a server would answer to a GET: its health, its models. Raises `Dropped` before the start."""
        hosted = self._pools[pool]
        starting = self._starting[hosted.model]
        await asyncio.wait((starting,), timeout=timeout_s)
        if self._library is None or not starting.done():
            raise Dropped("LiteLLM has not started")
        if path == "/health":
            return 200, b""
        if path == "/v1/models":
            data = [{"id": name, "object": "model", "max_model_len": hosted.window} for name in hosted.names]
            return 200, msgspec.json.encode({"object": "list", "data": data})
        return 404, b"{}"


async def _begun(stream: Any, model: str | None, hidden: Sequence[str]) -> UpstreamResponse:
    """A stream that has begun: some of them call the provider only when their first chunk is asked for."""
    chunks = aiter(stream)
    try:
        first = [await anext(chunks)]
    except StopAsyncIteration:
        first = []
    except BaseException:
        with suppress(Exception):
            await stream.aclose()
        raise
    response = ProviderResponse(200)
    response.pump(stream, first, model, hidden)
    return response


def _refused(status: int, message: str) -> UpstreamResponse:
    return ProviderResponse(status, wire.error_body(status, message))


class AnyClient(UpstreamClient):
    """The client for servers, which gives the calls of pools at providers to `Providers`."""

    def __init__(self, connect_timeout_s: float) -> None:
        super().__init__(connect_timeout_s)
        self._providers = Providers()

    def serve(self, pools: Mapping[str, Hosted]) -> None:
        """Call these pools at providers too; see `Providers.serve`."""
        self._providers.serve(pools)

    @property
    def ready(self) -> bool:
        """Whether no provider's library is still getting ready."""
        return self._providers.ready

    async def open(self, url: str, body: Pieces, headers: Mapping[str, str]) -> UpstreamResponse:
        """As for servers."""
        hosted = wire.pool_of(url)
        if hosted is None:
            return await super().open(url, body, headers)
        return await self._providers.open(*hosted, b"".join(body))

    async def get(self, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        """As for servers."""
        hosted = wire.pool_of(url)
        if hosted is None:
            return await super().get(url, headers, timeout_s)
        return await self._providers.get(*hosted, timeout_s)

    async def abort(
        self, replica_url: str, request_ids: Sequence[str], headers: Mapping[str, str]
    ) -> bool | None:
        """As for servers; a provider cannot."""
        if wire.pool_of(replica_url) is not None:
            return False
        return await super().abort(replica_url, request_ids, headers)

    async def close(self) -> None:
        """Close every connection."""
        await self._providers.close()
        await super().close()
