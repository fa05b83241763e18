"""Undoes what an edited prompt claims to have moved, from its bytes, so that the rest can be compared.

    before   S: "Time: 10:00"               U: "go"
    after    S: "Time: [see latest note]"   U: "go" + note "Time: 10:00"
    reverted S: "Time: 10:00"               U: "go"

Works on the bytes of both bodies and on the words that are said to have moved, which are checked here,
not believed: each must fit a placeholder, and stand word for word in a note. Where blocks of the head may
have changed places, the lines of a text count, each as often as before, and not their order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ctxgate.compression.dialects.chat import Facts, facts_of
from ctxgate.compression.diff_parts import HEAD_ROLES
from ctxgate.compression.marks import Stability, read_marks
from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.recent import Recent
from ctxgate.compression.texts import GATEWAY_MARK, MessageTexts
from ctxgate.compression.validity import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import msgspec

    from ctxgate.compression.layout import Prompt
    from ctxgate.compression.moved import Passage


@dataclass(frozen=True, slots=True)
class Side:
    """A prompt, and its messages as they stand in the body."""

    prompt: Prompt
    messages: Sequence[msgspec.Raw | bytes]


@dataclass(frozen=True, slots=True)
class _Pair:
    """One message before and after, without marks, notes and placeholders; and the note it had.

    `marked`: the client lets text of it move.
    """

    before: Facts
    after: Facts
    note: str | None = field(repr=False)
    marked: bool
    size: int


class Reverting:
    """Undoes moves. Remembers pairs of messages, up to `limit` bytes, to save work."""

    def __init__(self, limit: int = 64 * 2**20) -> None:
        self._known: Recent[tuple[object, ...], _Pair] = Recent(limit, lambda pair: pair.size)

    def revert(
        self, before: Side, after: Side, moved: Sequence[Passage], *, reordered: bool = False
    ) -> tuple[Prompt, Prompt]:
        """Both prompts, to be compared by `check_same`. Raises `Invalid`.

        `reordered`: whether lines of the head may stand in another order.
        """
        ours, theirs = list(before.prompt.facts), list(after.prompt.facts)
        if len(ours) != len(theirs):
            raise Invalid("count")
        head = next((at for at, facts in enumerate(ours) if facts.role not in HEAD_ROLES), len(ours))
        words: dict[int, list[str]] = {}
        for passage in moved:
            words.setdefault(passage.message, []).extend(passage.words)
        notes: dict[int, str] = {}
        for at in [at for at, (one, two) in enumerate(zip(ours, theirs, strict=True)) if _differ(one, two)]:
            taken = words.pop(at, [])
            facts = (ours[at], theirs[at])
            pair = self._pair(before.messages[at], after.messages[at], facts, taken, reordered and at < head)
            if taken and at >= head and not pair.marked:
                raise Invalid("moved")
            ours[at], theirs[at] = pair.before, pair.after
            if pair.note is not None:
                notes[at] = pair.note
        if words or not all(_is_said(passage, notes) for passage in moved):
            raise Invalid("words")
        return replace(before.prompt, facts=tuple(ours)), replace(after.prompt, facts=tuple(theirs))

    def _pair(
        self,
        before: msgspec.Raw | bytes,
        after: msgspec.Raw | bytes,
        facts: tuple[Facts, Facts],
        words: list[str],
        reordered: bool,
    ) -> _Pair:
        key = (facts[0].digest, facts[1].digest, tuple(words), reordered)
        known = self._known.get(key)
        if known is None:
            known = _reverted(before, after, words, reordered=reordered)
            if known.note is not None and known.before.role not in ("user", "tool"):
                raise Invalid("note")
            self._known.put(key, known)
        return known


def _differ(one: Facts, two: Facts) -> bool:
    return one.nameless != two.nameless


def _reverted(
    before: msgspec.Raw | bytes, after: msgspec.Raw | bytes, words: list[str], *, reordered: bool
) -> _Pair:
    old, new = MessageTexts.read(before), MessageTexts.read(after)
    if old is None or new is None:
        raise Invalid("messages")
    told = facts_of(before)
    marked = told.marked and Stability.VOLATILE in read_marks(old, told.role, "").parts
    old.unmark(GATEWAY_MARK)
    if new.unmark(GATEWAY_MARK):
        raise Invalid("marks")
    note = _take_note(new, 0 if old.is_empty() else len(old))
    if old.is_empty() and note is not None:
        old.members.pop("content", None)  # null and missing are the same content
    if len(old) != len(new):
        raise Invalid("messages")
    rest = iter(words)
    for at, text in [*new.texts()]:
        first, *pieces = text.split(PLACEHOLDER)
        if pieces and PLACEHOLDER not in (old.text(at) or ""):
            new.put(at, first + "".join(next(rest, "") + piece for piece in pieces))
    if next(rest, None) is not None:
        raise Invalid("words")
    if reordered:
        _restore_order(old, new)
    size = 600 + len(note or "") + sum(map(len, words))
    return _Pair(facts_of(old.raw()), facts_of(new.raw()), note, marked, size)


def _take_note(message: MessageTexts, size: int) -> str | None:
    """Take the note off a message that had so many parts, if there is one."""
    if message.is_list():
        text = message.text(size) if len(message) == size + 1 else None
        if text is None or not text.startswith(HEADING + "\n"):
            return None
        message.drop_last()
        return text
    text = message.text(0) if len(message) else None
    if text is not None and size == 0 and text.startswith(HEADING + "\n"):
        message.members.pop("content")
        return text
    at = -1 if text is None else text.rfind(f"\n\n{HEADING}\n")
    if text is None or at < 0:
        return None
    message.put(0, text[:at])
    return text[at + 2 :]


def _restore_order(old: MessageTexts, new: MessageTexts) -> None:
    """Give texts of the same lines the order they had. White space behind lines may change places too."""
    for at, text in [*new.texts()]:
        told = old.text(at)
        if told is not None and told != text and _lines(told) == _lines(text):
            new.put(at, told)


def _lines(text: str) -> tuple[int, Counter[str]]:
    return len(text), Counter(line.rstrip() for line in text.split("\n") if line.strip())


def _is_said(passage: Passage, notes: Mapping[int, str]) -> bool:
    """Whether a note holds a passage: likely that of its own message, or one of the last.

    One that waits is said by a later request; an earlier note says of it what was true then.
    """
    if passage.waits:
        return bool(notes)
    own = notes.get(passage.message)
    if own is not None and _says(own, passage.words):
        return True
    return any(_says(note, passage.words) for note in reversed([*notes.values()]))


def _says(note: str, words: Iterable[str]) -> bool:
    """Whether a note holds these words, one after the other."""
    position = 0
    for each in words:
        found = note.find(each, position)
        if found < 0:
            return False
        position = found + len(each)
    return True
