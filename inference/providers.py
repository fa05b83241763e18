"""Pools at hosted providers, called through LiteLLM behind the interface of the client for servers.

    Providers.serve()    LiteLLM is imported in a thread; until it is there, calls wait and probes find nobody
    Providers.open()     one chat call; its answer reads like a server's
    response.close()     hangs up, which is all the abort that a provider offers

LiteLLM is told to use the catalogue that it carries, to send no telemetry and to fetch no tokenizers.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.inference import provider_wire as wire
from ctxgate.inference.client import Dropped, Unreachable, UpstreamClient, UpstreamResponse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxgate.inference.engine_load import EngineLoad
    from ctxgate.inference.wire import Pieces

log = logging.getLogger(__name__)
CHAT_PATH: Final = "/v1/chat/completions"
_QUIET: Final = {
    "LITELLM_OFFLINE_MODE": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_MODE": "PRODUCTION",  # else a file .env of the working folder is read
    "LITELLM_LOG": "ERROR",
}
_SETTINGS: Final = {
    "telemetry": False,
    "suppress_debug_info": True,
    "turn_off_message_logging": True,
    "disable_hf_tokenizer_download": True,
    "disable_token_counter": True,
}
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


def imported() -> Any:
    """LiteLLM, imported and made quiet: seconds of work, so not on an event loop. Raises ImportError."""
    for name, value in _QUIET.items():
        os.environ[name] = value
    # Its own types use a qualifier that pydantic warns of.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"pydantic\._internal\._generate_schema")
    library = importlib.import_module("litellm")
    for name, setting in _SETTINGS.items():
        setattr(library, name, setting)
    logging.getLogger("LiteLLM").setLevel(logging.CRITICAL)  # its records quote prompts
    return library


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

    def pump(self, stream: Any, model: str | None, hidden: Sequence[str] = ()) -> None:
        """Read a stream of LiteLLM's in the background, as far ahead as the queue is long."""
        self._pump = asyncio.get_running_loop().create_task(self._pumped(stream, model, hidden))

    async def _pumped(self, stream: Any, model: str | None, hidden: Sequence[str]) -> None:
        try:
            async for chunk in stream:
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
        self._loading: asyncio.Task[None] | None = None

    def serve(self, pools: Mapping[str, Hosted]) -> None:
        """Call these pools too; with the first ones, begin to import LiteLLM in a thread.

        Pools that are given no more are kept: calls that were begun end as they began.
        """
        self._pools |= pools
        if self._pools and self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load())

    async def _load(self) -> None:
        try:
            self._library = await asyncio.to_thread(imported)
        except Exception:  # what a broken installation raises is not known beforehand
            log.exception("LiteLLM cannot be imported; pools at providers stay out")

    async def close(self) -> None:
        """Close the connections, once the import is over: a thread cannot be ended."""
        if self._loading is not None:
            await self._loading
        closing = getattr(self._library, "close_litellm_async_clients", None)
        if closing is not None:
            with suppress(Exception):  # connections of a gateway that ends
                await closing()

    async def open(self, pool: str, path: str, body: bytes) -> UpstreamResponse:
        """One call; returns once the provider has answered. Raises `Unreachable` or `Dropped`."""
        if path != CHAT_PATH:
            return _refused(404, "This pool serves chat completions only.")
        if self._loading is not None:
            await asyncio.shield(self._loading)  # a call in the first seconds waits
        if self._library is None:
            raise Unreachable("LiteLLM cannot be imported")
        hosted = self._pools[pool]
        try:
            asked = wire.arguments(body)
            if not hosted.model.startswith("openai/"):
                wire.check_media(asked["messages"])
        except wire.BadRequest as error:
            return _refused(400, str(error))
        model = wire.asked_model(body)
        try:
            answer = await self._library.acompletion(**asked | hosted.call())
        except Exception as error:  # LiteLLM's errors have no common base
            if wire.not_connected(error):
                raise Unreachable(type(error).__name__) from error
            if wire.is_broken(error):
                raise Dropped(type(error).__name__) from error
            return ProviderResponse(*wire.refusal(error, hosted.hidden))
        if asked.get("stream"):
            response = ProviderResponse(200)
            response.pump(answer, model, hosted.hidden)
            return response
        document = wire.answer(answer.model_dump(exclude_none=True), model, usage_reported=True)
        return ProviderResponse(200, msgspec.json.encode(document))

    async def get(self, pool: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        """What a server would answer to a GET: its health, its models. Raises `Dropped` before the import."""
        if self._loading is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._loading), timeout_s)
        if self._library is None:
            raise Dropped("LiteLLM is not imported yet")
        hosted = self._pools[pool]
        if path == "/health":
            return 200, b""
        if path == "/v1/models":
            data = [{"id": name, "object": "model", "max_model_len": hosted.window} for name in hosted.names]
            return 200, msgspec.json.encode({"object": "list", "data": data})
        return 404, b"{}"


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
