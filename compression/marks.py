"""Marks by which a client says what of its prompt is stable and what changes.

    {"role": "system", "content": "...", "ctxgate": {"stability": "stable"}}
    {"type": "text", "text": "...", "ctxgate": {"stability": "volatile"}}
    {"type": "text", "text": "...", "cache_control": {"type": "ephemeral"}}
    {"role": "user", "content": "...", "ctxgate": {"pin": true}}

A mark stands on a message, for all its parts, or on one part, which then goes by its own. `volatile`
text leaves its place (see `taking`); `stable` text stays, whatever a detector or a pattern finds in it.

`pin` on a message or a part keeps the message, with its round, out of every compaction (see `cut`); it may
stand beside `stability`.

`cache_control` on a leading message or a part of one makes everything up to and including it stable,
what is marked `volatile` excepted. Behind the leading messages it says nothing: clients put it on their
last message in every request, for whatever precedes it, clocks included.

A mark that is not understood is an error that names its field, for a typing error would silently cost
what the mark was to save. `cache_control` is other services' word: its values are not checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.texts import CACHE_MARK, GATEWAY_MARK, MessageTexts
from ctxgate.inference.wire import decoded

if TYPE_CHECKING:
    from collections.abc import Mapping

_ANY: Final = msgspec.json.Decoder()
_LONGEST: Final = 256  # bytes of a mark
_BRACE: Final = 0x7B
_SPEAKERS: Final = frozenset({"system", "developer", "user", "tool"})


class Stability(StrEnum):
    """What a mark says of a text."""

    STABLE = "stable"
    VOLATILE = "volatile"


class MarkError(ValueError):
    """A mark that is not understood: its field, and what is wrong. Holds no text of the prompt."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"'{field}' {problem}.")
        self.field = field


@dataclass(frozen=True, slots=True)
class Marks:
    """What the marks of one message say.

    `parts`: for each part what was said of it, if anything. `cached`: how many parts, from the first on,
    a `cache_control` covers.
    """

    parts: tuple[Stability | None, ...] = ()
    cached: int = 0


def read_marks(message: MessageTexts, role: str, field: str) -> Marks:
    """The marks of a message. `field` is its name in the request. Raises `MarkError`."""
    whole = _stability(message.members, field)
    size = len(message)
    parts: list[Stability | None] = [whole] * size
    cached = size if _is_object(message.members.get(CACHE_MARK)) else 0
    for at, members in enumerate(message.parts):
        parts[at] = _stability(members, f"{field}.content[{at}]") or whole
        if _is_object(members.get(CACHE_MARK)):
            cached = max(cached, at + 1)
    if Stability.VOLATILE in parts or whole is Stability.VOLATILE:
        _check_volatile(message, parts, role, field)
    return Marks(tuple(parts), cached)


def _check_volatile(message: MessageTexts, parts: list[Stability | None], role: str, field: str) -> None:
    if role not in _SPEAKERS:
        raise MarkError(
            f"{field}.{GATEWAY_MARK}",
            "says 'volatile', which is for system, developer, user and tool messages",
        )
    if not parts:
        raise MarkError(f"{field}.{GATEWAY_MARK}", "says 'volatile', but the message has no content")
    for at, said in enumerate(parts):
        if said is Stability.VOLATILE and message.text(at) is None:
            place = f"{field}.content[{at}]" if message.is_list() else f"{field}.content"
            raise MarkError(place, "is marked 'volatile', but is no well-formed text")


def _stability(members: Mapping[str, msgspec.Raw], field: str) -> Stability | None:
    value = members.get(GATEWAY_MARK)
    if value is None or bytes(memoryview(value)[:5]) == b"null":
        return None
    field = f"{field}.{GATEWAY_MARK}"
    if not _is_object(value) or memoryview(value).nbytes > _LONGEST:
        raise MarkError(field, 'must be an object such as {"stability": "volatile"}')
    found = decoded(_ANY, value)
    for name in found:
        if name not in ("stability", "pin"):
            raise MarkError(field, "must hold 'stability' or 'pin' alone")
    if not isinstance(found.get("pin", False), bool):
        raise MarkError(f"{field}.pin", "must be true or false")
    if "pin" in found and "stability" not in found:
        return None
    if found.get("stability") not in [*Stability]:
        raise MarkError(f"{field}.stability", "must be 'stable' or 'volatile'")
    return Stability(found["stability"])


def _is_object(value: msgspec.Raw | None) -> bool:
    return value is not None and memoryview(value)[0] == _BRACE
