"""The texts of a prompt's head as blocks, and the messages that hold them in a new order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import xxhash

from ctxgate.compression.arrange import arranged
from ctxgate.compression.blocks import Splitter, joined
from ctxgate.compression.moved import PLACEHOLDER, Moved, Passage
from ctxgate.compression.plan import PlanEdit
from ctxgate.compression.rates import Content
from ctxgate.compression.recent import Recent
from ctxgate.compression.texts import MARKS, MessageTexts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import msgspec

    from ctxgate.compression.arrange import Arranged
    from ctxgate.compression.blocks import Block
    from ctxgate.compression.dialects.chat import ToolFacts, Views
    from ctxgate.compression.marks import Marks
    from ctxgate.compression.rates import Head, Order

_REMEMBERED: Final = 8 * 2**20  # characters of split texts


@dataclass(frozen=True, slots=True)
class HeadText:
    """A text of the head whose blocks may move: message, part, blocks, and what their slots hold."""

    message: int
    part: int
    blocks: tuple[Block, ...]
    contents: Head = field(repr=False)


@dataclass(frozen=True, slots=True)
class Declared:
    """A request after the level `declared`: the messages as they came, what it moved, and the marks."""

    messages: Sequence[msgspec.Raw] = field(repr=False)
    moved: Moved
    marks: Mapping[int, Marks]
    tools: Sequence[ToolFacts]

    def raw(self, at: int) -> msgspec.Raw | bytes:
        """A message without what was declared volatile."""
        return self.moved.texts.get(at, self.messages[at])


class Texts:
    """Splits texts of heads, and remembers those that it has split."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self.splitter = Splitter()
        self._known: Recent[tuple[str, int, int], HeadText] = Recent(
            limit, lambda text: sum(len(block.text) + 200 for block in text.blocks)
        )

    def split(self, text: str, message: int, part: int) -> HeadText:
        """The blocks of a text at a place of its head."""
        found = self._known.get((text, message, part))
        if found is None:
            blocks = self.splitter.split(text, f"{message}/{part}")
            found = HeadText(message, part, blocks, _contents(blocks))
            self._known.put((text, message, part), found)
        return found


def texts_of(prompt: Declared, head: int, known: Texts) -> Iterator[HeadText]:
    """The texts of the head, but those that a mark keeps where they are."""
    cached = max((at for at in range(head) if at in prompt.marks and prompt.marks[at].cached), default=-1)
    for at in range(cached if cached >= 0 else 0, head):
        message = MessageTexts.read(prompt.raw(at))
        marks = prompt.marks.get(at)
        if message is None or not _is_accounted(message, at, prompt.moved):
            continue
        for part, text in message.texts():
            stays = marks is not None and (part < marks.cached or any(marks.parts[part : part + 1]))
            if text.strip() and not stays:
                yield known.split(text, at, part)


def _is_accounted(message: MessageTexts, at: int, moved: Moved) -> bool:
    """Whether each placeholder in a message is one that `declared` left there."""
    left = sum(len(passage.words) for passage in moved.passages if passage.message == at)
    return sum(text.count(PLACEHOLDER) for _, text in message.texts()) == left


def _contents(blocks: Sequence[Block]) -> Head:
    """What each slot holds; the pieces of one element count as one."""
    found: dict[bytes, Content] = {}
    for block in blocks:
        before = found.get(block.slot, Content(0, 0))
        digest = xxhash.xxh3_64_intdigest(block.text.encode("utf-8", "surrogatepass"), before.digest)
        found[block.slot] = Content(digest, before.size + len(block.text))
    return found


def applied(
    prompt: Declared, texts: Sequence[HeadText], order: Order, views: Views, tenant: str, *, tail: bool
) -> Moved:
    """What was moved before, and the texts of the head arranged in an order."""
    moved = prompt.moved
    facts, sent = list(moved.facts), dict(moved.texts)
    reasons = {reason.field: reason for reason in moved.reasons}
    passages: dict[int, list[Passage]] = {}
    for passage in moved.passages:
        passages.setdefault(passage.message, []).append(passage)
    for at in sorted({text.message for text in texts}):
        message = MessageTexts.read(prompt.raw(at))
        parts = {text.part: arranged(text.blocks, order, tail=tail) for text in texts if text.message == at}
        if message is None or not any(each.changed() for each in parts.values()):
            continue
        passages[at] = [*_passages(message, at, parts, passages.get(at, ()))]
        for part, each in parts.items():
            message.put(part, joined(each.blocks))
        sent[at] = message.raw()
        message.unmark(*MARKS)
        facts[at] = views.message(tenant, message.raw())
        name = f"messages[{at}]"
        reasons[name] = PlanEdit(name, _reason(reasons.get(name), parts.values()))
    flat = tuple(passage for at in sorted(passages) for passage in passages[at])
    return Moved(tuple(facts), sent, flat, tuple(reasons.values()))


def _passages(
    message: MessageTexts, at: int, parts: Mapping[int, Arranged], before: Sequence[Passage]
) -> Iterator[Passage]:
    """All passages of a message in the order of their placeholders in its new text."""
    waiting = list(before)

    def declared(count: int) -> Iterator[Passage]:
        while count > 0:
            passage = waiting.pop(0)
            count -= len(passage.words)
            yield passage

    for part, text in message.texts():
        if part not in parts:
            yield from declared(text.count(PLACEHOLDER))
            continue
        each = parts[part]
        held: dict[int, list[Passage]] = {}
        for _, new in sorted((old, new) for new, old in enumerate(each.origin)):
            taken = each.taken[new]
            if taken is None:
                held[new] = [*declared(each.blocks[new].text.count(PLACEHOLDER))]
            else:
                left = each.blocks[new].text
                line = left[: -len(PLACEHOLDER)] + taken
                held[new] = [Passage(at, (taken,), line, cost=len(left.encode()) + 1)]
        for new in range(len(each.blocks)):
            yield from held[new]


def _reason(before: PlanEdit | None, parts: Iterable[Arranged]) -> str:
    """What happened to a message: how many blocks moved within it, and how many went to the note."""
    parts = tuple(parts)
    taken = sum(words is not None for each in parts for words in each.taken)
    behind = sum(each.moved for each in parts)
    said = [] if before is None else [before.reason]
    if taken:
        said.append(f"blocks that change within conversations moved to the note: {taken}")
    if behind:
        said.append(f"blocks that change between conversations moved behind the others: {behind}")
    return "; ".join(said)
