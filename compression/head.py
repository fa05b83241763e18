"""The texts at the front of a chat prompt: what a client writes once and every request begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ctxgate.compression.diff_parts import HEAD_ROLES, content_text, members_of, role, text_of
from ctxgate.compression.volatile import VolatileSpan, find_volatile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ctxgate.inference.wire import Body


@dataclass(frozen=True, slots=True)
class HeadText:
    """A text of the head. `element` counts in rendered order, tools first; the text is never for logs."""

    field: str
    element: int
    text: str


@dataclass(frozen=True, slots=True)
class HeadSpan:
    """A volatile span and the text it is in."""

    head: HeadText
    span: VolatileSpan


def head_texts(body: Body) -> Iterator[HeadText]:
    """The tools' descriptions, then the leading system and developer messages."""
    tools = body.items("tools") if body.kind("tools") == "[" else []
    for at, tool in enumerate(tools):
        function = members_of(tool).get("function")
        description = None if function is None else members_of(function).get("description")
        text = None if description is None else text_of(description)
        if text:
            yield HeadText(f"tools[{at}].function.description", at, text)
    try:
        messages = body.items("messages")
    except msgspec.DecodeError:
        return
    for at, message in enumerate(messages):
        if role(message) not in HEAD_ROLES:
            return
        content = members_of(message).get("content")
        text = None if content is None else content_text(content)
        if text:
            yield HeadText(f"messages[{at}].content", len(tools) + at, text)


def volatile_head(body: Body) -> tuple[HeadSpan, ...]:
    """Every volatile span of the head, in rendered order."""
    return tuple(HeadSpan(head, span) for head in head_texts(body) for span in find_volatile(head.text))
