"""Request bodies as views over their own bytes.

A body is decoded once, one level deep: every member stays the exact slice the client sent. What the
gateway adds is spliced into those bytes, so that an untouched body leaves as it came and a prompt's
text is never re-serialized (a re-serialized prompt is another prompt to the prefix cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")

_WHITESPACE: Final = b" \t\r\n"
_SEPARATORS: Final = _WHITESPACE + b","
_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ANY: Final = msgspec.json.Decoder()
_ABSENT: Final = msgspec.Raw(b"")
# Fields of vLLM that reach past the caller's own request: into other tenants' caches, the scheduler,
# the engine's memory or its connectors.
ENGINE_FIELDS: Final = frozenset(
    {
        "cache_salt",
        "chat_template",
        "ec_transfer_params",
        "echo",
        "enable_response_messages",
        "ignore_eos",
        "kv_transfer_params",
        "logits_processors",
        "media_io_kwargs",
        "min_tokens",
        "mm_processor_kwargs",
        "previous_input_messages",
        "priority",
        "prompt_embeds",
        "prompt_logprobs",
        "repetition_detection",
        "request_id",
        "return_token_ids",
        "session_id",
        "truncate_prompt_tokens",
        "use_beam_search",
        "vllm_xargs",
        "watermarking",
    }
)
KNOWN: Final = ENGINE_FIELDS | {
    "best_of",
    "input",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "model",
    "n",
    "prompt",
    "prompt_cache_key",
    "safety_identifier",
    "stream",
    "stream_options",
    "tools",
    "user",
}


class _Known(msgspec.Struct):
    """The members a gateway acts on; those of KNOWN are added to the class below, as raw values."""

    messages: list[msgspec.Raw] | None = None


def _known_decoder() -> msgspec.json.Decoder[_Known]:
    fields = [(name, msgspec.Raw, _ABSENT) for name in sorted(KNOWN)]
    return msgspec.json.Decoder(cast("type[_Known]", msgspec.defstruct("_Members", fields, bases=(_Known,))))


_KNOWN: Final = _known_decoder()


Pieces: TypeAlias = "tuple[bytes | memoryview, ...]"
"""Bytes in parts, so that a prompt of megabytes is not copied for a few added ones."""


class NotJson(ValueError):
    """The body is not JSON; the message says where it stops being so."""


class NotAnObject(ValueError):
    """The body is JSON, but not an object."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `raw[start:end]` by `text`; `start == end` inserts."""

    start: int
    end: int
    text: bytes


class Body:
    """A JSON object: its bytes, and its members as slices of them.

    The members a gateway acts on are found in the one scan that checks the body; the others when they
    are first asked for. Of a repeated member the last one counts, as in every reader that vLLM uses.
    """

    __slots__ = ("_known", "_members", "raw")

    def __init__(self, raw: bytes, known: _Known | None, members: Mapping[str, msgspec.Raw] | None) -> None:
        self.raw = raw
        self._known = known
        self._members = members

    @property
    def members(self) -> Mapping[str, msgspec.Raw]:
        """Every member, in order; costs a scan of the body the first time."""
        if self._members is None:
            self._members = decoded(_MEMBERS, self.raw)
        return self._members

    def get(self, name: str) -> msgspec.Raw | None:
        """A member's value as it stands in the body, or None when it is absent."""
        if self._known is None or name not in KNOWN:
            return self.members.get(name)
        value: msgspec.Raw = getattr(self._known, name)
        return value if memoryview(value).nbytes else None

    def has(self, name: str) -> bool:
        """Whether the member is there and not null."""
        if name == "messages" and self._known is not None and self._known.messages is not None:
            return True
        value = self.get(name)
        return value is not None and not (self.size(name) == len(b"null") and bytes(value) == b"null")

    def value(self, name: str) -> Any:
        """The member decoded, or None when it is absent or null. Raises `msgspec.DecodeError`.

        Meant for small members.
        """
        value = self.get(name)
        return None if value is None else decoded(_ANY, value)

    def items(self, name: str) -> list[msgspec.Raw]:
        """The elements of an array member, undecoded. Raises `msgspec.ValidationError` if it is no array."""
        if name == "messages" and self._known is not None and self._known.messages is not None:
            return self._known.messages
        return decoded(_ITEMS, self.get(name) or b"null")

    def kind(self, name: str) -> str:
        """The first character of a member's value (`[`, `{`, `"`, a digit, ...); empty when it is absent."""
        value = self.get(name)
        return "" if value is None else chr(memoryview(value)[0])

    def size(self, name: str) -> int:
        """Bytes of a member's value; 0 when it is absent."""
        value = self.get(name)
        return 0 if value is None else memoryview(value).nbytes


def decoded(decoder: msgspec.json.Decoder[T], value: bytes | msgspec.Raw) -> T:
    """A part of a checked body. Raises `msgspec.DecodeError`, also for nesting beyond the parser's depth.

    That depth is the interpreter's own, so that a part may be too deep where the whole was not.
    """
    try:
        return decoder.decode(value)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def parse(raw: bytes) -> Body:
    """Check a request body and find its members, in one scan. Raises `NotJson` or `NotAnObject`."""
    try:
        return Body(raw, _KNOWN.decode(raw), None)
    except msgspec.ValidationError:
        return _parse_members(raw)  # `messages` is no array: the caller says so, naming the field
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson(f"the request body is not valid JSON: {error}") from error


def _parse_members(raw: bytes) -> Body:
    try:
        return Body(raw, None, _MEMBERS.decode(raw))
    except msgspec.ValidationError as error:
        raise NotAnObject("the request body must be a JSON object") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson(f"the request body is not valid JSON: {error}") from error


def splice(raw: bytes, edits: Sequence[Edit]) -> Pieces:
    """Apply edits that do not overlap; everything outside them stays byte for byte, and is not copied."""
    parts: list[bytes | memoryview] = []
    position = 0
    view = memoryview(raw)
    for edit in sorted(edits, key=lambda e: e.start):
        if edit.start < position:
            raise ValueError("edits overlap")
        parts += (view[position : edit.start], edit.text)
        position = edit.end
    parts.append(view[position:])
    return tuple(parts)


def with_member(body: Body, name: str, value: bytes) -> Pieces:
    """The object's bytes with `name: value`: in place of the old value, else as a new last member.

    A replacement is read back: where repeated members have led it astray, the member is appended
    instead, and counts because it is the last of its name.
    """
    span = _member_span(body, name) if body.get(name) is not None else None
    if span is not None:
        replaced = splice(body.raw, [Edit(*span, value)])
        if _reads(b"".join(replaced), name) == value:
            return replaced
    end = body.raw.rindex(b"}")
    comma = b"" if _is_empty(body.raw[:end]) else b","
    return splice(body.raw, [Edit(end, end, comma + msgspec.json.encode(name) + b":" + value)])


def _reads(raw: bytes, name: str) -> bytes | None:
    try:
        return bytes(decoded(_MEMBERS, raw).get(name, _ABSENT))
    except msgspec.DecodeError:  # repeated members have led the replacement into a text
        return None


def _is_empty(head: bytes) -> bool:
    """Whether the bytes before an object's last brace hold no member."""
    return len(head) < 64 and head.strip(_WHITESPACE) == b"{"


def array_spans(body: Body, name: str) -> list[tuple[int, int]] | None:
    """Where the elements of an array member lie in the bytes, or None when repeated members hide it.

    Raises `msgspec.ValidationError` if it is no array.
    """
    items = body.items(name)
    outer = _member_span(body, name)
    if outer is None:
        return None
    spans: list[tuple[int, int]] = []
    position = outer[0] + 1
    for item in items:
        while body.raw[position] in _SEPARATORS:
            position += 1
        spans.append((position, position := position + memoryview(item).nbytes))
    return spans


def _member_span(body: Body, name: str) -> tuple[int, int] | None:
    """Where a member's value lies in the bytes, or None when repeated members hide it.

    Walks from member to member by the known lengths of their values, so that the cost is in the
    number of members, not in the size of the prompt.
    """
    position = body.raw.index(b"{") + 1
    try:
        for member, value in body.members.items():
            start = _value_start(body.raw, position)
            position = start + memoryview(value).nbytes
            if member == name:
                return (start, position) if body.raw[start:position] == bytes(value) else None
    except (ValueError, IndexError):  # a repeated member's length has led past the end
        return None
    return None


def _value_start(raw: bytes, position: int) -> int:
    """The first byte of the value of the member whose name is the next string."""
    position = raw.index(_QUOTE, position) + 1
    while raw[position] != _QUOTE:
        position += 2 if raw[position] == _BACKSLASH else 1
    position = raw.index(b":", position + 1) + 1
    while raw[position] in _WHITESPACE:
        position += 1
    return position
