"""What to do about a difference that costs cached tokens: by the client, and by a layout level. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxgate.compression.divergence import DivergenceKind

if TYPE_CHECKING:
    from ctxgate.compression.volatile import VolatileKind


def advice(kind: DivergenceKind, volatile: VolatileKind | str | None = None, field: str = "") -> str:
    """What a client's author can do, then which level of `layout` does it without the client.

    `volatile` is what changed by itself there, and `field` the place in the request.
    """
    cure = _cure(kind, volatile, field)
    return ADVICE[kind] if cure is None else f"{ADVICE[kind]} {cure}"


def _cure(kind: DivergenceKind, volatile: VolatileKind | str | None, field: str) -> str | None:
    if kind is not DivergenceKind.VOLATILE_IN_HEAD:
        return _CURES.get(kind)
    if field.startswith("tools"):
        return "No layout level changes a tool's text."
    if field == "prompt":
        return None
    return (
        f"Layout `declared` with `volatile: [{volatile or 'clock'}]` moves it there; `learned` finds out by "
        "itself what changes."
    )


_DROP_RARELY: Final = (
    "drop or shorten old messages rarely and many at a time; a window that slides each turn loses it each "
    "time."
)
ADVICE: Final = {
    DivergenceKind.EXTENDS: "nothing; this is how a conversation should grow.",
    DivergenceKind.MODEL_CHANGED: "keep one model for a conversation; each reads the prompt for itself.",
    DivergenceKind.SALT: "send the same `cache_salt` with all requests that may share a prefix.",
    DivergenceKind.TEMPLATE_CHANGED: "send the same value in every request of a conversation.",
    DivergenceKind.TOOLS_CHANGED: (
        "declare all tools from the first request on. Tools stand before the history in most templates, so "
        "a tool that comes late or goes early costs the whole conversation once."
    ),
    DivergenceKind.TOOLS_REORDERED: "send the tools in one order: sort them, or keep a list, not a set.",
    DivergenceKind.TOOLS_RESERIALIZED: (
        "write each schema once and send the same text again, or serialize with a fixed order of keys."
    ),
    DivergenceKind.SYSTEM_CHANGED: (
        "keep the system prompt as it was first sent, and put what changes into the last user message."
    ),
    DivergenceKind.VOLATILE_IN_HEAD: (
        "take it out of the head. Put it at the end of the last user message, or let a tool tell it; a date "
        "without the time of day changes once a day."
    ),
    DivergenceKind.HISTORY_EDITED: (
        "send earlier messages as they were first sent, and say corrections in a new message."
    ),
    DivergenceKind.HISTORY_REORDERED: "send earlier messages in the order in which they were first sent.",
    DivergenceKind.HISTORY_RESERIALIZED: (
        "keep each message, and the arguments of each tool call, as the text that came, and send that text "
        "again instead of a value serialized anew."
    ),
    DivergenceKind.HISTORY_TRUNCATED: _DROP_RARELY,
    DivergenceKind.HISTORY_COMPACTED: _DROP_RARELY,
}
_CURES: Final = {
    DivergenceKind.TOOLS_CHANGED: "Layout `safe` puts a new tool last, so that the others stay as they were.",
    DivergenceKind.TOOLS_REORDERED: "Layout `safe` sends them in the order of their first sight.",
    DivergenceKind.TOOLS_RESERIALIZED: "Layout `safe` sends the text of its first sight.",
    DivergenceKind.SYSTEM_CHANGED: (
        "Layout `learned` moves blocks there that keep changing; `declared` what a `pattern` or a mark names."
    ),
    DivergenceKind.HISTORY_RESERIALIZED: (
        "Layout `safe` sends tool calls, their ids and empty contents in the form of their first sight."
    ),
}
