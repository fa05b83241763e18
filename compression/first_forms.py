"""The form first seen is the form sent.

Clients reorder tools, keys and white space between two turns of one conversation, and every such turn
is a new prompt to the prefix cache. Here each part that has been sent before goes out again in the text
of its first sight, and the tools keep their order:

- tools of this conversation keep their order; new ones follow, dropped ones stay dropped;
- a group of tools that is new to the conversation (all of them, at its start) stands in the order in
  which this tenant first sent that set;
- a tool or an assistant's tool calls that are equal to ones this tenant has sent go out in their text;
- tool calls of this conversation keep their ids (`call_ids`).

Nothing is reworded, and nothing that has no earlier form is touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeAlias

from ctxgate.compression.ask import Ask
from ctxgate.compression.call_ids import (
    Known,
    looked_up,
    own_ids,
    question,
    remembered,
    renamings,
    sent_ids,
    with_ids,
)
from ctxgate.compression.canonical import DIGEST_BYTES
from ctxgate.compression.recent import Recent
from ctxgate.compression.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import msgspec

    from ctxgate.compression.ask import Answer, Asking, Text
    from ctxgate.compression.call_ids import Batches, Renaming
    from ctxgate.compression.chain import Chain
    from ctxgate.compression.dialects.chat import Facts, ToolFacts

REMEMBERED_BATCHES: Final = 1_000_000  # of all conversations together

Order: TypeAlias = "tuple[bytes, ...]"
"""Digests of tools, in the order in which they are sent."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The messages and tools of one request as they came, and what is known of each.

    `tools` is empty where their order and text are the client's business. `chain` is that of the facts.
    """

    messages: Sequence[Text] = field(repr=False)
    facts: Sequence[Facts]
    tools: Sequence[msgspec.Raw] = field(repr=False)
    tool_facts: Sequence[ToolFacts]
    chain: Chain = field(repr=False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """By position: the JSON text to send, where it is another than the client's."""

    messages: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    tools: Mapping[int, bytes] = field(default_factory=dict, repr=False)


class FormsMemory:
    """What one process remembers to save work; its contents never change a result."""

    def __init__(self, conversations: int) -> None:
        self.orders: Recent[bytes, Order] = Recent(conversations)
        self.ids: Recent[bytes, Batches] = Recent(REMEMBERED_BATCHES, lambda ids: len(ids) + 1)


def first_forms(parts: Parts, rules: frozenset[Rule], memory: FormsMemory) -> Asking[Wanted]:
    """The first-seen texts of a request."""
    ids = yield from _ids(parts, rules, memory)
    tools = parts.tool_facts if Rule.TOOLS in rules else ()
    hashes = parts.chain.hashes if tools else ()
    order, unread = _remembered(hashes, memory.orders)
    forms = _Forms(parts, rules, ids.renamings)
    claims = forms.claims | {facts.digest: raw for facts, raw in zip(tools, parts.tools, strict=bool(tools))}
    reads = [*unread, *forms.reads]
    if claims or ids.claims or reads:
        forms.known |= yield Ask({**claims, **ids.claims}, reads)
    for key in unread:  # longest prefix first
        if key in forms.known:
            order = _unpacked(forms.known[key])
            break
    wanted_tools: list[bytes] = []
    if tools:
        digests = tuple(facts.digest for facts in tools)
        here = parts.chain.hashes[-1]
        placed = yield from _placed(order, digests, here, claimed=here in forms.known)
        memory.orders.put(here, placed.kept)
        wanted_tools = [forms.known[digest] for digest in placed.sent]
    renamings = yield from ids.confirmed(forms.known)
    if renamings != ids.renamings:  # another process has sent the newest calls before, under other ids
        forms = _Forms(parts, rules, renamings, forms.known)
        forms.known |= yield Ask({}, forms.reads)
    messages = yield from forms.texts()
    return Wanted(messages, _differing(parts.tools, wanted_tools))


class _Forms:
    """The first forms of a request's messages, those of renamed rounds under their first ids.

    `claims` are the keys of messages that keep their ids, `reads` those of the others: an own text of
    theirs, with ids of this turn alone, is nothing to keep.
    """

    def __init__(
        self,
        parts: Parts,
        rules: frozenset[Rule],
        renamings: Sequence[Renaming],
        known: Mapping[bytes, bytes] | None = None,
    ) -> None:
        self._messages = parts.messages
        self._renamings = renamings
        self.known = dict(known or {})
        facts = parts.facts
        if renamings:
            changed = list(facts)
            for each in renamings:
                changed[each.start] = each.facts(facts[each.start])
            facts = changed
        self._keys = _form_keys(facts, rules)
        self.claims: dict[bytes, Text] = {
            key: raw for key, raw in zip(self._keys, parts.messages, strict=True) if key is not None
        }
        self.reads: list[bytes] = []
        for each in renamings:
            key = self._keys[each.start]
            if key is not None:
                self.claims.pop(key, None)
                self.reads.append(key)

    def texts(self) -> Asking[dict[int, bytes]]:
        """By position: the text to send, where it is another than the client's."""
        wanted = [None if key is None else self.known.get(key) for key in self._keys]
        unknown: dict[bytes, Text] = {}
        for each in self._renamings:
            for at, text in self._renamed(each, wanted[each.start]).items():
                key = self._keys[at]
                if key is not None and wanted[at] is None:
                    unknown[key] = text
                wanted[at] = text
        if unknown:
            first = yield Ask(unknown)
            keys_and_texts = zip(self._keys, wanted, strict=True)
            wanted = [text if key is None else first.get(key, text) for key, text in keys_and_texts]
        return _differing(self._messages, wanted)

    def _renamed(self, each: Renaming, form: bytes | None) -> dict[int, bytes]:
        """The texts of a round under its first ids; none where one of them cannot be made."""
        found: dict[int, bytes] = {}
        for at in range(each.start, each.stop):
            text = form if form is not None and at == each.start else with_ids(self._messages[at], each.ids)
            if text is None:
                return {}
            found[at] = text
        return found


def _form_keys(facts: Sequence[Facts], rules: frozenset[Rule]) -> list[bytes | None]:
    """The key of each message's form; None where the message has only one.

    The digest unifies what both rules unify. With one of them off, its differences are part of the key.
    """
    unified = rules & {Rule.ARGUMENTS, Rule.EMPTY_CONTENT}
    if not unified:
        return [None] * len(facts)
    if len(unified) == 2:
        return [each.digest if each.varies else None for each in facts]
    if Rule.ARGUMENTS in unified:
        return [_spelled(each.digest, each.content) if each.varies else None for each in facts]
    return [_spelled(each.digest, each.arguments) if each.varies else None for each in facts]


def _spelled(digest: bytes, spelling: bytes) -> bytes:
    return blake2b(digest + spelling, digest_size=DIGEST_BYTES, person=b"ctxgate spelled").digest()


@dataclass(frozen=True, slots=True)
class _Ids:
    """Which rounds change their ids, and a claim that may be made along with another question.

    What is not known is most likely new, and goes out under its own ids, if the claim is answered so.
    """

    parts: Parts
    memory: FormsMemory
    known: Known
    own: Batches
    ids: Batches
    renamings: Sequence[Renaming]
    pending: Ask | None

    @property
    def claims(self) -> Mapping[bytes, Text]:
        return self.pending.claims if self.pending else {}

    def confirmed(self, answer: Answer) -> Asking[Sequence[Renaming]]:
        """The rounds that change their ids, after the answer."""
        if self.pending is None:
            return self.renamings
        chain = self.parts.chain
        ids = yield from sent_ids(chain, self.known, answer, self.memory.ids)
        return self.renamings if ids == self.ids else renamings(chain, self.parts.facts, self.own, ids)


def _ids(parts: Parts, rules: frozenset[Rule], memory: FormsMemory) -> Asking[_Ids]:
    chain = parts.chain
    if Rule.CALL_IDS not in rules or not chain.batches:
        return _Ids(parts, memory, Known((), ()), (), (), (), None)
    own = own_ids(chain, parts.facts)
    known = remembered(chain, memory.ids)
    if len(known.unread) > 1:
        known = yield from looked_up(chain, known, memory.ids)
    pending = question(chain, known, own) if known.unread else None
    ids = known.ids + own[len(known.ids) :]
    return _Ids(parts, memory, known, own, ids, renamings(chain, parts.facts, own, ids), pending)


def set_key(tools: Sequence[bytes]) -> bytes:
    """The key under which the first order of a set of tools is kept; the order given does not count."""
    return blake2b(b"".join(sorted(tools)), digest_size=DIGEST_BYTES, person=b"ctxgate set").digest()


def _remembered(hashes: Sequence[bytes], orders: Recent[bytes, Order]) -> tuple[Order, list[bytes]]:
    """The order of the longest prefix this process remembers, and the longer ones, longest first."""
    for position in range(len(hashes) - 1, -1, -1):
        order = orders.get(hashes[position])
        if order is not None:
            return order, list(reversed(hashes[position + 1 :]))
    return (), list(reversed(hashes))


@dataclass(frozen=True, slots=True)
class _Placed:
    sent: Order  # this request's tools
    kept: Order  # what is known at its prefix from now on, to any process


def _placed(order: Order, tools: Order, here: bytes, *, claimed: bool) -> Asking[_Placed]:
    """Where each of a request's tools stands. A change of order is claimed at the request's own prefix.

    A prefix has one order for ever: where another request has claimed it (`claimed`), that one counts.
    """
    sent, before = set(tools), set(order)
    group = tuple(tool for tool in tools if tool not in before)
    if len(group) > 1:
        key = set_key(group)
        group = _unpacked((yield Ask({key: b"".join(group)}))[key])
    placed = (*(tool for tool in order if tool in sent), *group)
    if placed == order or claimed:
        return _Placed(placed, order)
    first = _unpacked((yield Ask({here: b"".join(placed)}))[here])
    if first == placed:
        return _Placed(placed, placed)
    return (yield from _placed(first, tools, here, claimed=True))


def _unpacked(text: bytes) -> Order:
    return tuple(text[at : at + DIGEST_BYTES] for at in range(0, len(text), DIGEST_BYTES))


def _differing(items: Sequence[Text], wanted: Sequence[bytes | None]) -> dict[int, bytes]:
    """By position: the text to send, where it is another than the client's."""
    return {
        at: text
        for at, (raw, text) in enumerate(zip(items, wanted, strict=bool(wanted)))
        if text is not None and (memoryview(raw).nbytes != len(text) or bytes(raw) != text)
    }
