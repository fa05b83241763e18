"""Writes the text that stands for dropped messages: by a model where one may, else by code.

Whatever goes wrong with a model's notes, the next best text takes their place, and what went wrong is told
by its kind. Nothing here is in a client's way: it runs between the requests of a conversation.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.diff_parts import HEAD_ROLES
from ctxgate.compression.said import read_said
from ctxgate.compression.summary_record import RecordText, RecordWork, made
from ctxgate.gateway.apart import SMALL_BYTES, ApartFailed
from ctxgate.gateway.context_level import Summarizer
from ctxgate.gateway.errors import Refused
from ctxgate.gateway.summarizing_call import Notes, notes_of

if TYPE_CHECKING:
    from msgspec import Raw

    from ctxgate.gateway.services import Services
    from ctxgate.gateway.summary_work import SummaryWork

log = logging.getLogger(__name__)

FALLBACKS: Final = (
    *("empty", "longer", "tool_call", "timeout", "overflow", "refused", "upstream", "ledger"),
    *("cold", "language", "failed"),
)
"""What may go otherwise than asked.

Of a model's notes: they say nothing, are longer than their source, hold a tool call or a message's frame;
they did not come in time, their prompt did not fit, the engine refused it, or failed; the ledger takes no
calls now; most of their prompt would not be found in the cache; they are in another script than the
conversation (and are used all the same). `failed`: the text could not be written, so there is none.
"""

_MADE: Final = "ctxgate.compression.summary_record:made"
_RECORD: Final = msgspec.msgpack.Decoder(RecordText)


@dataclass(frozen=True, slots=True)
class Summarized:
    """The text, without its heading (see `compression.summary`), and who wrote its notes.

    `by`: "warm_suffix" or "extractive". `fallbacks`: what did not go as asked, each one of `FALLBACKS`.
    """

    text: str = field(repr=False)
    by: str
    fallbacks: tuple[str, ...] = ()


async def summarize(services: Services, work: SummaryWork, mode: str) -> Summarized | None:
    """Summarize by `mode`, one of `SUMMARIZERS`. None where there is no text, or none that is shorter.

    What does not go as asked is counted by its kind, whatever comes of it. Never raises, but for a
    cancellation; the gateway's stopping ends it with None.
    """
    if mode == Summarizer.OFF or not work.dropped:
        return None
    fallbacks: list[str] = []
    try:
        return await _summarized(services, work, mode, fallbacks)
    finally:
        for kind in fallbacks:
            services.telemetry.summary_fallbacks.labels(kind).inc()


async def _summarized(
    services: Services, work: SummaryWork, mode: str, fallbacks: list[str]
) -> Summarized | None:
    notes = Notes(None)
    if mode == Summarizer.WARM_SUFFIX:
        try:
            notes = await notes_of(services, work.held, work.sent, work.budget)
        except Refused:  # the gateway is being stopped
            return None
        except Exception as error:  # noqa: BLE001 - no defect in it may keep a conversation from being compacted
            # Its text is not logged: it may quote a prompt.
            log.error("a summary could not be asked for: %s", type(error).__name__)
            notes = Notes(None, fault="upstream")
        fallbacks += [notes.fault] if notes.fault is not None else []
    try:
        record = await _record(services, work, notes)
    except Exception as error:  # noqa: BLE001 - as above
        log.error("a summary could not be written: %s", _said(error))
        fallbacks.append("failed")
        return None
    fallbacks += record.told
    if record.text is None:
        return None
    by = Summarizer.WARM_SUFFIX if record.by_model else Summarizer.EXTRACTIVE
    return Summarized(record.text, by.value, tuple(fallbacks))


async def _record(services: Services, work: SummaryWork, notes: Notes) -> RecordText:
    """The text, made where it holds nobody up."""
    packed = await asyncio.to_thread(_packed, work, notes)
    if len(packed) <= SMALL_BYTES:
        return _RECORD.decode(await asyncio.to_thread(made, packed))
    return _RECORD.decode(await services.apart.run(_MADE, packed))


def _packed(work: SummaryWork, notes: Notes) -> bytes:
    return msgspec.msgpack.encode(
        RecordWork(
            dropped=[bytes(message) for message in work.dropped],
            kept=[bytes(message) for message in kept_beside(work)],
            shortened=[bytes(message) for message in work.shortened],
            task=None if work.task is None else bytes(work.task),
            budget=work.budget,
            source_bytes=work.source_bytes,
            answer=notes.text,
            cut=notes.cut,
        )
    )


def kept_beside(work: SummaryWork) -> list[Raw]:
    """The messages of the prompt that certainly stay: those in front of the task, it, and those at the end.

    The end is what the client has behind the last dropped message, as it went out.
    """
    messages = work.sent.items("messages")
    kept: list[Raw] = [] if work.task is None else [work.task]
    for message in messages:
        if read_said(message).role not in HEAD_ROLES:
            break
        kept.append(message)
    theirs = work.held.routed.planned.allowed.identified.inbound.messages
    for count, message in enumerate(reversed(theirs)):
        if message is work.dropped[-1]:
            return [*kept, *messages[len(messages) - count :]]
    return kept


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, ApartFailed) else type(error).__name__
