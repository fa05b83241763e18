"""The record that stands for dropped messages, put together from all that is known of them.

First the user's rules word for word, then the notes (a model's if they may be used, else sentences chosen by
code), then the exact strings, as many as the budget holds. The whole of it is one pure step from bytes to
bytes, so that it can be done in another process: on a million tokens it takes seconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.extractive import extract
from ctxgate.compression.identifiers import (
    IdentifierKind,
    block,
    collected,
    estimated_tokens,
    found_in,
    readable,
    rules_block,
)
from ctxgate.compression.instruction_answer import read_answer
from ctxgate.compression.said import Said, read_said
from ctxgate.compression.scripts import LOOKED_AT, script_of
from ctxgate.compression.summary import fitted, framed, has_markup, is_record, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.compression.identifiers import Found, Identifier
    from ctxgate.compression.summary import Summary

OTHER_SCRIPT: Final = "language"
"""Told beside a record whose notes are written in another script than the conversation."""

LONGER: Final = "longer"
EMPTY: Final = "empty"

_NOTES_SHARE: Final = (1, 3)  # of what the rules leave: what a model loses most is exact strings
_LEAST_SHRUNK: Final = 6  # bytes that are dropped for each token of a record: half the length, or less
_LEAST_SHARE: Final = 8  # the notes have this part of the budget even where the rules take more


class RecordWork(msgspec.Struct, frozen=True):
    """What a record is made from; messages are JSON objects.

    `dropped`: the messages it stands for; `source_bytes` is what they take in the prompt. `kept`: messages
    that stay beside it, whose exact strings it need not repeat. `task`: the first user message, where it is
    not among the dropped ones. `budget`: tokens of the whole text; only the user's rules may take more.
    `answer`: a model's notes, None without a model; `cut`: they stop at the output limit. `shortened`:
    messages that stay without their middle, whose user's rules are written too.
    """

    dropped: list[bytes]
    kept: list[bytes]
    task: bytes | None
    budget: int
    source_bytes: int
    answer: str | None = None
    cut: bool = False
    shortened: list[bytes] = []


class RecordText(msgspec.Struct, frozen=True):
    """A record without its heading, None where there is nothing to say or it would be longer than its source.

    `by_model`: the notes are the model's. `told` names, in order, what did not go as asked: why the model's
    notes were not used, or `OTHER_SCRIPT`.
    """

    text: str | None
    by_model: bool
    told: list[str]


_WORK: Final = msgspec.msgpack.Decoder(RecordWork)


def made(work: bytes) -> bytes:
    """`record_of` from a packed `RecordWork` to a packed `RecordText`."""
    return msgspec.msgpack.encode(record_of(_WORK.decode(work)))


def record_of(work: RecordWork) -> RecordText:
    """Write the record. Deterministic; never raises for anything that messages or answers hold."""
    told: list[str] = []
    # An earlier record that a client sends back is no word of its user's, and says nothing first-hand.
    said = [each for each in map(read_said, work.dropped) if not is_record(each.text)]
    found = [*map(_rules_in, work.shortened), *map(found_in, said)]
    every = collected(enumerate(found))
    rules = rules_block(every)
    budget = min(work.budget, work.source_bytes // _LEAST_SHRUNK)
    left = budget - estimated_tokens(rules)
    room = max(left * _NOTES_SHARE[0] // _NOTES_SHARE[1], budget // _LEAST_SHARE)
    notes = _model_notes(work, said, told, every)
    by_model = notes is not None
    if notes is None:
        kept_task = None if work.task is None else Said("user")  # it stands in the prompt word for word
        notes = extract(said, room, task=kept_task, rules=False)
    prose = listed(fitted(notes, room, estimated_tokens)) if notes is not None else ""
    first = "\n".join(part for part in (rules, prose) if part)
    strings = _strings(every, left - estimated_tokens(prose), first, work.kept)
    text = "\n".join(part for part in (first, strings) if part)
    if not text:
        return RecordText(None, by_model, [*told, EMPTY])
    if len(framed(text).encode()) >= work.source_bytes:
        return RecordText(None, by_model, [*told, LONGER])
    return RecordText(text, by_model, told)


def _rules_in(message: bytes) -> list[Found]:
    said = read_said(message)
    if is_record(said.text):
        return []
    return [each for each in found_in(said) if each.kind is IdentifierKind.RULE]


def _model_notes(
    work: RecordWork, said: Sequence[Said], told: list[str], every: Sequence[Identifier]
) -> Summary | None:
    """A model's notes, if there are any that may be used; what is wrong with them is added to `told`."""
    if work.answer is None:
        return None
    reading = read_answer(work.answer, work.source_bytes, cut=work.cut)
    if reading.summary is None:
        told.append(str(reading.fault))
        return None
    spoken = ""
    for message in reversed(said):
        if len(spoken) >= LOOKED_AT:
            break
        if message.role in ("user", "assistant"):
            spoken += message.text[:LOOKED_AT]
    theirs, own = script_of(listed(reading.summary)), script_of(spoken)
    if theirs is not None and own is not None and theirs != own:
        told.append(OTHER_SCRIPT)
    rules = {each.text for each in every if each.kind is IdentifierKind.RULE}
    constraints = tuple(text for text in reading.summary.constraints if text not in rules)
    return replace(reading.summary, constraints=constraints)


def _strings(every: Sequence[Identifier], room: int, first: str, kept: Sequence[bytes]) -> str:
    """The exact strings that stand neither in `first` nor in messages that stay."""
    others = [each for each in every if each.kind is not IdentifierKind.RULE and not has_markup(each.text)]
    parts = [first]
    for message in map(read_said, kept):
        parts += [message.text, *map(readable, message.calls)]
    return block(others, max(room, 0), already="\n".join(parts)).text
