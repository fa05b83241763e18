"""A message that is larger than the room for it: the two ends of its texts, with a reference between.

Where a call's arguments are what is large, such as a file that is written, their long texts are cut in the
same way, and stay JSON with the same members; arguments that are no JSON are cut as a text. So is what a
model thought before its answer. What a user asked to hold is said all the same. Parts that are
no text, such as pictures, stay as they are.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.said import read_said, repaired, with_text
from ctxgate.compression.texts import MessageTexts
from ctxgate.compression.tool_output import split_oversize
from ctxgate.compression.user_rules import user_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ctxgate.compression.ask import Text

LEAST: Final = 400
"""Bytes below which no text is cut: its ends and the reference need as much."""

_REASONING: Final = ("reasoning_content", "reasoning")
_ANY: Final = msgspec.json.Decoder()


def split_message(raw: Text, limit: int, reference: str) -> bytes:
    """A message whose texts, and those in its calls' arguments, have about `limit` bytes together.

    A user's rules that are cut away follow at its end, in as many bytes again. Raises ValueError for what is
    no message.
    """
    said = read_said(raw)
    message = MessageTexts.read(raw) or MessageTexts.read(_repaired(raw))
    if message is None:
        return with_text(raw, _cut(said.role, said.text, limit, reference))
    texts = list(message.texts())
    calls, thoughts = _calls(message), _thoughts(message)
    if not texts and not calls and not thoughts:
        if message.is_list():  # nothing but pictures and the like
            return bytes(raw)
        return with_text(raw, _cut(said.role, said.text, limit, reference))
    sizes = [len(text.encode()) for _, text in texts]
    sizes += [len(leaf.encode()) for call in calls for leaf in _leaves(call)]
    sizes += [len(text.encode()) for text in thoughts.values()]
    room = _common(sizes, limit)
    for at, text in texts:
        message.put(at, _cut(said.role, text, room, reference))
    if calls and max(sizes, default=0) > room:
        _put_calls(message, lambda text: _cut("", text, room, reference))
    for name, text in thoughts.items():
        message.members[name] = msgspec.Raw(msgspec.json.encode(_cut("", text, room, reference)))
    return message.raw()


def _repaired(raw: Text) -> bytes:
    """A message without halves of surrogate pairs in its texts."""
    return _written(_mapped(_read(bytes(raw)), lambda text: repaired(text)[0]))


def _common(sizes: list[int], limit: int) -> int:
    """The most bytes that each text may have for all of them to have `limit` together."""
    left = limit
    for number, size in enumerate(sorted(sizes)):
        room = max(left, 0) // (len(sizes) - number)
        if size > room:
            return max(room, LEAST)
        left -= size
    return max(sizes, default=0)


def _cut(role: str, text: str, room: int, reference: str) -> str:
    """A text of at most `room` bytes, and the user's rules that are no longer in it."""
    if len(text) <= room and len(text.encode()) <= room:
        return text
    cut = split_oversize(text, room, reference)
    lost: list[str] = []
    for rule in user_rules(text) if role == "user" else ():
        if rule not in cut:
            room -= len(rule.encode("utf-8", "replace"))
            if room < 0:
                break
            lost.append(f"\n- {rule}")
    return cut + "".join(lost)


def _thoughts(message: MessageTexts) -> dict[str, str]:
    """What a model thought first, where the client sends it back: by the member's name."""
    found: dict[str, str] = {}
    for name in _REASONING:
        value = _read(bytes(message.members.get(name, b"null")))
        if isinstance(value, str):
            found[name] = repaired(value)[0]
    return found


def _calls(message: MessageTexts) -> list[Any]:
    """The arguments of a message's calls."""
    found = [_arguments(call) for call in _call_list(message)]
    return [value for value in found if value is not None]


def _call_list(message: MessageTexts) -> list[Any]:
    calls = _read(bytes(message.members.get("tool_calls", b"null")))
    return calls if isinstance(calls, list) else []


def _read(raw: bytes) -> Any:
    """A JSON value, in whose texts halves of surrogate pairs may stand; None for what is none."""
    try:
        return _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return None
    text = repaired(arguments)[0]
    value = _read(text.encode())
    return _Plain(text) if value is None else _mapped(value, lambda leaf: repaired(leaf)[0])


class _Plain(str):
    """Arguments that are no JSON."""

    __slots__ = ()


def _put_calls(message: MessageTexts, cut: Callable[[str], str]) -> None:
    calls = _call_list(message)
    for call in calls:
        value = _arguments(call)
        if value is not None:
            put = _mapped(value, cut)
            call["function"]["arguments"] = put if isinstance(value, _Plain) else _written(put).decode()
    message.members["tool_calls"] = msgspec.Raw(_written(calls))


def _written(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a surrogate pair in a name or an id
        return json.dumps(value).encode()


def _leaves(value: Any) -> Iterator[str]:
    """The texts in a JSON value, but for the names of members."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)


def _mapped(value: Any, cut: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, dict):
        return {name: _mapped(inner, cut) for name, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, cut) for inner in value]
    return value
