"""Level `learned`: blocks of the head in the order of their change rates, one order per conversation.

    texts of the head -> blocks (`blocks`) -> change rates of this process (`rates`)
    -> orders of the template, claimed in the store one after the other: version 1, 2, ...
    -> the version of this conversation -> blocks arranged (`arrange`)

A *template* is what all conversations of one agent share: the names of its tools, and how its head
begins. The first words alone would not do, for main agents and their helpers often share them and have
other tools. The model is no part of it, for an agent may run on several; nor is anything behind the first
words, where users' memories and lists of files stand. Where two agents still share a template, `rates`
compares each conversation with the one most like it.

A tool that comes in the middle of a conversation changes nothing: the conversation's claim names its
template. One that comes with the second request makes it begin anew, as a template's order can no longer
be found; the engine reads that whole prompt anew in any case.

Statistics only propose. What is sent follows from claims alone, so that any process sends the same:

- version v + 1 of a template's order is claimed when a conversation begins and this process's counts
  call for another order than version v; the first claim counts, for all processes;
- a conversation's first request (without an assistant message) takes the newest version and leaves
  word of it under the messages that it begins with;
- its second request looks there and claims that version under the messages up to its first answer, which
  name the conversation from then on. Where several versions were used with one beginning, the newest is
  taken; where none was (the conversation began at another level, or elsewhere), nothing is moved;
- later requests find that claim, and a process that has seen it asks nothing.

A conversation whose client supplies assistant messages from the start (worked examples) has no first
request in this sense: all that share those messages count as one, and keep the version of the first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Final

from ctxgate.compression.ask import Ask
from ctxgate.compression.chain import HASH_BYTES, extended, root
from ctxgate.compression.growth import head_size, staying
from ctxgate.compression.learned_texts import Texts, applied, texts_of
from ctxgate.compression.rates import Rates, packed, unpacked
from ctxgate.compression.recent import Recent

if TYPE_CHECKING:
    from ctxgate.compression.ask import Asking
    from ctxgate.compression.dialects.chat import Views
    from ctxgate.compression.learned_texts import Declared
    from ctxgate.compression.moved import Moved
    from ctxgate.compression.rates import Head, Order

MAX_VERSIONS: Final = 12  # of one template's order; each takes twice the conversations of the one before
_CONVERSATIONS: Final = 100_000
_ORDERS: Final = 10_000
_USED: Final = b"used"


@dataclass(frozen=True, slots=True)
class Names:
    """How one request is known.

    `start` names the messages behind the head up to the first answer. `conversation` includes that
    answer; None where there is none yet.
    """

    template: bytes
    start: bytes
    conversation: bytes | None


class LearnedMemory:
    """What one process has counted, and what it remembers of the store to save questions."""

    def __init__(self, conversations: int = _CONVERSATIONS) -> None:
        self._conversations = conversations
        self.rates = Rates()
        self.texts = Texts()
        self.forget()

    def forget(self) -> None:
        """Know nothing of the store any more; what was counted stays."""
        self.orders: Recent[tuple[bytes, int], Order] = Recent(_ORDERS)
        self.newest: Recent[bytes, int] = Recent(_ORDERS)
        self.chosen: Recent[bytes, tuple[bytes, int]] = Recent(self._conversations)


def learn(
    prompt: Declared, tenant: str, views: Views, memory: LearnedMemory, *, tail: bool = True
) -> Asking[Moved]:
    """The prompt with the blocks of its head in their learned order.

    `tail`: whether there is a place for a note. Yields what it wants to know of the store.
    """
    size = head_size(prompt.moved.facts)
    if size in (0, len(prompt.messages)):
        return prompt.moved
    texts = [*texts_of(prompt, size, memory.texts)]
    if not texts:
        return prompt.moved
    names = _names(prompt, size, tenant, memory.texts.splitter.beginning(texts[0].blocks))
    head = {slot: content for text in texts for slot, content in text.contents.items()}
    order = yield from _order(names, head, memory)
    if not order:
        return prompt.moved
    moved = applied(prompt, texts, order, views, tenant, tail=tail)
    if tail and staying(prompt.moved.facts, _costs(moved, size)):
        return applied(prompt, texts, order, views, tenant, tail=False)
    return moved


def _costs(moved: Moved, head: int) -> Counter[int]:
    """What moving text of the head costs, by message."""
    found: Counter[int] = Counter()
    for passage in moved.passages:
        if passage.message < head:
            found[passage.message] += passage.cost
    return found


def _names(prompt: Declared, head: int, tenant: str, beginning: str) -> Names:
    """The names of a request: those of its template, its beginning and its conversation."""
    start = _key(b"agent", root(tenant), _bytes(beginning))
    template = _key(b"template", start, *sorted(_bytes(tool.name or "") for tool in prompt.tools))
    for facts in islice(prompt.moved.facts, head, None):
        latest = extended(start, facts.lasting)
        if facts.role == "assistant":
            return Names(template, start, latest)
        start = latest
    return Names(template, start, None)


def _order(names: Names, head: Head, memory: LearnedMemory) -> Asking[Order]:
    """The order that this request's conversation has, counting the request on the way."""
    if names.conversation is None:
        memory.rates.begin(names.template, names.start, head)
        return (yield from _newest(names, memory))
    chosen = memory.chosen.get(names.conversation)
    if chosen is None:
        chosen = yield from _chosen(names, names.conversation)
        memory.chosen.put(names.conversation, chosen)
    memory.rates.go_on(chosen[0], names.start, names.conversation, head)
    return (yield from _version(*chosen, memory))


def _newest(names: Names, memory: LearnedMemory) -> Asking[Order]:
    """The newest order of a template, or a newer one where this process's counts call for it."""
    version = memory.newest.get(names.template) or 0
    order = yield from _version(names.template, version, memory)
    while True:
        claims: dict[bytes, bytes] = {}
        wanted = memory.rates.wanted(names.template, version, order) if version < MAX_VERSIONS else None
        if wanted is not None:
            claims[_version_key(names.template, version + 1)] = packed(wanted)
        if version:
            claims[_start_key(names, version)] = _USED
        later = {number: _version_key(names.template, number) for number in _versions(version + 1)}
        answer = yield Ask(claims, [key for key in later.values() if key not in claims])
        found = {number: answer[key] for number, key in later.items() if key in answer}
        if not found:
            return order
        for number, text in found.items():
            memory.orders.put((names.template, number), unpacked(text))
        version = max(found)
        order = unpacked(found[version])
        memory.newest.put(names.template, version)


def _chosen(names: Names, conversation: bytes) -> Asking[tuple[bytes, int]]:
    """The template and version that a conversation has, claimed by its second request."""
    here = _key(b"chosen", conversation)
    starts = {number: _start_key(names, number) for number in _versions(1)}
    answer = yield Ask({}, (here, *starts.values()))
    text = answer.get(here)
    if text is None:
        version = max((number for number, key in starts.items() if key in answer), default=0)
        text = (yield Ask({here: names.template + bytes((version,))}))[here]
    return text[:-1], text[-1]


def _version(template: bytes, version: int, memory: LearnedMemory) -> Asking[Order]:
    """An adopted order."""
    if version == 0:
        return {}
    order = memory.orders.get((template, version))
    if order is None:
        key = _version_key(template, version)
        answer = yield Ask({}, (key,))
        order = unpacked(answer.get(key, b""))  # a store that was replaced knows of no order
        memory.orders.put((template, version), order)
    return order


def _versions(first: int) -> range:
    return range(first, MAX_VERSIONS + 1)


def _version_key(template: bytes, version: int) -> bytes:
    return _key(b"version", template, bytes((version,)))


def _start_key(names: Names, version: int) -> bytes:
    return _key(b"start", names.template, names.start, bytes((version,)))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _key(kind: bytes, *parts: bytes) -> bytes:
    digest = blake2b(digest_size=HASH_BYTES, person=b"ctxgate learned")
    for part in (kind, *parts):
        digest.update(b"%d:" % len(part) + part)
    return digest.digest()
