"""Whether a rewritten request may be sent: one checker for every outgoing body that was edited.

The rules are those of the wire and of chat templates. A client's own faults are its own: an edited body
is refused for what it makes worse, never for what was wrong before.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from ctxgate.compression.diff_parts import HEAD_ROLES
from ctxgate.compression.growth import size_said

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.compression.layout import Prompt

MAX_GROWTH: Final = 0.01


class Invalid(Exception):
    """An edited body must not be sent. `reason` is one word of a small set."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def check_same(before: Prompt, after: Prompt) -> None:
    """Check that a rewritten prompt is the same prompt in another form. Raises `Invalid`.

    The same messages in the same order, the same tools (each once, in any order), each result that of the
    same call whatever the calls are named, and no call or result that is worse off than before. What text
    moved is `reverted` first.
    """
    if len(after.facts) != len(before.facts):
        raise Invalid("count")
    # What one request and its rewrite share is the same object, and equal to itself.
    pairs = [pair for pair in zip(before.facts, after.facts, strict=True) if pair[0] is not pair[1]]
    if [old.role for old, _ in pairs] != [new.role for _, new in pairs]:
        raise Invalid("roles")
    if [old.nameless for old, _ in pairs] != [new.nameless for _, new in pairs]:
        raise Invalid("messages")
    if [(old.calls, old.answers) for old, _ in pairs] != [(new.calls, new.answers) for _, new in pairs]:
        if answered(after.facts) != answered(before.facts):
            raise Invalid("pairing")
        if pairing_faults(after.facts) - pairing_faults(before.facts):
            raise Invalid("pairing")
    if (before.tools is None) != (after.tools is None):
        raise Invalid("tools")
    if Counter(before.tools or ()) != Counter(after.tools or ()):
        raise Invalid("tools")


def check_cut(
    before: Sequence[Facts],
    after: Sequence[Facts],
    dropped: Sequence[tuple[int, int]],
    changed: Collection[int],
    *,
    carried: bool,
    added: int = 0,
) -> None:
    """Check that a prompt is another one without some whole rounds and with shorter texts. Raises `Invalid`.

    `dropped` are ranges of the messages before; where `carried`, one user message stands in place of the
    first. Only `changed` messages may say something else, with the same role, calls and answers. The leading
    system messages, the first user message and the last message stay, and no call or result is worse off.
    The prompt is not longer than before but for `added` bytes.
    """
    gone = {at for start, stop in dropped for at in range(start, stop)}
    kept = [at for at in range(len(before)) if at not in gone]
    rest = list(after)
    if carried:
        place = dropped[0][0] if dropped else len(rest)
        if place >= len(rest) or rest[place].role != "user" or rest[place].calls:
            raise Invalid("carrier")
        del rest[place]
    if len(rest) != len(kept) or not kept:
        raise Invalid("count")
    first = next((at for at, each in enumerate(before) if each.role == "user"), kept[0])
    head = next((at for at, each in enumerate(before) if each.role not in HEAD_ROLES), len(before))
    if first in gone or kept[-1] != len(before) - 1 or any(at in gone for at in range(head)):
        raise Invalid("kept")
    for at, new in zip(kept, rest, strict=True):
        old = before[at]
        if old is new:
            continue
        if (old.role, old.calls, old.answers) != (new.role, new.calls, new.answers):
            raise Invalid("pairing")
        if old.digest != new.digest and at not in changed:
            raise Invalid("messages")
    if pairing_faults(after) - pairing_faults(before):
        raise Invalid("pairing")
    if sum(each.size for each in after) > sum(each.size for each in before) + added:
        raise Invalid("longer")


def check_put_back(
    before: Sequence[Facts], after: Sequence[Facts], places: Mapping[int, tuple[int, int]]
) -> None:
    """Check that a prompt is another one with hidden rounds put back. Raises `Invalid`.

    `places`: by message before, how many were put in front of it and behind it. Only these messages may say
    something else, with the same role; what was put is calls and results, and no call or result is worse off.
    """
    at = 0
    for number, old in enumerate(before):
        first, last = places.get(number, (0, 0))
        own = [*after[at : at + first], *after[at + first + 1 : at + first + 1 + last]]
        if any(each.role != "tool" and not each.calls for each in own):
            raise Invalid("roles")
        at += first
        if at >= len(after) or after[at].role != old.role:
            raise Invalid("roles")
        if number not in places and after[at].digest != old.digest:
            raise Invalid("messages")
        at += 1 + last
    if at != len(after):
        raise Invalid("count")
    if pairing_faults(after) - pairing_faults(before):
        raise Invalid("pairing")


def answered(messages: Sequence[Facts]) -> list[tuple[int, int] | None]:
    """For each tool result, in order, the call that it answers: its message, and which one of that message.

    None where there is no such call. Of calls with one id the last one before the result counts.
    """
    calls: dict[str, tuple[int, int]] = {}
    found: list[tuple[int, int] | None] = []
    for at, facts in enumerate(messages):
        if facts.role == "tool":
            found.append(calls.get(facts.answers or ""))
        else:
            calls |= {id_: (at, number) for number, id_ in enumerate(facts.calls)}
    return found


def pairing_faults(messages: Sequence[Facts]) -> Counter[str]:
    """What is wrong between tool calls and results: how often each fault occurs.

    `orphan`: a result without a call before it; `twice`: a second result of one call; `unanswered`: a
    call without a result before the next message that is no result, the last message excepted.
    """
    orphans = twice = unanswered = 0
    called: set[str] = set()
    answered: set[str] = set()
    waiting: set[str] = set()
    for facts in messages:
        if facts.role == "tool":
            answer = facts.answers or ""
            orphans += answer not in called
            twice += answer in answered and answer not in waiting
            answered.add(answer)
            waiting.discard(answer)
            continue
        unanswered += len(waiting)
        waiting = set(facts.calls)
        called |= waiting
    return Counter(orphan=orphans, twice=twice, unanswered=unanswered)


def check_length(before: Prompt, after: Prompt, *, declared: int = 0) -> None:
    """Check that edits make a prompt at most 1 % longer, beside what they declare. Raises `Invalid`.

    What counts is what the prompt says: white space, escapes and null members are read away by every
    engine before a template sees the rest. `declared`: bytes of the plan's placeholders and notes. These
    have bounds of their own (`growth`, `notes`), which are the same in every turn: a bound here that
    comes and goes with the prompt's size would take back what has been sent.
    """
    size = size_of(before)
    if size_of(after) > size + size * MAX_GROWTH + declared:
        raise Invalid("longer")


def size_of(prompt: Prompt) -> int:
    """Bytes of what the messages and tools of a prompt say; the ids of tool calls say nothing."""
    return sum(map(size_said, prompt.facts)) + sum(tool.size for tool in prompt.tools or ())
