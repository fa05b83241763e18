"""Lays a chat request out so that the prefix cache of its engine keeps hitting.

    facts of the messages and tools          `look`
    -> what leaves its place                 `taking` (levels declared, learned)
    -> blocks of the head in their order     `learned` (level learned)
    -> forms first seen                      `first_forms`
    -> notes at the end of user turns        `notes` (levels declared, learned)
    -> edits on the client's bytes, each with its reason

From the second step on a conversation is known by its messages without volatile text: a clock that
moves on changes neither which tools' order nor which notes are found.

What was sent before is knowledge of a store; this module asks for it and does no I/O itself: `lay_out`
is a generator that yields an `Ask` and is sent the answer. The same request and the same answers give
the same bytes in any process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import xxhash

from ctxgate.compression.ask import together
from ctxgate.compression.chain import NOTHING, Chains
from ctxgate.compression.dialects.chat import Views
from ctxgate.compression.first_forms import FormsMemory, Parts, Wanted, first_forms
from ctxgate.compression.growth import head_size
from ctxgate.compression.learned import LearnedMemory, learn
from ctxgate.compression.learned_texts import Declared
from ctxgate.compression.moved import PLACEHOLDER, Moved
from ctxgate.compression.notes import Said, notes, place_of
from ctxgate.compression.plan import PlanEdit
from ctxgate.compression.policy import SAFE, Level, Policy
from ctxgate.compression.recent import Recent
from ctxgate.compression.taking import TakingMemory, check_marks, take
from ctxgate.compression.texts import end_of_content, escaped
from ctxgate.inference import wire
from ctxgate.inference.wire import Edit

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import msgspec

    from ctxgate.compression.ask import Asking
    from ctxgate.compression.dialects.chat import Facts, ToolFacts
    from ctxgate.compression.moved import Passage
    from ctxgate.compression.notes import Note, Slot
    from ctxgate.compression.texts import End
    from ctxgate.inference.wire import Body

REMEMBERED_CONVERSATIONS: Final = 100_000
_NOTE_BYTES: Final = 500  # of one conversation, roughly

_ABOUT: Final = {  # by (made by this request, kept for later ones)
    (False, True): "the note that was first sent with this message",
    (True, True): "a note of what the moved text says now",
    (True, False): "a note of what the moved text says now, which later requests do not repeat here",
}

_WAITS: Final = "its words of now wait for the next turn, since this one ends with nothing that takes a note"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as layout sees it. `tools` is None where their order and text are the client's business."""

    facts: tuple[Facts, ...]
    tools: tuple[ToolFacts, ...] | None


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """Edits on the request's bytes, and a `PlanEdit` for each field they change."""

    edits: tuple[Edit, ...] = ()
    reasons: tuple[PlanEdit, ...] = ()
    moved: tuple[Passage, ...] = ()
    dropped: str | None = None  # why an edit is not made although some form differs
    added: int = 0  # bytes of the placeholders and notes
    facts: tuple[Facts, ...] = ()  # of the messages without volatile text


UNCHANGED: Final = LayoutResult()


class Memory:
    """What one process remembers to save work; its contents never change a result.

    `seed` should be a secret of the process: see `Views`.
    """

    def __init__(self, conversations: int = REMEMBERED_CONVERSATIONS, seed: int = 0) -> None:
        self._conversations = conversations
        self.seed = seed
        self.views = Views(seed=seed)
        self.chains = Chains(seed)
        self.taking = TakingMemory(self.views, seed)
        self.learned = LearnedMemory(conversations)
        self.ends: Recent[bytes, tuple[End | None]] = Recent(conversations)
        self.forget()

    def forget(self) -> None:
        """Know nothing of the store any more, as after a restart: what is in use is asked for again.

        A store drops what nobody asks for (`gateway.housekeeping`), and this memory answers in its place.
        """
        self.forms = FormsMemory(self._conversations)
        self.notes: Recent[bytes, Said] = Recent(self._conversations * _NOTE_BYTES, Said.size)
        self.learned.forget()


def look(body: Body, messages: Sequence[msgspec.Raw], tenant: str, memory: Memory) -> Prompt:
    """The facts of a request's messages and tools; only what was never seen is decoded."""
    return Prompt(memory.views.messages(tenant, messages), look_at_tools(body, tenant, memory))


def lay_out(
    body: Body,
    messages: Sequence[msgspec.Raw],
    prompt: Prompt,
    tenant: str,
    memory: Memory,
    policy: Policy = SAFE,
) -> Asking[LayoutResult]:
    """The edits of one request. Yields what it wants to know, and must be sent the answers.

    Raises `MarkError` where the client's marks are not understood.
    """
    moved, place = Moved(prompt.facts), None
    if not policy.moves():
        check_marks(messages, prompt.facts, memory.taking)
    else:
        place = place_of(prompt.facts, lambda at: _end(messages[at], memory) is not None)
        moved = take(messages, prompt.facts, tenant, policy, memory.taking, movable=place is not None)
    if policy.level is Level.LEARNED and not _head_stays(moved):
        marks = check_marks(messages, prompt.facts, memory.taking)
        declared = Declared(messages, moved, marks, prompt.tools or ())
        moved = yield from learn(declared, tenant, memory.views, memory.learned, tail=place is not None)
    tools = body.items("tools") if prompt.tools else ()
    named = tools or moved.passages or any(facts.calls for facts in moved.facts)
    chain = memory.chains.of(tenant, moved.facts) if named else NOTHING
    texts = [moved.texts.get(at, raw) for at, raw in enumerate(messages)] if moved.texts else messages
    parts = Parts(texts, moved.facts, tools, prompt.tools or (), chain)
    forms = first_forms(parts, policy.rules, memory.forms)
    if place is None or not moved.passages:
        wanted = yield from forms
        return _result(body, texts, moved, wanted, (), memory)

    def wrapping(at: int) -> int:
        end = _end(texts[at], memory)
        return 0 if end is None else len(end.before) + len(end.after)

    asked = notes(prompt.facts, moved, place, chain.hashes, memory.notes, wrapping)
    wanted, placed = yield from together(forms, asked)
    return _result(body, texts, _waiting(moved, placed.waiting), wanted, placed.notes, memory)


def _head_stays(moved: Moved) -> bool:
    """Whether volatile text of the head stays there. Then no learned order takes of it either."""
    return any(at < head_size(moved.facts) for at in moved.staying)


def _waiting(moved: Moved, waiting: Collection[Slot]) -> Moved:
    """The same, with the passages that this request cannot say as they are now."""
    if not waiting:
        return moved
    counts: Counter[int] = Counter()
    passages: list[Passage] = []
    for passage in moved.passages:
        slot = (passage.message, counts[passage.message])
        counts[passage.message] += 1
        passages.append(passage.waiting() if slot in waiting else passage)
    fields = {f"messages[{message}]" for message, _ in waiting}
    reasons = [
        PlanEdit(each.field, f"{each.reason}; {_WAITS}") if each.field in fields else each
        for each in moved.reasons
    ]
    return replace(moved, passages=tuple(passages), reasons=tuple(reasons))


def look_at_tools(body: Body, tenant: str, memory: Memory) -> tuple[ToolFacts, ...] | None:
    """The facts of a request's tools; None where their order and text are the client's business."""
    if body.kind("tools") != "[":
        return None
    found = [memory.views.tool(tenant, raw) for raw in body.items("tools")]
    tools = tuple(tool for tool in found if tool is not None)
    names = {tool.name for tool in tools if tool.name is not None}
    if not tools or len(tools) != len(found) or len(names) != len(tools):
        return None  # no tools, or such as cannot be told apart
    return tools


def _end(message: msgspec.Raw | bytes, memory: Memory) -> End | None:
    """See `end_of_content`; a message that is known is not decoded again."""
    key = xxhash.xxh3_128_digest(memoryview(message), memory.seed)
    end = memory.ends.get(key)
    if end is None:
        end = (end_of_content(bytes(message)),)
        memory.ends.put(key, end)
    return end[0]


def _result(
    body: Body,
    messages: Sequence[msgspec.Raw | bytes],
    moved: Moved,
    wanted: Wanted,
    found: Sequence[Note],
    memory: Memory,
) -> LayoutResult:
    """The edits that bring the body to its new form. `messages` are those after taking."""
    edits: list[Edit] = []
    size = 0
    reasons: dict[str, list[str]] = {}
    if wanted.tools:
        spans = wire.array_spans(body, "tools")
        if spans is None:
            return LayoutResult(dropped="hidden")
        edits += (Edit(*spans[at], text) for at, text in wanted.tools.items())
        reasons["tools"] = ["the tools in the order and text they were first sent in"]
    texts = {**moved.texts, **wanted.messages}
    if texts or found:
        spans = wire.array_spans(body, "messages")
        if spans is None:
            return LayoutResult(dropped="hidden")
        added = {
            note.message: _addition(texts.get(note.message, messages[note.message]), note, memory)
            for note in found
        }
        edits += (
            Edit(*spans[at], text if at not in added else added[at].joined(text))
            for at, text in texts.items()
        )
        edits += (
            Edit(spans[at][0] + each.start, spans[at][0] + each.stop, each.text)
            for at, each in added.items()
            if at not in texts
        )
        size = sum(len(each.text) for each in added.values())
    for reason in moved.reasons:
        reasons.setdefault(reason.field, []).append(reason.reason)
    for at in wanted.messages:
        reasons.setdefault(f"messages[{at}]", []).append("the text in which this message was first sent")
    for note in found:
        reasons.setdefault(f"messages[{note.message}]", []).append(_ABOUT[note.new, note.frozen])
    told = tuple(PlanEdit(field, "; ".join(reason)) for field, reason in reasons.items())
    size += sum(len(PLACEHOLDER) * len(passage.words) for passage in moved.passages)
    dropped = "longer" if moved.staying else None
    return LayoutResult(tuple(edits), told, moved.passages, dropped, size, moved.facts)


@dataclass(frozen=True, slots=True)
class _Addition:
    start: int
    stop: int
    text: bytes

    def joined(self, message: bytes) -> bytes:
        return message[: self.start] + self.text + message[self.stop :]


def _addition(message: msgspec.Raw | bytes, note: Note, memory: Memory) -> _Addition:
    """A note as bytes to insert into a message."""
    end = _end(message, memory)
    if end is None:
        raise ValueError("a note was kept for a message that takes none")
    return _Addition(end.start, end.stop, end.before + escaped(note.text) + end.after)
