"""What leaves its place in a prompt: the type that the levels `declared` and `learned` fill."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    `cost`: bytes by which the move makes the prompt longer, whatever the words are. `waits`: no note of
    this request can say the words as they are now; the last one says what they were.
    """

    message: int
    words: tuple[str, ...] = field(repr=False)
    line: str = field(repr=False)
    cost: int = 0
    waits: bool = False

    def waiting(self) -> Passage:
        """The same passage, not said in this request."""
        return replace(self, waits=True)


@dataclass(frozen=True, slots=True)
class Moved:
    """A prompt without its volatile text.

    `texts`: by message index, the JSON text of each message that changes; a placeholder, a mark that is
    taken off and a new order of blocks inside one message are part of it. `facts`: those of all messages
    with these texts in place and without any marks; they name the conversation, whatever the clock says.
    `passages`: what moved; those of one message in the order of their placeholders in its new text.
    `reasons`: one per message that changes. `staying`: the messages whose text would make the prompt too
    long if it moved (see `growth`); their `facts` are those without it all the same.
    """

    facts: tuple[Facts, ...]
    texts: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    passages: tuple[Passage, ...] = ()
    reasons: tuple[PlanEdit, ...] = ()
    staying: frozenset[int] = frozenset()
