"""The HTTP side of a replay: one chat request at a time against any OpenAI-compatible server.

Backend.models()          GET  /v1/models
Backend.block_size()      GET  /metrics, vLLM's cache_config_info
Backend.costs_by_task()   GET  /v1/usage?by=task, where the server is ctxgate
Backend.chat()            POST /v1/chat/completions -> Answer, or AnswerFailed
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp

from ctxgate.compression.window_errors import read_overflow
from ctxgate.inference.sse import DONE, EventTooLarge, SseSplitter, data_of
from ctxgate.inference.usage import NOTHING_KNOWN, Usage
from ctxgate.inference.usage_parse import INCLUSIVE, parse_usage

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
_QUICK: Final = aiohttp.ClientTimeout(total=10)
_BLOCK_SIZE: Final = re.compile(rb'^vllm:cache_config_info\{[^}\n]*\bblock_size="(\d+)"', re.MULTILINE)
_NANO: Final = 10**9
_PAGE: Final = 10_000  # tasks of a usage report
_LONGEST_ERROR: Final = 200
_TOO_LONG: Final = "context_length_exceeded"


class BackendError(Exception):
    """The server cannot be used: not reachable, or not speaking this API."""


class AnswerFailed(Exception):
    """One request failed; `too_long` says that the prompt no longer fits the model's window."""

    def __init__(self, problem: str, *, too_long: bool = False) -> None:
        super().__init__(problem[:_LONGEST_ERROR])
        self.too_long = too_long


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model the server offers; the window is None where it does not say."""

    name: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request. Seconds since it was sent; `ttft_s` is None without streaming."""

    usage: Usage
    cost_nano: int | None
    ttft_s: float | None
    total_s: float
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TaskCost:
    """What a ledger has booked for one task so far."""

    requests: int
    cost_nano: int
    complete: bool

    def __add__(self, other: TaskCost) -> TaskCost:
        return TaskCost(
            self.requests + other.requests,
            self.cost_nano + other.cost_nano,
            self.complete and other.complete,
        )


class Backend:
    """A server's API under a base URL, with or without a trailing `/v1`. An async context manager."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, headers=headers, read_bufsize=2**18)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def models(self) -> list[ServedModel]:
        """The models on offer, in the server's order. Raises `BackendError`."""
        try:
            async with self._session.get(f"{self.root}/v1/models", timeout=_QUICK) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BackendError(f"no answer from {self.root}/v1/models: {describe(error)}") from error
        if response.status != 200:
            raise BackendError(f"GET {self.root}/v1/models: {_refusal(response.status, body)}")
        try:
            entries = json.loads(body)["data"]
            return [ServedModel(entry["id"], entry.get("max_model_len")) for entry in entries]
        except (ValueError, KeyError, TypeError) as error:
            raise BackendError(f"GET {self.root}/v1/models: not a list of models") from error

    async def block_size(self) -> int | None:
        """Tokens per block of the server's prefix cache, or None where it does not say."""
        body = await self._get("/metrics")
        found = _BLOCK_SIZE.search(body or b"")
        return int(found.group(1)) if found else None

    async def costs_by_task(self) -> dict[str, TaskCost] | None:
        """The ledger's sums for this key, or None where the server keeps no ledger."""
        costs: dict[str, TaskCost] = {}
        offset = 0
        while True:
            body = await self._get(f"/v1/usage?by=task&limit={_PAGE}&offset={offset}")
            page = None if body is None else parse_costs(body)
            if page is None:
                return None
            found, following = page
            for task, cost in found:  # keys of one team may share a task's name: their sum is the name's
                costs[task] = costs[task] + cost if task in costs else cost
            if following is None:
                return costs
            offset = following

    async def _get(self, path: str) -> bytes | None:
        """A body, or None: what is asked here is a help where it exists, never needed."""
        try:
            async with self._session.get(self.root + path, timeout=_QUICK) as response:
                return await response.read() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def chat(self, body: bytes, *, stream: bool, headers: Mapping[str, str]) -> Answer:
        """Send one request and read its whole answer. Raises `AnswerFailed`."""
        sent = time.perf_counter()
        try:
            async with self._session.post(
                f"{self.root}/v1/chat/completions",
                data=body,
                headers={"content-type": "application/json", **headers},
            ) as response:
                if response.status != 200:
                    raise _failed(response.status, await response.read())
                if not stream:
                    whole = await response.read()
                    return _whole_answer(whole, response.headers, time.perf_counter() - sent)
                return await _read_stream(response, sent)
        except (aiohttp.ClientError, TimeoutError, ConnectionError, EventTooLarge) as error:
            raise AnswerFailed(describe(error)) from error


async def _read_stream(response: aiohttp.ClientResponse, sent: float) -> Answer:
    splitter, reader = SseSplitter(), StreamReader()
    first: float | None = None
    async for chunk in response.content.iter_any():
        arrived = time.perf_counter() - sent
        for event in splitter.feed(chunk):
            data = data_of(event)
            if data is not None and reader.add(data) and first is None:
                first = arrived
    total_s = time.perf_counter() - sent
    if not reader.done:
        raise AnswerFailed("the stream ended without [DONE]")
    cost = reader.cost_nano if reader.cost_nano is not None else header_cost(response.headers)
    return Answer(reader.usage, cost, first, total_s, response.headers)


class StreamReader:
    """What matters in a chat stream: its first token, its usage, its cost, its errors and its end."""

    def __init__(self) -> None:
        self.usage: Usage = NOTHING_KNOWN
        self.cost_nano: int | None = None
        self.done = False

    def add(self, data: bytes) -> bool:
        """Take one event's data; True when it carries output. Raises `AnswerFailed` on an error event.

        The role chunk is no output: an engine may send it while the request still waits.
        """
        if data == DONE:
            self.done = True
            return False
        try:
            event = json.loads(data, parse_float=Decimal)
        except ValueError:
            raise AnswerFailed("the stream carries an event that is not JSON") from None
        if not isinstance(event, dict):
            raise AnswerFailed("the stream carries an event that is no object")
        if event.get("error"):
            raise AnswerFailed(f"error inside the stream: {_message(event)}")
        if event.get("usage"):
            self.usage, self.cost_nano = read_usage(event["usage"])
        return any(_is_output(choice) for choice in event.get("choices") or ())


def _is_output(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("finish_reason")) or any(value for name, value in delta.items() if name != "role")


def _whole_answer(body: bytes, headers: Mapping[str, str], total_s: float) -> Answer:
    try:
        answer = json.loads(body, parse_float=Decimal)
        usage, cost = read_usage(answer.get("usage"))
    except (ValueError, AttributeError):
        raise AnswerFailed("the answer is not a JSON object") from None
    return Answer(usage, cost if cost is not None else header_cost(headers), None, total_s, headers)


def read_usage(usage: Mapping[str, Any] | None) -> tuple[Usage, int | None]:
    """Tokens and nano-dollars of a usage object; the cost is ctxgate's own addition."""
    parsed = parse_usage(usage, INCLUSIVE).usage or NOTHING_KNOWN
    return parsed, nano((usage or {}).get("cost"))


def parse_costs(body: bytes) -> tuple[list[tuple[str, TaskCost]], int | None] | None:
    """A page of a ctxgate usage report by task and where the next one starts, or None if this is none."""
    try:
        page = json.loads(body)
        costs = [
            (row["group"], TaskCost(row["requests"], row["cost_nano"], not row["unknown_cost"]))
            for row in page["rows"]
        ]
        following = page.get("next")
        return costs, None if following is None else int(following)
    except (ValueError, KeyError, TypeError):
        return None


def header_cost(headers: Mapping[str, str]) -> int | None:
    """Nano-dollars from the header `x-ctxgate-cost` (dollars), if there is one."""
    return nano(headers.get("x-ctxgate-cost"))


def nano(dollars: object) -> int | None:
    """A decimal amount of dollars as nano-dollars; None for what is no amount."""
    if dollars is None or isinstance(dollars, bool):
        return None
    try:
        amount = Decimal(str(dollars)) * _NANO
    except InvalidOperation:
        return None
    return round(amount) if amount.is_finite() else None


def _failed(status: int, body: bytes) -> AnswerFailed:
    return AnswerFailed(_refusal(status, body), too_long=status == 400 and _is_too_long(body))


def _is_too_long(body: bytes) -> bool:
    """Whether an engine's error says that a prompt no longer fits, by OpenAI's code or by its words."""
    try:
        answer = json.loads(body)
    except ValueError:
        return False
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict) and error.get("code") == _TOO_LONG:
        return True
    overflow = read_overflow(_message(answer))
    return overflow is not None and overflow.of_prompt


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {_message(json.loads(body))}"
    except ValueError:
        return f"HTTP {status}"


def _message(answer: object) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "no message")


def describe(error: BaseException) -> str:
    """An exception as a phrase, also where it has no text of its own."""
    return str(error) or type(error).__name__
