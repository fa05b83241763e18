"""The ids of tool calls, as they were first sent.

Some clients make up new ids in every turn for the calls of old ones, and where a template prints ids, every
such turn is a new prompt to the prefix cache. Here each *batch* (the calls of an assistant message, with
one id each) gets the ids back that it was first sent with in this conversation: in the message, and in the
results of its round.

What was sent is kept under the chain hash of the batch, in which ids do not count (`chain`), so one
conversation never gets another's ids unless both are the same so far but for ids. A record holds the ids of
the batches since the record before it, so that a turn adds one record for what is new in it.

Which result answers which call never changes. A batch is left alone where one of its ids occurs outside of
any round as well, and where an id that it should get is that of another call already.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from ctxgate.compression.ask import Ask
from ctxgate.compression.chain import HASH_BYTES
from ctxgate.compression.dialects.chat import named, rounds
from ctxgate.inference import wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxgate.compression.ask import Answer, Asking, Text
    from ctxgate.compression.chain import Chain
    from ctxgate.compression.dialects.chat import Facts, Round
    from ctxgate.compression.recent import Recent

Ids: TypeAlias = "tuple[str, ...]"
"""The ids of one batch; empty where they are not known."""
Batches: TypeAlias = "tuple[Ids, ...]"
"""The ids of the first batches of a conversation, in order."""

_RECORD: Final = msgspec.json.Decoder(tuple[int, list[tuple[str, ...]]])


@dataclass(frozen=True, slots=True)
class Known:
    """What is remembered of a conversation's ids, and what is not: the numbers of later batches."""

    ids: Batches
    unread: Sequence[int]


@dataclass(frozen=True, slots=True)
class Renaming:
    """A round whose ids change: messages `start` to `stop` - 1, and the new id for each old one."""

    start: int
    stop: int
    ids: Mapping[str, str] = field(repr=False)

    def facts(self, facts: Facts) -> Facts:
        """What is known of a message of this round after the change."""
        if facts.answers is not None:
            answer = self.ids[facts.answers]
            return replace(facts, digest=named(facts.shape, (answer,)), answers=answer)
        calls = tuple(self.ids[call] for call in facts.calls)
        return replace(facts, digest=named(facts.shape, calls), calls=calls)


def batch_key(hash_: bytes) -> bytes:
    """The key of the record that ends with the batch of this chain hash."""
    return blake2b(hash_, digest_size=HASH_BYTES, person=b"ctxgate batch").digest()


def own_ids(chain: Chain, facts: Sequence[Facts]) -> Batches:
    """The ids that a request came with."""
    return tuple([facts[at].calls for at in chain.batches])


def remembered(chain: Chain, memory: Recent[bytes, Batches]) -> Known:
    """The ids of the longest prefix that is remembered."""
    hashes, batches = chain.hashes, chain.batches
    for number in range(len(batches) - 1, -1, -1):
        ids = memory.get(hashes[batches[number]])
        if ids is not None:
            return Known(ids, range(number + 1, len(batches)))
    return Known((), range(len(batches)))


def looked_up(chain: Chain, known: Known, memory: Recent[bytes, Batches]) -> Asking[Known]:
    """What is known after a look for the records of the batches that are not remembered."""
    keys = [_key(chain, number) for number in known.unread]
    answer = yield Ask({}, keys)
    for number, key in reversed(list(zip(known.unread, keys, strict=True))):
        if key in answer:
            ids = yield from _resolved(chain, number, known, answer, memory)
            return Known(ids, range(number + 1, len(chain.batches)))
    return known


def question(chain: Chain, known: Known, own: Batches) -> Ask:
    """Claims the record of the last batch: the own ids of all that are not known."""
    text = msgspec.json.encode((len(known.ids), own[len(known.ids) :]))
    return Ask({_key(chain, len(own) - 1): text})


def sent_ids(chain: Chain, known: Known, answer: Answer, memory: Recent[bytes, Batches]) -> Asking[Batches]:
    """The ids each batch was first sent with. `answer` is that to `question`."""
    return (yield from _resolved(chain, len(chain.batches) - 1, known, answer, memory))


def _key(chain: Chain, number: int) -> bytes:
    return batch_key(chain.hashes[chain.batches[number]])


def _resolved(
    chain: Chain, number: int, known: Known, answer: Answer, memory: Recent[bytes, Batches]
) -> Asking[Batches]:
    """The ids up to a batch, by its record and those that it builds on.

    A record builds on the longest one there was when it was claimed. If not all of them are at hand, all
    are read; if one is missing, which no store that keeps its word lets happen, no ids are known.
    """
    found = _followed(chain, number, known, answer, memory)
    if found is None:
        every = yield Ask({}, [_key(chain, each) for each in range(number)])
        found = _followed(chain, number, Known((), ()), {**every, **answer}, memory)
    if found is None:
        return ((),) * (number + 1)
    memory.put(chain.hashes[chain.batches[number]], found)
    return found


def _followed(
    chain: Chain, number: int, known: Known, answer: Answer, memory: Recent[bytes, Batches]
) -> Batches | None:
    found: Batches = ()
    count = number + 1
    while count:
        below = known.ids if count == len(known.ids) else memory.get(chain.hashes[chain.batches[count - 1]])
        if below is not None:
            return below + found
        text = answer.get(_key(chain, count - 1))
        if text is None:
            return None
        start, ids = _RECORD.decode(text)
        if not 0 <= start < count or len(ids) != count - start:
            return None
        found = (*ids, *found)
        count = start
    return found


def renamings(chain: Chain, facts: Sequence[Facts], own: Batches, ids: Batches) -> list[Renaming]:
    """The rounds whose ids change so that they are those first sent."""
    if own == ids:
        return []
    homes = {each.start: each for each in rounds(facts)}
    seen, loose = _occurrences(facts, [homes[at] for at in chain.batches])
    found: list[Renaming] = []
    taken: dict[str, str] = {}
    for at, old, new in zip(chain.batches, own, ids, strict=True):
        if old == new or len(set(new)) != len(old) or "" in new or not loose.isdisjoint(old):
            continue
        change = dict(zip(old, new, strict=True))
        other = {after: before for before, after in change.items() if after not in change}
        if not seen.isdisjoint(other) or any(
            taken.get(after, before) != before for after, before in other.items()
        ):
            continue
        taken |= other
        found.append(Renaming(at, homes[at].stop, change))
    return found


def _occurrences(facts: Sequence[Facts], batches: Sequence[Round]) -> tuple[set[str], set[str]]:
    """All ids of a request, and those that occur outside of the batches' rounds."""
    inside = {at for each in batches for at in range(each.start, each.stop)}
    seen: set[str] = set()
    loose: set[str] = set()
    for at, each in enumerate(facts):
        ids = each.calls if each.answers is None else (each.answers,)
        seen.update(ids)
        if at not in inside:
            loose.update(ids)
    return seen, loose


def with_ids(message: Text, ids: Mapping[str, str]) -> bytes | None:
    """A message's own text with other ids in it. None where repeated members hide one."""
    try:
        body = wire.parse(bytes(message))
        answer = body.value("tool_call_id")
        if isinstance(answer, str):
            return b"".join(wire.with_member(body, "tool_call_id", msgspec.json.encode(ids[answer])))
        spans = wire.array_spans(body, "tool_calls")
        if spans is None:
            return None
        edits = []
        for span, item in zip(spans, body.items("tool_calls"), strict=True):
            call = wire.parse(bytes(item))
            new = msgspec.json.encode(ids[call.value("id")])
            edits.append(wire.Edit(*span, b"".join(wire.with_member(call, "id", new))))
        return b"".join(wire.splice(body.raw, edits))
    except (ValueError, KeyError):  # NotJson and msgspec's errors are ValueErrors
        return None
