"""Chat requests as views over the wire: what each message is, without converting any.

A message is decoded when it is seen for the first time; later turns find what is known about it by a
hash of its bytes. Its identity is what the model can tell of it:

- texts are equal as `canonical` says: member order, white space and escapes do not count;
- a member that is null is as good as missing;
- the arguments of a tool call are a JSON value where they are JSON, else a text;
- beside tool calls, content that is null, empty or missing is the same content;
- an empty list of tool calls is none.

Without tool calls, an assistant's empty content is not unified: engines refuse some of these forms and
take others, and a form that was refused must never stand in for one that works.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec
import xxhash

from ctxgate.compression.canonical import DIGEST_BYTES, canonical_form
from ctxgate.compression.recent import Recent
from ctxgate.inference.wire import NotJson, decoded

if TYPE_CHECKING:
    from collections.abc import Sequence

MEMO_ENTRIES: Final = 100_000
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_TEXT: Final = msgspec.json.Decoder(str)
_NULL: Final = b"null"
_EMPTY: Final = b'""'
_QUOTE: Final = 0x22


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one message.

    `digest` is its identity, `size` the bytes of what it says, however it is spelled, `role` empty where
    it has none. `varies`: clients are known to send the
    same message in several forms that a template prints differently. `calls` are the ids of its tool
    calls, `answers` the id of the call that a tool result answers.
    """

    digest: bytes
    size: int
    role: str
    varies: bool = False
    calls: tuple[str, ...] = ()
    answers: str | None = None


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """The identity of one tool definition, the bytes of what it says, and its name where it has one."""

    digest: bytes
    size: int
    name: str | None


@dataclass(frozen=True, slots=True)
class Round:
    """An assistant message and all results of its calls: messages `start` to `stop` - 1."""

    start: int
    stop: int


class Views:
    """Facts of messages and tools, remembered by the bytes they were seen in, per tenant.

    The bytes are known by a fast hash of 64 secret bits (`seed`): whoever could make two messages
    collide could have one taken for the other, within one tenant.
    """

    def __init__(self, entries: int = MEMO_ENTRIES, seed: int = 0) -> None:
        self._seed = seed
        self._messages: Recent[tuple[str, bytes], Facts] = Recent(entries)
        self._tools: Recent[tuple[str, bytes], ToolFacts | None] = Recent(entries // 10)

    def message(self, tenant: str, raw: msgspec.Raw | bytes) -> Facts:
        """The facts of a message, decoded only if its bytes are new."""
        key = (tenant, xxhash.xxh3_128_digest(memoryview(raw), self._seed))
        facts = self._messages.get(key)
        if facts is None:
            facts = facts_of(raw)
            self._messages.put(key, facts)
        return facts

    def tool(self, tenant: str, raw: msgspec.Raw | bytes) -> ToolFacts | None:
        """The facts of a tool definition, or None where it is no JSON object."""
        key = (tenant, xxhash.xxh3_128_digest(memoryview(raw), self._seed))
        facts = self._tools.get(key)
        if facts is None:
            facts = tool_facts_of(raw)
            self._tools.put(key, facts)
        return facts


def facts_of(raw: msgspec.Raw | bytes) -> Facts:
    """The facts of one message. What cannot be read as a message is only equal to the same bytes."""
    try:
        members = _without_nulls(decoded(_MEMBERS, raw))
        role = _text(members.get("role")) or ""
        calls: list[dict[str, msgspec.Raw]] = []
        if role == "assistant" and "tool_calls" in members:
            calls = _calls(members)
        form = canonical_form(msgspec.json.encode(members))
    except (msgspec.DecodeError, ValueError):  # NotJson and undecodable bytes are ValueErrors
        return Facts(_digest(memoryview(raw), b"ctxgate opaque"), memoryview(raw).nbytes, "")
    ids = tuple(_text(call.get("id")) or "" for call in calls)
    answers = _text(members.get("tool_call_id")) if role == "tool" else None
    return Facts(_digest(form, b"ctxgate message"), len(form), role, bool(calls), ids, answers)


def tool_facts_of(raw: msgspec.Raw | bytes) -> ToolFacts | None:
    """The facts of one tool definition; the members of its wrapper that are null do not count."""
    try:
        members = _without_nulls(decoded(_MEMBERS, raw))
        name = _text(members.get("name"))
        if "function" in members:
            function = _without_nulls(decoded(_MEMBERS, members["function"]))
            name = _text(function.get("name"))
            members["function"] = msgspec.Raw(msgspec.json.encode(function))
        form = canonical_form(msgspec.json.encode(members))
        return ToolFacts(_digest(form, b"ctxgate tool"), len(form), name)
    except (msgspec.DecodeError, ValueError):  # NotJson and undecodable bytes are ValueErrors
        return None


def rounds(messages: Sequence[Facts]) -> list[Round]:
    """The rounds of a conversation, in order.

    A round begins with an assistant message and ends before the next message that is no result of its
    calls; results are known by id, so that a foreign one does not join.
    """
    found: list[Round] = []
    at = 0
    while at < len(messages):
        start, at = at, at + 1
        if messages[start].role != "assistant":
            continue
        calls = set(messages[start].calls)
        while at < len(messages) and messages[at].role == "tool" and messages[at].answers in calls:
            at += 1
        found.append(Round(start, at))
    return found


def _calls(members: dict[str, msgspec.Raw]) -> list[dict[str, msgspec.Raw]]:
    """The tool calls of an assistant message, whose members are brought to their common form in place."""
    calls = [_call(raw) for raw in decoded(_ITEMS, members["tool_calls"])]
    if not calls:
        del members["tool_calls"]
        return calls
    members["tool_calls"] = msgspec.Raw(msgspec.json.encode(calls))
    if _is(members.get("content"), _EMPTY):
        del members["content"]
    return calls


def _call(raw: msgspec.Raw) -> dict[str, msgspec.Raw]:
    call = _without_nulls(decoded(_MEMBERS, raw))
    if "function" in call:
        function = _without_nulls(decoded(_MEMBERS, call["function"]))
        if "arguments" in function:
            function["arguments"] = _arguments(function["arguments"])
        call["function"] = msgspec.Raw(msgspec.json.encode(function))
    return call


def _arguments(raw: msgspec.Raw) -> msgspec.Raw:
    """`[value]` for a text that is JSON, `{"raw": ...}` for all else: the two are never equal."""
    if memoryview(raw)[0] == _QUOTE:
        value = json.loads(bytes(raw)).encode("utf-8", "surrogatepass")
        try:
            canonical_form(value)
        except NotJson:
            pass  # a text like any other
        else:
            return msgspec.Raw(b"[%s]" % value)
    return msgspec.Raw(b'{"raw":%s}' % bytes(raw))


def _without_nulls(members: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    return {name: value for name, value in members.items() if not _is(value, _NULL)}


def _is(value: msgspec.Raw | None, text: bytes) -> bool:
    return value is not None and memoryview(value).nbytes == len(text) and bytes(value) == text


def _text(value: Any) -> str | None:
    if value is None or memoryview(value)[0] != _QUOTE:
        return None
    return decoded(_TEXT, value)


def _digest(form: bytes | memoryview, person: bytes) -> bytes:
    return blake2b(form, digest_size=DIGEST_BYTES, person=person).digest()
