"""One answer made of several: attempts that follow each other write it, and its client sees no seam.

The first attempt answers as ever, but for the calls of `context_recall`. Where it ends in these alone, its
end is kept back, and the next attempt goes on in its place: under the first one's id, without a second role,
with the usage and the cost of all. `usage.iterations` lists the usage of each, the last one's prompt being
the longest: an agent that watches how full its context is finds that there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.recall_tool import NAME
from ctxgate.gateway.edge import JSON, Reply
from ctxgate.inference.call_filter import (
    ENDS,
    CallFilter,
    Hearing,
    Spoken,
    event_of,
    events_of,
    spoken_of,
    take_calls,
)
from ctxgate.inference.rates import format_usd
from ctxgate.inference.sse import data_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ctxgate.gateway.edge import Headers, Message
    from ctxgate.inference.call_filter import OwnCall
    from ctxgate.inference.usage import Usage

_COST: Final = b"x-ctxgate-cost"
_OF_THE_FIRST: Final = ("id", "created")
_TEXTS: Final = ("content", "reasoning_content", "reasoning")
_NANO: Final = 10**9
_READ_AT_ONCE: Final = 2**16  # bytes of a stream; what it said is read piece by piece, as it passes


class MergedReply(Reply):
    """Stands before the reply to a client. `before_end` is awaited when an answer is about to end.

    `own` are the calls of the tool in the attempt that was last begun, `spoken` what its client saw of it.
    `goes_on`: it ended in calls of the tool alone; then the answer has not ended. `refused`: a later attempt
    was refused by its engine, and the client has not been told.
    """

    __slots__ = (
        "_answers", "_before_end", "_filter", "_first", "_goes_on", "_head", "_hearing", "_inner", "_number",
        "_paid", "_reason", "_shown", "_spoken", "_usages", "own", "refused",
    )  # fmt: skip

    def __init__(self, inner: Reply, before_end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(_nothing, _nowhere)
        self._inner = inner
        self._before_end = before_end
        self._first: dict[str, Any] = {}
        self._usages: list[dict[str, Any]] = []
        self._paid: list[int | None] = []
        self._head: dict[str, Any] = {}
        self._number = 0
        self.begin(answers=True)
        self.gone, self.started = inner.gone, inner.started
        inner.on_gone = self._left

    def begin(self, *, answers: bool) -> None:
        """An attempt begins. `answers`: calls of the tool in it are to be answered."""
        self._number += 1
        self._answers = answers
        self._filter = CallFilter(NAME, answers=answers)
        self._shown = bytearray()
        self._hearing = Hearing()
        self._spoken: Spoken | None = None
        self._goes_on = False
        self.own: list[OwnCall] = self._filter.own
        self._reason: str | None = None
        self.refused: tuple[int, Headers, bytes] | None = None

    def release(self) -> None:
        """Leave the client's going to whoever answers it now."""
        self._inner.on_gone = None
        self._inner.gone = self._inner.gone or self.gone

    @property
    def goes_on(self) -> bool:
        """Whether the attempt ended in calls of the tool alone, which are to be answered."""
        return self._goes_on or self._filter.goes_on

    @property
    def spoken(self) -> Spoken:
        """What the client saw of the attempt."""
        if self._spoken is None:
            self._heard()
            return self._hearing.spoken()
        return self._spoken

    @property
    def reason(self) -> str | None:
        """Why the attempt's model ended, None where it has not said so."""
        return self._reason or self._filter.reason or self.spoken.reason

    def paid(self, usage: Usage, nano: int | None) -> None:
        """What the attempt cost that goes on, as booked; None where that is unknown, and so is the sum."""
        self._paid.append(nano)
        if not self._usages[-1] and usage.prompt is not None and usage.output.value is not None:
            output = usage.output.value
            self._usages[-1] = {
                "prompt_tokens": usage.prompt,
                "completion_tokens": output,
                "total_tokens": usage.prompt + output,
            }

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of the answer, once."""
        if not self.started:
            self.started = True
            await self._inner.start(status, headers)

    async def write(self, data: bytes) -> None:
        """Whole events of an attempt; the client gets those that are for it."""
        if self.gone:
            self._inner.gone = True
        out = self._filter.take(data)
        if not out:
            return
        self._shown += out
        if len(self._shown) >= _READ_AT_ONCE:
            self._heard()
        if self._number > 1:
            out = self._joined(out)
        if out:
            await self._inner.write(out)

    async def end(self, data: bytes = b"") -> None:
        """The end of an attempt, which is that of the answer unless it goes on."""
        if self.goes_on and (b"[DONE]" in data or not data):
            self._heard()
            self._first = self._first or self._head
            self._usages.append(self._filter.usage or {})
            return
        await self._before_end()
        await self.finish(data)

    async def finish(self, data: bytes = b"") -> None:
        """End the answer."""
        self.ended = True
        await self._inner.end(data)

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer, or an error."""
        if status != 200:
            if self._number > 1:
                self.refused = status, headers, body
                return
            await self._inner.whole(status, headers, body)
            return
        document = _document(body)
        if document is None or (not self._take(document) and self._number == 1):
            self.ended = True
            await self._inner.whole(status, headers, body)
            return
        if self.goes_on:
            self._note(document)
            return
        await self._before_end()
        changed = self._merged(document)
        cost = self._sum(_cost(headers))
        headers = [each for each in headers if each[0] != _COST]
        if cost is not None:
            headers.append((_COST, format_usd(cost).encode()))
        self.ended = True
        await self._inner.whole(status, headers, msgspec.json.encode(changed))

    async def told(self) -> None:
        """Tell the client of the error that ended its answer."""
        status, headers, body = self.refused or (502, [JSON], b"{}")
        if self.started:
            await self.finish(b"data: " + body.replace(b"\n", b" ") + b"\n\n")
        else:
            self.ended = True
            await self._inner.whole(status, headers, body)

    def _take(self, document: dict[str, Any]) -> bool:
        """Take the tool's calls out of a whole answer; whether there were any."""
        choice = (document.get("choices") or [{}])[0]
        self._reason = choice.get("finish_reason")
        self.own = take_calls(choice, NAME)
        message = choice.get("message") or {}
        self._spoken = spoken_of(message)
        cut = self._reason not in ENDS or document.get("error") is not None
        self._goes_on = self._answers and bool(self.own) and not cut and not self._spoken.calls
        return bool(self.own)

    def _heard(self) -> None:
        """Read what the client has been shown since the last time."""
        events = bytes(self._shown)
        self._shown.clear()
        self._head = self._head or _head_of(events)
        self._hearing.take(events)

    def _note(self, document: dict[str, Any]) -> None:
        """Remember of an answer that goes on what the whole one will say."""
        message = document["choices"][0]["message"]
        if not self._first:
            self._first = {name: document[name] for name in _OF_THE_FIRST if name in document}
            self._first["message"] = {}
        texts = self._first["message"]
        for name in _TEXTS:
            if isinstance(message.get(name), str):
                texts[name] = texts.get(name, "") + message[name]
        usage = document.get("usage")
        self._usages.append(usage if isinstance(usage, dict) else {})

    def _merged(self, document: dict[str, Any]) -> dict[str, Any]:
        """The last whole answer with what was said, used and paid before it."""
        texts = self._first.get("message", {})
        document |= {name: self._first[name] for name in _OF_THE_FIRST if name in self._first}
        message = (document.get("choices") or [{}])[0].get("message")
        for name, text in texts.items():
            if text and isinstance(message, dict):
                message[name] = text + (message.get(name) or "")
        if isinstance(document.get("usage"), dict):
            document["usage"] = self._all_used(document["usage"], ends=True)
        return document

    def _all_used(self, usage: dict[str, Any], *, ends: bool) -> dict[str, Any]:
        """The usage of the last attempt with that of those before it. `ends`: it is whole."""
        if not self._usages:
            return usage
        each = [*self._usages, usage]
        found = summed(each)
        cost = usage.get("cost")
        found.pop("cost", None)
        if isinstance(cost, int | float) and (nano := self._sum(round(cost * _NANO))) is not None:
            found["cost"] = msgspec.Raw(format_usd(nano).encode())
        return found | {"iterations": each} if ends else found

    def _sum(self, last: int | None) -> int | None:
        """The cost of all attempts in nano-dollars; None where that of any is unknown."""
        costs = [*self._paid, last]
        return None if None in costs else sum(cost for cost in costs if cost is not None)

    def _joined(self, out: bytes) -> bytes:
        """Events of a later attempt as a part of the answer."""
        return b"".join(self._joined_event(event) for event in events_of(out))

    def _joined_event(self, event: bytes) -> bytes:
        chunk = _document(data_of(event) or b"")
        if chunk is None or "choices" not in chunk:
            return event
        chunk |= {name: self._first[name] for name in _OF_THE_FIRST if name in self._first}
        choices = chunk["choices"] or []
        if isinstance(chunk.get("usage"), dict):
            chunk["usage"] = self._all_used(chunk["usage"], ends=not choices)
        for choice in choices if self._first else ():
            (choice.get("delta") or {}).pop("role", None)
        idle = bool(choices) and not isinstance(chunk.get("usage"), dict)
        for choice in choices:
            idle &= choice.get("finish_reason") is None and not any((choice.get("delta") or {}).values())
        return b"" if idle else event_of(chunk)


def summed(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """The usage of several attempts: each figure, also those of the details, added up."""
    found: dict[str, Any] = {}
    for usage in usages:
        for name, value in usage.items():
            before = found.get(name)
            if isinstance(value, dict):
                found[name] = summed([before if isinstance(before, dict) else {}, value])
            elif isinstance(value, int | float) and isinstance(before, int | float):
                both = before + value
                found[name] = both if isinstance(both, int) else round(both * _NANO) / _NANO
            elif before is None:
                found[name] = value
    return found


def _head_of(events: bytes) -> dict[str, Any]:
    """The members of a stream's first chunk that all of its chunks share."""
    for event in events_of(events):
        chunk = _document(data_of(event) or b"")
        if chunk is not None:
            return {name: chunk[name] for name in _OF_THE_FIRST if name in chunk}
    return {}


def _document(body: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def _cost(headers: Headers) -> int | None:
    """The cost that an answer's headers tell, in nano-dollars."""
    for name, value in headers:
        if name == _COST:
            dollars, _, rest = value.decode().partition(".")
            return int(dollars) * _NANO + int(rest.ljust(9, "0")[:9] or 0)
    return None


async def _nothing() -> Message:
    raise AssertionError("another reply watches the client")


async def _nowhere(_: Message) -> None:
    raise AssertionError("another reply sends")
