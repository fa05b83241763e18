"""Chat requests as views over the wire: what each message is, without converting any.

A message is decoded when it is seen for the first time; later turns find what is known about it by a
hash of its bytes. Its identity is what the model can tell of it:

- texts are equal as `canonical` says: member order, white space and escapes do not count;
- a member that is null is as good as missing;
- the arguments of a tool call are a JSON value where they are JSON, else a text;
- beside tool calls, content that is null, empty or missing is the same content;
- an empty list of tool calls is none.

The ids of tool calls are part of that identity. What is left without them is the message's *shape*: all
but which result answers which call, and that follows from the ids' order (`chain`).

Without tool calls, an assistant's empty content is not unified: engines refuse some of these forms and
take others, and a form that was refused must never stand in for one that works.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import repeat
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
_LIST: Final = 0x5B
_OBJECT: Final = 0x7B
_CACHE_MARK: Final = b"s13:cache_control"
_MARKS: Final = (b"s7:ctxgate", _CACHE_MARK)  # these names as `canonical_form` writes them


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one message.

    `digest` is its identity, `size` the bytes of what it says, however it is spelled, `role` empty where
    it has none. `varies`: clients are known to send the same message in several forms that a template
    prints differently. `calls` are the ids of its tool calls (empty where one has no text for an id),
    `answers` the id of the call that a tool result answers. `marked`: it may bear a mark for the gateway
    or for a cache (`compression.marks`).

    `shape` is the identity without ids, empty where there are none. Of a message that varies, `content`
    names the form of its content, where that is none, and `arguments` the spelling of its arguments: what
    `digest` does not tell apart. `unmarked` is the identity without ids and cache marks, empty where there
    are no marks: clients move them on from turn to turn.
    """

    digest: bytes
    size: int
    role: str
    varies: bool = False
    calls: tuple[str, ...] = ()
    answers: str | None = None
    marked: bool = False
    shape: bytes = b""
    content: bytes = field(default=b"", compare=False)
    arguments: bytes = field(default=b"", compare=False)
    unmarked: bytes = field(default=b"", compare=False)

    @property
    def nameless(self) -> bytes:
        """The identity but for ids."""
        return self.shape or self.digest

    @property
    def lasting(self) -> bytes:
        """The identity but for ids and cache marks: what stays when a conversation goes on."""
        return self.unmarked or self.shape or self.digest


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
        self._seed = seed.to_bytes(8, "big")
        self._messages: Recent[bytes, Facts] = Recent(entries)
        self._tools: Recent[bytes, ToolFacts | None] = Recent(entries // 10)

    def knows(self, tenant: str, raw: msgspec.Raw | bytes) -> bool:
        """Whether the facts of a message are remembered."""
        key = xxhash.xxh3_128_digest(memoryview(raw), self._seed_of(tenant))
        return self._messages.get(key) is not None

    def message(self, tenant: str, raw: msgspec.Raw | bytes) -> Facts:
        """The facts of a message, decoded only if its bytes are new."""
        return self.messages(tenant, (raw,))[0]

    def messages(self, tenant: str, raws: Sequence[msgspec.Raw | bytes]) -> tuple[Facts, ...]:
        """The facts of messages; only those whose bytes are new are decoded."""
        keys = list(map(xxhash.xxh3_128_digest, raws, repeat(self._seed_of(tenant))))
        found = self._messages.get_all(keys)
        for at in [at for at, facts in enumerate(found) if facts is None]:
            found[at] = facts = facts_of(raws[at])
            self._messages.put(keys[at], facts)
        return tuple(facts for facts in found if facts is not None)

    def tool(self, tenant: str, raw: msgspec.Raw | bytes) -> ToolFacts | None:
        """The facts of a tool definition, or None where it is no JSON object."""
        key = xxhash.xxh3_128_digest(memoryview(raw), self._seed_of(tenant))
        facts = self._tools.get(key)
        if facts is None:
            facts = tool_facts_of(raw)
            self._tools.put(key, facts)
        return facts

    def _seed_of(self, tenant: str) -> int:
        """A seed per tenant keeps their memories apart without a name in every key."""
        return int.from_bytes(blake2b(tenant.encode(), key=self._seed, digest_size=8).digest(), "big")


def facts_of(raw: msgspec.Raw | bytes) -> Facts:
    """The facts of one message. What cannot be read as a message is only equal to the same bytes."""
    try:
        given = decoded(_MEMBERS, raw)
        members = _without_nulls(given)
        role = _text(members.get("role")) or ""
        calls = _Calls((), ())
        if role == "assistant" and "tool_calls" in members:
            calls = _calls(members)
        answers = _text(members.get("tool_call_id")) if role == "tool" else None
        if answers is not None:
            del members["tool_call_id"]
        form = canonical_form(msgspec.json.encode(members))
    except (msgspec.DecodeError, ValueError):  # NotJson and undecodable bytes are ValueErrors
        return Facts(_digest(memoryview(raw), b"ctxgate opaque"), memoryview(raw).nbytes, "")
    marked = any(name in form for name in _MARKS)
    shape = _digest(form, b"ctxgate message")
    unmarked = _unmarked(members) if marked and _CACHE_MARK in form else b""
    if answers is not None:
        digest, size = named(shape, (answers,)), len(form) + len(answers)
        return Facts(digest, size, role, answers=answers, marked=marked, shape=shape, unmarked=unmarked)
    if not calls.ids:
        return Facts(shape, len(form), role, marked=marked, unmarked=unmarked)
    return Facts(
        digest=named(shape, calls.ids),
        size=len(form) + sum(len((id_ or "").encode()) for id_ in calls.ids),
        role=role,
        varies=True,
        calls=tuple(id_ or "" for id_ in calls.ids),
        marked=marked,
        shape=shape,
        content=_content_form(given),
        arguments=_digest(msgspec.json.encode(calls.arguments), b"ctxgate spelling"),
        unmarked=unmarked,
    )


def _unmarked(members: dict[str, msgspec.Raw]) -> bytes:
    """The identity of a message without the cache marks on it and on the parts of its content."""
    left = {name: value for name, value in members.items() if name != "cache_control"}
    content = left.get("content")
    if content is not None and memoryview(content)[0] == _LIST:
        parts = [_unmarked_part(part) for part in decoded(_ITEMS, content)]
        left["content"] = msgspec.Raw(msgspec.json.encode(parts))
    return _digest(canonical_form(msgspec.json.encode(left)), b"ctxgate message")


def _unmarked_part(part: msgspec.Raw) -> msgspec.Raw | dict[str, msgspec.Raw]:
    if memoryview(part)[0] != _OBJECT:
        return part
    return {name: value for name, value in decoded(_MEMBERS, part).items() if name != "cache_control"}


def named(shape: bytes, ids: Sequence[str | None]) -> bytes:
    """The identity of a message of this shape with these ids; None: a call has no text for one."""
    return _digest(shape + msgspec.json.encode(ids), b"ctxgate ids")


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


@dataclass(frozen=True, slots=True)
class _Calls:
    """The tool calls of a message: their ids, and the texts of their arguments."""

    ids: tuple[str | None, ...]
    arguments: tuple[str | None, ...]


def _calls(members: dict[str, msgspec.Raw]) -> _Calls:
    """The tool calls of an assistant message, whose members are brought to their common form in place."""
    ids: list[str | None] = []
    arguments: list[str | None] = []
    calls: list[dict[str, msgspec.Raw]] = []
    for raw in decoded(_ITEMS, members["tool_calls"]):
        call, spelled = _call(raw)
        id_ = _text(call.get("id"))
        if id_ is not None:
            del call["id"]
        calls.append(call)
        ids.append(id_)
        arguments.append(spelled)
    if not calls:
        del members["tool_calls"]
        return _Calls((), ())
    members["tool_calls"] = msgspec.Raw(msgspec.json.encode(calls))
    if _is(members.get("content"), _EMPTY):
        del members["content"]
    return _Calls(tuple(ids), tuple(arguments))


def _call(raw: msgspec.Raw) -> tuple[dict[str, msgspec.Raw], str | None]:
    """A call with its members in their common form, and its arguments as they were spelled."""
    call = _without_nulls(decoded(_MEMBERS, raw))
    spelled = None
    if "function" in call:
        function = _without_nulls(decoded(_MEMBERS, call["function"]))
        if "arguments" in function:
            spelled = _text(function["arguments"])
            function["arguments"] = _arguments(function["arguments"])
        call["function"] = msgspec.Raw(msgspec.json.encode(function))
    return call, spelled


def _content_form(members: dict[str, msgspec.Raw]) -> bytes:
    """Which of the forms of no content this is; empty where there is some."""
    content = members.get("content")
    if content is None:
        return b"missing"
    text = bytes(content)
    return text if text in (_NULL, _EMPTY) else b""


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
