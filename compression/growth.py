"""How much longer moved text makes a prompt, and which text stays in its place because of that.

Where text moves, the prompt grows whatever the words are: by a placeholder for each piece, and by the label
of its line in a note. Most heads have a few such lines; a table of hundreds would cost more than it saves.

The decision is made from nothing but what is the same in every turn: the facts of the messages without
volatile text, up to the one in question, and what moving costs apart from the words. So one prefix has one
answer for ever: in later turns, in any process, after a restart, and without asking a store. A prompt that
has grown since does not count, for text that moves in one turn and stays in another costs the whole cache.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

from ctxgate.compression.diff_parts import HEAD_ROLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxgate.compression.dialects.chat import Facts

SHARE: Final = 100  # what is added for good may make a prompt longer by a part in so many
FLOOR: Final = 512  # bytes that it may take in any prompt
TAKING_ROLES: Final = frozenset({"user", "tool"})
"""Roles of messages that can hold a note."""


def allowed(size: int) -> int:
    """How many bytes moving may add to a prompt of so many, beside the words themselves."""
    return max(size // SHARE, FLOOR) + 2 * FLOOR


def size_said(facts: Facts) -> int:
    """Bytes of what a message says; the ids of tool calls say nothing."""
    if not facts.calls and facts.answers is None:
        return facts.size
    return facts.size - sum(len(id_.encode()) for id_ in (*facts.calls, facts.answers or ""))


def head_size(facts: Sequence[Facts]) -> int:
    """How many leading messages are the head."""
    return next((at for at, each in enumerate(facts) if each.role not in HEAD_ROLES), len(facts))


def first_turn(facts: Sequence[Facts]) -> int | None:
    """The first message of a user or a tool: every request of a conversation has it."""
    return next((at for at, each in enumerate(facts) if each.role in TAKING_ROLES), None)


def staying(facts: Sequence[Facts], costs: Mapping[int, int]) -> frozenset[int]:
    """The messages whose text stays in its place, as moving it would make the prompt too long.

    `facts`: those of all messages without what would move. `costs`: by message, the bytes that moving takes
    beside the words. The head moves as one or not at all, judged by the prompt up to the first user turn;
    every later message is judged by the prompt up to itself.
    """
    first = first_turn(facts)
    if first is None or not costs:
        return frozenset()
    head = head_size(facts)
    sizes = [*accumulate(map(size_said, facts[: max(first, *costs) + 1]))]
    added = sum(cost for at, cost in costs.items() if at < head)
    found: set[int] = set()
    if added > allowed(sizes[first]):
        found.update(at for at in costs if at < head)
        added = 0
    for at in sorted(at for at in costs if at >= head):
        if added + costs[at] > allowed(sizes[at]):
            found.add(at)
        else:
            added += costs[at]
    return frozenset(found)
