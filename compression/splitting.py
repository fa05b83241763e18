"""A message that is larger than the room for it: the two ends of its texts, with a reference between.

Where a call's arguments are what is large, such as a file that is written, their long texts are cut in the
same way, and stay JSON with the same members. What a user asked to hold is said all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.said import read_said, with_text
from ctxgate.compression.texts import MessageTexts
from ctxgate.compression.tool_output import split_oversize
from ctxgate.compression.user_rules import user_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ctxgate.compression.ask import Text

LEAST: Final = 400
"""Bytes below which no text is cut: its ends and the reference need as much."""

_ANY: Final = msgspec.json.Decoder()


def split_message(raw: Text, limit: int, reference: str) -> bytes:
    """A message whose texts, and those in its calls' arguments, have about `limit` bytes together.

    A user's rules that are cut away follow at its end, in as many bytes again. Raises ValueError for what is
    no message.
    """
    said = read_said(raw)
    message = MessageTexts.read(raw)
    if message is None:
        return with_text(raw, _cut(said.role, said.text, limit, reference))
    texts = list(message.texts())
    calls = _calls(message)
    if not texts and not calls:
        return with_text(raw, _cut(said.role, said.text, limit, reference))
    sizes = [len(text.encode()) for _, text in texts]
    sizes += [len(leaf.encode()) for call in calls for leaf in _leaves(call)]
    room = _common(sizes, limit)
    for at, text in texts:
        message.put(at, _cut(said.role, text, room, reference))
    if calls and max(sizes, default=0) > room:
        _put_calls(message, lambda text: _cut("", text, room, reference))
    return message.raw()


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


def _calls(message: MessageTexts) -> list[Any]:
    """The arguments of a message's calls, of those whose arguments are JSON."""
    found = [_arguments(call) for call in _call_list(message)]
    return [value for value in found if value is not None]


def _call_list(message: MessageTexts) -> list[Any]:
    raw = message.members.get("tool_calls")
    try:
        calls = None if raw is None else _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return []
    return calls if isinstance(calls, list) else []


def _arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    try:
        return _ANY.decode(arguments.encode()) if isinstance(arguments, str) else None
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


def _put_calls(message: MessageTexts, cut: Callable[[str], str]) -> None:
    calls = _call_list(message)
    for call in calls:
        value = _arguments(call)
        if value is not None:
            call["function"]["arguments"] = msgspec.json.encode(_mapped(value, cut)).decode()
    message.members["tool_calls"] = msgspec.Raw(msgspec.json.encode(calls))


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
