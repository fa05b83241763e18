"""Why prompt tokens that could have come from the cache were computed anew: causes, and the verdict.

Pure. What is judged is one prompt as it went out, against the request before it in its conversation, what
its replica was expected to hold, and what the engine reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from msgspec import structs

from ctxgate.compression.divergence import DivergenceKind
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from ctxgate.compression.divergence import Divergence
    from ctxgate.compression.previous import Before
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.routing.prefix_index import Expected, Place


class MissCause(StrEnum):
    """Why tokens were missed. Closed: the label of a metric."""

    TOOLS_CHANGED = "tools_changed"  # other tools, or the same written differently
    SYSTEM_CHANGED = "system_changed"  # a clock or a counter in it, for example
    HISTORY_EDITED = "history_edited"  # an earlier message says something else, or is written differently
    REORDERED = "reordered"  # the same tools or messages in another order
    COMPACTION = "compaction"  # earlier messages were dropped, or replaced by fewer or much shorter ones
    MODEL_CHANGED = "model_changed"
    TEMPLATE_CHANGED = "template_changed"  # a field that chat templates read, or the template's own doing
    SALT = "salt"
    MOVED_REPLICA = "moved_replica"  # the conversation's last request went to another replica
    EVICTED = "evicted"  # the replica has since written enough other prompts to need the room
    EXPIRED = "expired"  # it has not: it restarted, was reset, or others filled it
    NOT_REPORTED = "not_reported"  # the engine does not tell what it found


REWRITTEN: Final = "history_rewritten"
"""Detail of a miss by a template that prints earlier messages anew, such as one that drops old reasoning."""

BY_GATEWAY: Final = "by_gateway"
"""Detail of a miss by a compaction that the gateway made: nothing that a client could have avoided."""

_OF_HISTORY: Final = frozenset({MissCause.COMPACTION, MissCause.HISTORY_EDITED, MissCause.REORDERED})


@dataclass(frozen=True, slots=True)
class Miss:
    """One request's miss, without any text of its prompt.

    `detail` is the kind of difference and, behind a slash, of the volatile text in it; for a moved
    conversation the place it came from. `field` is the place in the request, `index` the position in its
    `tools` or `messages`, `offset` the first differing byte of that element's JSON text (None where only
    digests were compared). `avoidable_tokens` would have been found in the cache otherwise, and
    `avoidable_nano` is what they cost more than then; None where that is not known.
    """

    cause: MissCause
    detail: str | None = None
    field: str | None = None
    index: int | None = None
    offset: int | None = None
    avoidable_tokens: int | None = None
    avoidable_nano: int | None = None

    def header(self) -> bytes:
        """The value of `x-ctxgate-miss`."""
        parts = [
            ("detail", self.detail),
            ("field", self.field),
            ("avoidable", self.avoidable_tokens),
        ]
        return "; ".join(
            [self.cause.value, *(f"{name}={value}" for name, value in parts if value is not None)]
        ).encode("ascii", "replace")


class Evidence(Record, frozen=True):
    """What is known of one attempt's prompt.

    `prompt`, `cached`: its tokens, and those found in the cache, as reported (or, before the answer, as
    estimated and expected). `size`: bytes of its tools and messages, `messages`: their number.
    `difference` is the first difference from `before` that reaches the prompt. `block` is the replica's
    block in tokens, and `slack` how many tokens a hit must fall short of what was expected before that
    means something. `rewrites`: the pool's template is known to print earlier messages anew in some turns.
    `goes_on`: the prompt holds the last message of `before`, so that it should have gone where that went.
    """

    place: Place
    prompt: int
    cached: int
    size: int
    messages: int
    block: int
    slack: int
    before: Before | None = None
    difference: Divergence | None = None
    exact: bool = False  # the bytes were compared, not digests
    expected: Expected | None = None
    rewrites: bool = False
    goes_on: bool = True

    def whole(self, tokens: int) -> int:
        """What the cache can hold of this many tokens of the prompt."""
        return max(min(tokens, self.prompt - 1), 0) // self.block * self.block

    def tokens_of(self, size: int) -> int:
        """Tokens of a number of the prompt's bytes, at its own ratio."""
        return size * self.prompt // max(self.size, 1)


def verdict(evidence: Evidence) -> Miss | None:
    """The cause that cost the most, None where nothing was missed."""
    found = [miss for miss in (_by_content(evidence), _by_place(evidence)) if miss is not None]
    return max(found, key=lambda miss: miss.avoidable_tokens or 0, default=None)


def excused(miss: Miss | None, turn: Turn | None) -> Miss | None:
    """A miss as the gateway's, where the history changed because this request is the first compacted so."""
    if miss is None or turn is None or turn.record is None:
        return miss
    if miss.cause not in _OF_HISTORY or not (miss.detail or "").startswith("history"):
        return miss
    if turn.known is not None and turn.known.record == turn.record:
        return miss
    return Miss(MissCause.COMPACTION, BY_GATEWAY, avoidable_tokens=0, avoidable_nano=0)


def bounded(evidence: Evidence, most: Divergence | None) -> Evidence | None:
    """Evidence that gives the verdict of the exact difference where only a coarse one is known.

    `most` is the exact one with as many bytes held as there can be, or None: see `bounds`. None where the
    exact one must be known.
    """
    before, expected, coarse = evidence.before, evidence.expected, evidence.difference
    if most is None and coarse is not None:
        if before is not None and before.place != evidence.place:
            return None
        if expected is not None and expected.known > evidence.cached:
            return None
        most = replace(coarse, kept_bytes=0, avoidable_bytes=evidence.size)
    loosest = structs.replace(evidence, difference=most)
    return loosest if _by_content(loosest) is None else None


def not_reported(before: Before | None, expected: Expected | None) -> Miss | None:
    """The miss of an engine that does not tell its hits: one where a hit was to be expected."""
    if before is None and (expected is None or not expected.tokens):
        return None
    return Miss(MissCause.NOT_REPORTED)


def _by_content(evidence: Evidence) -> Miss | None:
    """Tokens that the prompt itself threw away, by differing from the one before it."""
    difference, before = evidence.difference, evidence.before
    if difference is None or before is None or not difference.rendered:
        return None
    could = evidence.tokens_of(difference.kept_bytes + difference.avoidable_bytes)
    if before.tokens is not None:
        could = min(could, before.tokens)
    lost = evidence.whole(could) - max(evidence.cached, _lost_otherwise(evidence, difference, before))
    if not _in_head(difference, before):
        # In the head all may be lost, whatever stands before the difference: many templates print the
        # system message before the tools.
        lost = min(lost, evidence.tokens_of(difference.avoidable_bytes))
    if lost < evidence.block:
        return None
    return replace(_described(difference, before, evidence), avoidable_tokens=lost)


def _lost_otherwise(evidence: Evidence, difference: Divergence, before: Before) -> int:
    """Tokens from the front that the content would have left in the cache, wherever they are now."""
    if before.place != evidence.place:
        return evidence.whole(evidence.tokens_of(_kept(difference, before)))
    expected = evidence.expected
    return evidence.whole(expected.known) if expected is not None and expected.counted else 0


def _head_changed(evidence: Evidence) -> bool:
    difference, before = evidence.difference, evidence.before
    return (
        difference is not None and before is not None and difference.rendered and _in_head(difference, before)
    )


def _in_head(difference: Divergence, before: Before) -> bool:
    index = difference.index
    return index is None or difference.field.startswith("tools") or index < before.outline.heads


def _kept(difference: Divergence, before: Before) -> int:
    """Bytes of a prompt that certainly stand before the difference: in the head, none do."""
    return 0 if _in_head(difference, before) else difference.kept_bytes


def _by_place(evidence: Evidence) -> Miss | None:
    """Tokens that the replica no longer held, or never did."""
    before, expected, difference = evidence.before, evidence.expected, evidence.difference
    cause, detail = MissCause.EVICTED, None
    if (
        before is not None
        and evidence.goes_on
        and before.place != evidence.place
        and before.tokens is not None
    ):
        kept = before.tokens
        if difference is not None and difference.rendered:
            kept = min(kept, evidence.tokens_of(_kept(difference, before)))
        cause, detail = MissCause.MOVED_REPLICA, "/".join(before.place)
        short = evidence.whole(kept) - evidence.cached
    elif expected is not None:
        short = evidence.whole(expected.known) - evidence.cached  # evicted ones are missed, too
        if not expected.counted and (2 * evidence.cached >= expected.known or _head_changed(evidence)):
            return None  # the expectation itself is no better than that
        if expected.foreign < short:
            cause, detail = (
                (MissCause.TEMPLATE_CHANGED, REWRITTEN) if evidence.rewrites else (MissCause.EXPIRED, None)
            )
    else:
        return None
    return Miss(cause, detail, avoidable_tokens=short) if short >= max(evidence.slack, 1) else None


def _described(difference: Divergence, before: Before, evidence: Evidence) -> Miss:
    """A difference as a miss, its tokens not yet counted."""
    kind, detail = difference.kind, difference.kind.value
    cause = _CAUSES[kind]
    if kind is DivergenceKind.VOLATILE_IN_HEAD and difference.field.startswith("tools"):
        cause = MissCause.TOOLS_CHANGED
    if difference.volatile is not None:
        detail = f"{detail}/{difference.volatile.value}"
    if kind is DivergenceKind.HISTORY_EDITED and evidence.messages < before.outline.messages:
        cause = MissCause.COMPACTION
    offset = difference.offset if evidence.exact and difference.index is not None else None
    return Miss(cause, detail, shown_field(difference.field), difference.index, offset)


def shown_field(path: str) -> str:
    """A field's path without any name that a client may have made up."""
    known = _PATH.match(path)
    shown = known[0] if known is not None else ""
    return shown if shown == path else f"{shown}.?"


_PATH: Final = re.compile(
    r"(?:(?:tools|messages)\[\d+\]|prompt|model|cache_salt|chat_template|chat_template_kwargs|documents|reasoning_effort)"
    r"(?![^.])"
    r"(?:\.(?:role|content|name|type|text|id|tool_calls|tool_call_id|function|arguments|description|parameters"
    r"|strict|refusal|reasoning|reasoning_content|audio)(?:\[\d+\])?(?![^.]))*"
)
_CAUSES: Final = {
    DivergenceKind.MODEL_CHANGED: MissCause.MODEL_CHANGED,
    DivergenceKind.SALT: MissCause.SALT,
    DivergenceKind.TEMPLATE_CHANGED: MissCause.TEMPLATE_CHANGED,
    DivergenceKind.TOOLS_CHANGED: MissCause.TOOLS_CHANGED,
    DivergenceKind.TOOLS_REORDERED: MissCause.REORDERED,
    DivergenceKind.TOOLS_RESERIALIZED: MissCause.TOOLS_CHANGED,
    DivergenceKind.SYSTEM_CHANGED: MissCause.SYSTEM_CHANGED,
    DivergenceKind.VOLATILE_IN_HEAD: MissCause.SYSTEM_CHANGED,
    DivergenceKind.HISTORY_EDITED: MissCause.HISTORY_EDITED,
    DivergenceKind.HISTORY_REORDERED: MissCause.REORDERED,
    DivergenceKind.HISTORY_RESERIALIZED: MissCause.HISTORY_EDITED,
    DivergenceKind.HISTORY_TRUNCATED: MissCause.COMPACTION,
    DivergenceKind.HISTORY_COMPACTED: MissCause.COMPACTION,
}
