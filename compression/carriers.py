"""The message that stands where rounds were dropped without a summary: what was left out, and the rules.

Masking needs no model and must work when nothing else did. All the same, what the user asked to hold is
said in every prompt, word for word: the rules of user messages that are dropped or cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.identifiers import Found, IdentifierKind, collected, rules_block
from ctxgate.compression.masking import notice_text
from ctxgate.compression.said import read_said
from ctxgate.compression.tool_output import split_oversize
from ctxgate.compression.user_rules import user_rules

_SUMMARY_SHARE: Final = 2  # of the room for rules
_LINE_BYTES: Final = 4  # around a rule that is listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ctxgate.compression.ask import Text


def notice(
    reference: str,
    left_out: Iterable[Text],
    before: bytes = b"",
    *,
    reference_before: str = "",
    room: int | None = None,
) -> bytes:
    """The carrier of dropped rounds as a user message in JSON.

    `left_out` are the messages that are dropped or cut, of which the users' are read. `before` is the
    carrier of an earlier compaction: the summary in it stays, and this one's text follows in place of the
    notice with `reference_before`, if it has one. `room`: the most bytes of rules; of more, the newest are
    said, and how many are not. A summary that has more than twice as much loses its middle.
    """
    earlier = read_said(before).text if before else ""
    if reference_before:
        earlier = earlier.partition(notice_text(reference_before))[0].rstrip("\n")
    if room is not None:
        earlier = split_oversize(earlier, _SUMMARY_SHARE * room, reference)
    rules = [rule for rule in rules_of(left_out) if rule not in earlier]
    said = rules if room is None else _newest(rules, room)
    more = _more_text(len(rules) - len(said)) if len(said) < len(rules) else ""
    text = "\n".join(part for part in (earlier, notice_text(reference), more, _listed(said)) if part)
    return msgspec.json.encode({"role": "user", "content": text})


def _newest(rules: Sequence[str], room: int) -> Sequence[str]:
    """The last ones that have at most `room` bytes together."""
    for at in range(len(rules) - 1, -1, -1):
        room -= len(rules[at].encode("utf-8", "replace")) + _LINE_BYTES
        if room < 0:
            return rules[at + 1 :]
    return rules


def _more_text(count: int) -> str:
    return f"[{count} older instructions of the user among them are too long to be said here.]"


def rules_of(messages: Iterable[Text]) -> list[str]:
    """The rules in the messages of users, each once, in the order in which they were given."""
    said = map(read_said, messages)
    return list(dict.fromkeys(rule for each in said if each.role == "user" for rule in user_rules(each.text)))


def _listed(rules: Sequence[str]) -> str:
    found = [Found(IdentifierKind.RULE, rule, told=True) for rule in rules]
    return rules_block(collected([(0, found)]))
