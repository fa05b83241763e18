"""Which messages of a conversation may be dropped, and where.

The unit is the round: an assistant message with all results of its calls, its reasoning inside the
message itself. What stands between rounds (user messages, notes) is a unit of its own. A dropped range
holds whole units, so no result ever loses its call and no batch is parted. Never dropped are the leading
system and developer messages, the first user message after them, messages the caller wants kept, the last
user message, and the end of the conversation.

A cut is decided at one moment and applied to later requests, which hold more messages: `stands` says
whether it still fits them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ctxgate.compression.diff_parts import HEAD_ROLES
from ctxgate.compression.validity import pairing_faults

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.compression.said import Said

ABANDONED_AFTER: Final = 3
"""An unanswered call with this many assistant messages behind it is not waited for any more."""

NO_MEDIA: Final[Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Range:
    """Messages `start` to `stop` - 1."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Messages that stay or go together: `start` to `stop` - 1. `open`: a call in it waits for its result."""

    start: int
    stop: int
    open: bool = False


class CutReason(StrEnum):
    """Why a cut is what it is."""

    CUT = "cut"
    OPEN_CALL = "open_call"  # a call waits for its result: nothing may be cut now
    NOTHING_OLD = "nothing_old"  # all that could go belongs to the end that stays


@dataclass(frozen=True, slots=True)
class Cut:
    """What may be dropped: ranges in order, with kept messages between any two of them.

    `split` are kept messages that are larger than the room for the whole prompt: each goes out as its
    head and tail with a reference. `tail` is the first message of the end that stays.
    """

    dropped: tuple[Range, ...]
    split: tuple[int, ...]
    tail: int
    reason: CutReason


def plan_cut(
    messages: Sequence[Facts],
    tokens: Sequence[int],
    *,
    tail_tokens: int,
    room: int,
    keep: Collection[int] = (),
    floor: int = 0,
    media: Mapping[int, int] = NO_MEDIA,
) -> Cut:
    """The deepest cut that leaves the last `tail_tokens` as they are.

    `tokens` holds the size of each message. The tail is made of whole units, at least the last one.
    `keep` are indexes of messages that stay verbatim, with their whole rounds. An earlier cut reached to
    `floor`: this one reaches at least as far. `room` is what the whole prompt may hold, in tokens. While
    a call waits for its result nothing new is cut, and an earlier cut goes on as it is. `media` holds, by
    message, how many of its tokens are no text: a message is split for its text alone.
    """
    parts = units(messages)
    head = head_length(messages)
    tail = tail_start(parts, tokens, tail_tokens)
    if any(part.open for part in parts):
        return Cut((), (), tail, CutReason.OPEN_CALL)
    tail = max(tail, _unit_end(parts, floor))
    wanted = set(keep) | _first_and_last_user(messages, head)
    dropped = _ranges(part for part in parts if head <= part.start < tail and not _touches(part, wanted))
    gone = _indexes(dropped)
    split = tuple(
        at
        for at, size in enumerate(tokens)
        if size - media.get(at, 0) > room
        and at not in gone
        and messages[at].role not in HEAD_ROLES
        and not messages[at].calls
    )
    return Cut(dropped, split, tail, CutReason.CUT if dropped else CutReason.NOTHING_OLD)


def units(messages: Sequence[Facts]) -> list[Unit]:
    """The conversation in pieces that stay or go together, in order and without gaps.

    Results are matched to calls by id, in order: to the latest call of that id before them. Whatever
    stands between a call and its result (an approval, another assistant message) belongs to that round.
    A result without a call goes with what precedes it.
    """
    ends = list(range(1, len(messages) + 1))  # for each message, the end of what hangs on it
    caller: dict[str, int] = {}
    waiting: dict[int, set[str]] = {}
    orphans: list[int] = []
    for at, facts in enumerate(messages):
        for call in facts.calls:
            caller[call] = at
        if facts.calls:
            waiting[at] = set(facts.calls)
        if facts.role != "tool":
            continue
        answers = facts.answers or ""
        start = caller.get(answers)
        if start is None:
            orphans.append(at)
            continue
        ends[start] = at + 1
        waiting[start].discard(answers)
    for at in orphans:
        ends[max(at - 1, 0)] = max(ends[max(at - 1, 0)], at + 1)
    open_calls = _open(messages, waiting)
    return _merged(ends, open_calls)


def head_length(messages: Sequence[Facts]) -> int:
    """How many system and developer messages lead the conversation; later ones are notes, not its head."""
    return next((at for at, facts in enumerate(messages) if facts.role not in HEAD_ROLES), len(messages))


def tail_start(parts: Sequence[Unit], tokens: Sequence[int], tail_tokens: int) -> int:
    """Where the end that stays begins: whole units of at most `tail_tokens`, but at least the last one."""
    if not parts:
        return 0
    start, used = parts[-1].start, _size(parts[-1], tokens)
    for part in reversed(parts[:-1]):
        used += _size(part, tokens)
        if used > tail_tokens:
            break
        start = part.start
    return start


def stands(messages: Sequence[Facts], dropped: Sequence[Range]) -> bool:
    """Whether ranges that were chosen earlier may be dropped from this conversation.

    They may if each still holds whole units, and what is left is no worse paired than the whole.
    """
    parts = units(messages)
    borders = {part.start for part in parts} | {len(messages)}
    if any(a.stop >= b.start for a, b in pairwise(dropped)):
        return False
    if any(each.start >= each.stop or not {each.start, each.stop} <= borders for each in dropped):
        return False
    gone = _indexes(dropped)
    if any(part.open and part.start in gone for part in parts):
        return False
    return not pairing_faults(remaining(messages, dropped)) - pairing_faults(messages)


def still_stands(messages: Sequence[Facts], dropped: Sequence[Range], since: int) -> bool:
    """Whether ranges that stood among the first `since` messages surely do among all of them.

    They do if every result that has come since answers a call behind the last range, and no call of a range
    is waited for any more: then no unit before has grown, and both sides of the comparison in `stands` have
    more of the same faults. False where only `stands` can tell.
    """
    start = dropped[-1].stop if dropped else 0
    if not start < since <= len(messages):
        return False
    calls: set[str] = set()
    behind = 0
    for at in range(start, len(messages)):
        facts = messages[at]
        calls.update(facts.calls)
        behind += facts.role == "assistant"
        if at >= since and facts.role == "tool" and facts.answers not in calls:
            return False
    return behind >= ABANDONED_AFTER


def remaining(messages: Sequence[Facts], dropped: Iterable[Range]) -> list[Facts]:
    """The messages outside the ranges."""
    gone = _indexes(dropped)
    return [facts for at, facts in enumerate(messages) if at not in gone]


def pinned(
    said: Sequence[Said], tokens: Sequence[int], *, sticky: Collection[str] = (), ceiling: int = 0
) -> set[int]:
    """Messages to keep verbatim beside those that every cut keeps.

    They are what the client pinned and, from the latest back while they need at most `ceiling` tokens in
    all, system and developer notes inside the conversation and results of the tools named in `sticky`.
    A pin has no ceiling.
    """
    found = {at for at, message in enumerate(said) if message.pinned}
    names: dict[str, str] = {}
    others: list[int] = []
    for at, message in enumerate(said):
        names.update((call.id, call.name) for call in message.calls)
        is_sticky = message.answers is not None and names.get(message.answers) in sticky
        if is_sticky or message.role in HEAD_ROLES:
            others.append(at)
    left = ceiling
    for at in reversed(others):
        left -= tokens[at]
        if left < 0:
            break
        found.add(at)
    return found


def _open(messages: Sequence[Facts], waiting: dict[int, set[str]]) -> set[int]:
    """The assistant messages with a call whose result may still come."""
    behind = 0
    found: set[int] = set()
    for at in range(len(messages) - 1, -1, -1):
        if behind >= ABANDONED_AFTER:
            break
        if waiting.get(at):
            found.add(at)
        behind += messages[at].role == "assistant"
    return found


def _merged(ends: Sequence[int], open_calls: Collection[int]) -> list[Unit]:
    """Units from what hangs on each message: overlapping spans are one."""
    found: list[Unit] = []
    start = end = 0
    is_open = False
    for at, stop in enumerate(ends):
        if at == end and at > start:
            found.append(Unit(start, at, is_open))
            start, is_open = at, False
        end = max(end, stop)
        is_open |= at in open_calls
    if end > start:
        found.append(Unit(start, end, is_open))
    return found


def _first_and_last_user(messages: Sequence[Facts], head: int) -> set[int]:
    users = [at for at, facts in enumerate(messages) if at >= head and facts.role == "user"]
    return {users[0], users[-1]} if users else set()


def _touches(part: Unit, wanted: Collection[int]) -> bool:
    return any(at in wanted for at in range(part.start, part.stop))


def _ranges(parts: Iterable[Unit]) -> tuple[Range, ...]:
    """Adjacent units as one range."""
    found: list[Range] = []
    for part in parts:
        if found and found[-1].stop == part.start:
            found[-1] = Range(found[-1].start, part.stop)
        else:
            found.append(Range(part.start, part.stop))
    return tuple(found)


def _indexes(ranges: Iterable[Range]) -> set[int]:
    return {at for each in ranges for at in range(each.start, each.stop)}


def _unit_end(parts: Sequence[Unit], floor: int) -> int:
    """The border at or after `floor`."""
    return next((part.stop for part in parts if part.start < floor <= part.stop), floor)


def _size(part: Unit, tokens: Sequence[int]) -> int:
    return sum(tokens[part.start : part.stop])
