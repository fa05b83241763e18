"""Takes the calls of one tool out of an answer of chat/completions, so that its client never sees them.

    stream ──> events without a tool call ─────────────> as they are
           └─> events with calls ──┬> the tool's own ──> gathered in `own`
                                   └> others ──────────> on, numbered as if there were no others

Where an answer ends in the tool's calls alone, and these are to be answered, its end is kept back as well:
the answer goes on in another one. Answers of several choices are not for this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.inference.sse import SseSplitter, data_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_ANY: Final = msgspec.json.Decoder()
_CALLS: Final = b'"tool_calls"'
ENDS: Final = frozenset({"tool_calls", "stop", "function_call"})
"""Finish reasons of an answer that was not cut."""

_THOUGHTS: Final = ("reasoning_content", "reasoning")
_TOKENS: Final = ("logprobs", "token_ids")  # members of a choice
_UNDECODABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


@dataclass(slots=True)
class OwnCall:
    """A call of the tool: its place among all calls of the answer, its id, and its arguments as text."""

    place: int
    id: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Spoken:
    """What an answer said to its client, and why it ended. `thought_as`: the member its thinking came in."""

    text: str = ""
    thought: str = ""
    thought_as: str = _THOUGHTS[0]
    reason: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""


@dataclass(slots=True)
class _Part:
    """What came of the call with one index. `number`: its index for the client, None while it has none."""

    place: int
    name: str = ""
    number: int | None = None
    own: OwnCall | None = None
    waiting: list[dict[str, Any]] = field(default_factory=list)


class CallFilter:
    """Passes one stream on without the calls of the tool `name`. `answers`: calls of it are to be answered.

    `reason` is the finish reason that came; `usage` the last usage that was kept back, if any.
    """

    def __init__(self, name: str, *, answers: bool = True) -> None:
        self._name = name
        self._answers = answers
        self._parts: dict[int, _Part] = {}
        self._shown = 0
        self._took = False  # something, out of the choice that is at hand
        self.own: list[OwnCall] = []
        self.reason: str | None = None
        self.usage: dict[str, Any] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the answer ended in calls of the tool alone, which are to be answered."""
        return self._answers and bool(self.own) and not self._shown and self.reason in ENDS

    def take(self, out: bytes) -> bytes:
        """Whole events on their way to the client; those it is to get."""
        if not self._parts and _CALLS not in out:
            return out
        return b"".join(self._event(event) for event in events_of(out))

    def _event(self, event: bytes) -> bytes:
        payload = data_of(event)
        if payload is None or payload[:1] != b"{":
            return event
        try:
            chunk = _ANY.decode(payload)
        except _UNDECODABLE:
            return event
        choices = chunk.get("choices") or []
        if self.goes_on and not choices and chunk.get("error") is None:
            self.usage = chunk.get("usage") or self.usage
            return b""
        changed, empty = False, bool(choices)
        for choice in choices:
            changed |= self._choice(choice)
            delta = choice.get("delta") or {}
            empty &= choice.get("finish_reason") is None and not any(delta.values())
        if not changed:
            return event
        if self.goes_on:
            self.usage = chunk.pop("usage", None) or self.usage
        return b"" if empty else event_of(chunk)

    def _choice(self, choice: dict[str, Any]) -> bool:
        """Take the tool's calls out of a choice in place; whether anything changed."""
        delta = choice.get("delta") or {}
        reason = choice.get("finish_reason")
        parts = delta.get("tool_calls")
        self._took = False
        kept = [each for part in parts or () for each in self._part(part)]
        if self._took:
            _hide_tokens(choice)
        if reason is not None:
            kept += [each for part in self._parts.values() for each in self._flushed(part)]
        changed = kept != (parts or [])
        if changed or parts:
            delta["tool_calls"] = kept
            if not kept:
                del delta["tool_calls"]
            choice["delta"] = delta
        if reason is None:
            return changed
        self.reason = reason
        if not self.own or self._shown:
            return changed
        if self.goes_on:
            choice["finish_reason"] = None
        elif reason in ENDS:
            choice["finish_reason"] = "stop"
        return True

    def _part(self, raw: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """A part of a call; what of it, and of those that waited, goes on."""
        index = raw.get("index")
        function = raw.get("function") or {}
        if type(index) is not int:  # some servers number no call: a name with an id begins another one
            begins = bool(raw.get("id") and function.get("name"))
            index = max(self._parts, default=-1 if begins else 0) + begins
        part = self._parts.setdefault(index, _Part(len(self._parts)))
        if part.own is not None:
            part.own.arguments += arguments_of(function)
            self._took = True
            return ()
        if part.number is not None:
            return ({**raw, "index": part.number},)
        name = function.get("name") or ""
        is_whole = bool(part.name) and not name  # one that goes on has another piece of it
        part.name += name
        part.waiting.append(raw)
        if part.name == self._name:
            part.own, self._took = OwnCall(part.place), True
            self.own.append(part.own)
            for each in part.waiting:
                part.own.id = part.own.id or each.get("id") or ""
                part.own.arguments += arguments_of(each.get("function") or {})
            part.waiting = []
            return ()
        return () if self._name.startswith(part.name) and not is_whole else self._flushed(part)

    def _flushed(self, part: _Part) -> Sequence[dict[str, Any]]:
        """A call that is another tool's: what of it waited."""
        if not part.waiting:
            return ()
        if part.number is None:
            part.number, self._shown = self._shown, self._shown + 1
        waiting, part.waiting = part.waiting, []
        return [{**each, "index": part.number} for each in waiting]


def arguments_of(function: dict[str, Any]) -> str:
    """A call's arguments as text; some servers send the object itself."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return arguments
    return msgspec.json.encode(arguments).decode() if arguments else ""


def _hide_tokens(choice: dict[str, Any]) -> None:
    """Tell nothing of single tokens where some are those of a call that was taken out."""
    for name in _TOKENS:
        if choice.get(name) is not None:
            choice[name] = None


def take_calls(choice: dict[str, Any], name: str) -> list[OwnCall]:
    """Take the calls of a tool out of a choice of a whole answer, in place."""
    message = choice.get("message") or {}
    calls = message.get("tool_calls") or []
    own: list[OwnCall] = []
    kept: list[Any] = []
    for place, call in enumerate(calls):
        function = call.get("function") or {}
        if function.get("name") == name:
            own.append(OwnCall(place, call.get("id") or "", arguments_of(function)))
        else:
            kept.append(call)
    if own:
        _hide_tokens(choice)
        message["tool_calls"] = kept
        if not kept:
            del message["tool_calls"]
            choice["finish_reason"] = (
                "stop" if choice.get("finish_reason") in ENDS else choice["finish_reason"]
            )
    return own


class Hearing:
    """What a stream says, of its first choice, as its events come."""

    def __init__(self) -> None:
        self._found = Spoken()
        self._calls: dict[int, list[str]] = {}

    def take(self, events: bytes) -> None:
        """More whole events."""
        for event in events_of(events):
            payload = data_of(event)
            if payload is None or payload[:1] != b"{":
                continue
            try:
                choices = _ANY.decode(payload).get("choices") or []
            except _UNDECODABLE:
                continue
            for choice in choices[:1]:
                self._found.reason = choice.get("finish_reason") or self._found.reason
                _add(self._found, choice.get("delta") or {}, self._calls)

    def spoken(self) -> Spoken:
        """All of it so far."""
        self._found.calls = [(name, arguments) for _, (name, arguments) in sorted(self._calls.items())]
        return self._found


def spoken_of(message: dict[str, Any]) -> Spoken:
    """What the message of a whole answer says."""
    found = Spoken()
    calls: dict[int, list[str]] = {}
    listed = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or [])]
    _add(found, {**message, "tool_calls": listed}, calls)
    found.calls = [(name, arguments) for name, arguments in calls.values()]
    return found


def _add(found: Spoken, delta: dict[str, Any], calls: dict[int, list[str]]) -> None:
    content = delta.get("content")
    found.text += content if isinstance(content, str) else ""
    for name in _THOUGHTS:
        thought = delta.get(name)
        if isinstance(thought, str) and thought:
            found.thought, found.thought_as = found.thought + thought, name
            break
    for part in delta.get("tool_calls") or ():
        function = part.get("function") or {}
        call = calls.setdefault(part.get("index") or 0, ["", ""])
        call[0] += function.get("name") or ""
        call[1] += arguments_of(function)


def events_of(out: bytes) -> list[bytes]:
    """The events of bytes that end with one."""
    splitter = SseSplitter()
    events = splitter.feed(out)
    tail = splitter.tail()
    return [*events, tail] if tail else events


def event_of(document: object) -> bytes:
    """A document as an event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
