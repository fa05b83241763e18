"""More messages and one more tool in a request body, without another scan of what stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ctxgate.inference import wire
from ctxgate.inference.frame import frame_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxgate.inference.frame import Span
    from ctxgate.inference.wire import Body


def expanded(body: Body, items: Mapping[int, Sequence[bytes]], tool: bytes = b"") -> Body | None:
    """The body with several messages in the place of some, by index, and with one more tool as the last.

    None where the messages or the tools, of which there must be some, have no certain place, or a text is no
    single JSON value. What is left alone is not scanned again.
    """
    frame = body.frame()
    added = [*(text for texts in items.values() for text in texts), *([tool] if tool else [])]
    if frame is None or not wire.are_values(added):
        return None
    edits: list[wire.Edit] = []
    shift = 0
    if tool:
        tool_spans = wire.array_spans(body, "tools") if body.kind("tools") == "[" else None
        if not tool_spans:
            return None
        end = tool_spans[-1][1]
        edits.append(wire.Edit(end, end, b"," + tool))
        shift = len(tool) + 1 if end < frame.start else 0
    begins = frame.start + shift
    old = body.items("messages")
    messages: list[msgspec.Raw] = []
    spans: list[Span] = []
    for at, (start, end) in enumerate(frame.spans):
        if at not in items:
            messages.append(old[at])
            spans.append((start + shift, end + shift))
            continue
        position = start + shift
        for text in items[at]:
            messages.append(msgspec.Raw(text))
            spans.append((position, position + len(text)))
            position += len(text) + 1
        joined = b",".join(items[at])
        edits.append(wire.Edit(start, end, joined))
        shift += len(joined) - (end - start)
    raw = b"".join(wire.splice(body.raw, edits))
    after = frame_at(raw, begins, frame.end + shift, spans)
    return None if after is None else wire.around(body, messages, raw, after)
