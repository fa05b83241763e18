"""What leaves its place in a prompt: the type that the levels `declared` and `learned` fill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.compression.plan import PlanEdit

PLACEHOLDER: Final = "[see latest note]"
"""What stands where text was taken out: the same for all, whatever it was."""

HEADING: Final = "[As of this message]"
"""The first line of a note. A note ends its message; neither constant ever stands inside one."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Text that left message `message` (its index in the request).

    `words`: the pieces, unchanged and in their order; each left a PLACEHOLDER. `line` is what the note
    says: the constant text before the first piece on its line, then the pieces with what stood between.
    """

    message: int
    words: tuple[str, ...] = field(repr=False)
    line: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Moved:
    """A prompt without its volatile text.

    `texts`: by message index, the JSON text of each message that changes; a placeholder, a mark that is
    taken off and a new order of blocks inside one message are part of it. `facts`: those of all messages
    with these texts in place and without any marks; they name the conversation, whatever the clock says.
    `passages`: what moved; those of one message in the order of their placeholders in its new text.
    `reasons`: one per message that changes.
    """

    facts: tuple[Facts, ...]
    texts: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    passages: tuple[Passage, ...] = ()
    reasons: tuple[PlanEdit, ...] = ()
