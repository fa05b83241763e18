"""Where one request stops being the prefix of the next, as a value: for headers, logs and a reader."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ctxgate.inference.estimate import TokenRatio, estimate_prompt_tokens

if TYPE_CHECKING:
    from ctxgate.compression.volatile import VolatileKind

EXCERPT: Final = 72  # characters of each side that a divergence keeps for a reader
_BEFORE_DIFFERENCE: Final = 24


class DivergenceKind(StrEnum):
    """What two bodies can show of why a prefix ends. Closed: the label of a metric."""

    EXTENDS = "extends"  # none: the second body begins with the whole first one
    MODEL_CHANGED = "model_changed"
    SALT = "salt"
    TEMPLATE_CHANGED = "template_changed"  # a field that the chat template reads, such as its arguments
    TOOLS_CHANGED = "tools_changed"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_RESERIALIZED = "tools_reserialized"
    SYSTEM_CHANGED = "system_changed"
    VOLATILE_IN_HEAD = "volatile_in_head"  # a clock, an id, a counter in a system message or a tool
    HISTORY_EDITED = "history_edited"
    HISTORY_REORDERED = "history_reordered"
    HISTORY_RESERIALIZED = "history_reserialized"  # the same message in other bytes
    HISTORY_TRUNCATED = "history_truncated"  # messages dropped, the ones behind them kept
    HISTORY_COMPACTED = "history_compacted"  # messages replaced by fewer or much shorter ones, likewise


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of two requests in the order in which their prompt is rendered.

    `index` is the element's position in the second body's `tools` or `messages` (where that array has
    ended: one behind its last), None for fields of the request and for `extends`. `offset` is the first
    differing byte of that element's JSON text, the same on both sides. `rendered` says whether the
    difference reaches the prompt as vLLM renders it; white space of tool-call arguments does not.
    Bytes are those of the second body's tools and messages: `kept_bytes` before the difference,
    `avoidable_bytes` behind it that the first body held as well. `shared_messages` is how many leading
    messages of the second body it takes to hold the last one that both have.

    The two excerpts are text of the prompts: for the reader who owns them, never for logs.
    """

    kind: DivergenceKind
    field: str = ""
    index: int | None = None
    offset: int = 0
    volatile: VolatileKind | None = None
    rendered: bool = True
    kept_bytes: int = 0
    avoidable_bytes: int = 0
    shared_messages: int = 0
    before_excerpt: str = dataclasses.field(default="", repr=False)
    after_excerpt: str = dataclasses.field(default="", repr=False)

    def avoidable_tokens(self, ratio: TokenRatio | None = None) -> int:
        """Tokens of `avoidable_bytes`, estimated: by a learned ratio, else at four bytes each."""
        return estimate_prompt_tokens(self.avoidable_bytes, ratio or TokenRatio()).value or 0

    def describe(self) -> str:
        """One line without any text of the prompts: for logs."""
        if self.kind is DivergenceKind.EXTENDS:
            return "extends"
        kind = self.kind.value if self.volatile is None else f"{self.kind.value} ({self.volatile.value})"
        effect = f"~{self.avoidable_tokens()} tokens avoidable" if self.rendered else "not in the prompt"
        return f"{kind} at {self.field}, byte {self.offset}: {effect}"

    def prose(self) -> str:
        """What happened, in a sentence or two, with the differing text: for the owner of the prompts."""
        sentence = _SENTENCES[self.kind].format(field=self.field, volatile=_what(self.volatile))
        if not self.before_excerpt and not self.after_excerpt:
            return sentence
        return f"{sentence}\n  before: {_shown(self.before_excerpt)}\n  after:  {_shown(self.after_excerpt)}"


def excerpt(text: str, at: int) -> str:
    """The text around a place, at most `EXCERPT` characters, an ellipsis where it was cut."""
    start = max(at - _BEFORE_DIFFERENCE, 0)
    end = start + EXCERPT
    return ("\u2026" if start else "") + text[start:end] + ("\u2026" if end < len(text) else "")


def _shown(text: str) -> str:
    return printable(text) or "(nothing)"


def printable(text: str) -> str:
    """The text on one line, with nothing that a terminal would act on."""
    marks = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return "".join(marks.get(c) or (c if c.isprintable() else f"\\u{ord(c):04x}") for c in text)


def _what(kind: VolatileKind | None) -> str:
    return _VOLATILE.get(kind.value if kind else "", "text that changes by itself")


_VOLATILE: Final = {
    "clock": "the time of day",
    "date": "today's date",
    "epoch": "a time in seconds",
    "uuid": "a UUID",
    "hash": "a hash or token",
    "counter": "a counter",
    "path": "a temporary path",
    "pid": "a process id",
    "git": "the state of the git repository",
    "usage": "a note on tokens or cost",
    "header": "a line about this one request",
}

_SENTENCES: Final = {
    DivergenceKind.EXTENDS: "The second request begins with the whole first one.",
    DivergenceKind.MODEL_CHANGED: "The two ask for different models, and each model has its own cache.",
    DivergenceKind.SALT: "`{field}` differs; no prefix is shared between two salts.",
    DivergenceKind.TEMPLATE_CHANGED: "`{field}` differs, and chat templates read it: the prompt may change.",
    DivergenceKind.TOOLS_CHANGED: "The tools are not the same: `{field}` was added, removed or edited.",
    DivergenceKind.TOOLS_REORDERED: "The same tools stand in another order, from `{field}` on.",
    DivergenceKind.TOOLS_RESERIALIZED: "`{field}` is the same JSON value, written differently.",
    DivergenceKind.SYSTEM_CHANGED: "The system prompt was edited: `{field}` differs.",
    DivergenceKind.VOLATILE_IN_HEAD: "`{field}` holds {volatile}, which changed.",
    DivergenceKind.HISTORY_EDITED: "A message that was sent before was edited: `{field}` differs.",
    DivergenceKind.HISTORY_REORDERED: "Messages of before stand in another order, from `{field}` on.",
    DivergenceKind.HISTORY_RESERIALIZED: "`{field}` says the same as before, written differently.",
    DivergenceKind.HISTORY_TRUNCATED: "Messages that were sent before are gone from `{field}` on.",
    DivergenceKind.HISTORY_COMPACTED: "Less stands in the place of earlier messages, from `{field}` on.",
}
