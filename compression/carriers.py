"""The message that stands where rounds were dropped without a summary: what was left out, and the rules.

Masking needs no model and must work when nothing else did. All the same, what the user asked to hold is
said in every prompt, word for word: the rules of user messages that are dropped or cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ctxgate.compression.identifiers import Found, IdentifierKind, collected, rules_block
from ctxgate.compression.masking import notice_text
from ctxgate.compression.said import read_said
from ctxgate.compression.user_rules import user_rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ctxgate.compression.ask import Text


def notice(reference: str, left_out: Iterable[Text], before: bytes = b"") -> bytes:
    """The carrier of dropped rounds as a user message in JSON.

    `left_out` are the messages that are dropped or cut, of which the users' are read. `before` is the
    carrier of an earlier compaction that wrote a summary: its text stays, and this one's follows.
    """
    earlier = read_said(before).text if before else ""
    rules = [rule for rule in rules_of(left_out) if rule not in earlier]
    text = "\n".join(part for part in (earlier, notice_text(reference), _listed(rules)) if part)
    return msgspec.json.encode({"role": "user", "content": text})


def rules_of(messages: Iterable[Text]) -> list[str]:
    """The rules in the messages of users, each once, in the order in which they were given."""
    said = map(read_said, messages)
    return list(dict.fromkeys(rule for each in said if each.role == "user" for rule in user_rules(each.text)))


def _listed(rules: Sequence[str]) -> str:
    found = [Found(IdentifierKind.RULE, rule, told=True) for rule in rules]
    return rules_block(collected([(0, found)]))
