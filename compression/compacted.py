"""Whether the beginning of a history was replaced by less: a compaction, not an edit. Pure.

A client that makes room puts a summary in the place of many messages, or blanks old tool results where they
stand. Either way the end of the history is kept, and what stands before it has become less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

_SHARE: Final = 2  # messages blanked in their places have at most one in so many of their bytes left


def is_compacted(
    before: Sequence[T], after: Sequence[T], before_sizes: Sequence[int], after_sizes: Sequence[int]
) -> bool:
    """Whether `after` keeps the end of `before` and has fewer or much shorter messages ahead of it.

    Both begin where the two histories part; sizes are bytes, one for each message. A single message that
    became shorter was edited. Linear.
    """
    kept, there = len(before) - 1, _last(after, before[-1]) if before else -1
    if there < 0:
        return False
    while kept and there and before[kept - 1] == after[there - 1]:
        kept, there = kept - 1, there - 1
    if kept != there:
        return there < kept
    changed = [at for at in range(kept) if before[at] != after[at]]
    was, now = (sum(sizes[at] for at in changed) for sizes in (before_sizes, after_sizes))
    return len(changed) > 1 and now * _SHARE <= was


def _last(messages: Sequence[T], wanted: T) -> int:
    return next((at for at in range(len(messages) - 1, -1, -1) if messages[at] == wanted), -1)
