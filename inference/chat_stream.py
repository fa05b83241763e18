"""What a gateway reads off an answer of chat/completions or completions, while it passes through.

`StreamReader` looks at each event of a stream once, decides whether it is forwarded, and gathers what
settling the call needs. Events are forwarded as the very bytes that came. There are four exceptions,
each of which undoes what asking the engine for usage has changed, so that the client sees the stream it
asked for: the usage-only chunk is withheld; a usage member on another chunk is cut out; vLLM then puts
its `system_fingerprint` on that usage chunk instead of the last ones with a finish reason, so it is put
back there; and a usage chunk without `choices`, which breaks common clients, gets an empty list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.inference.chunk_edit import with_first, with_last, without_member
from ctxgate.inference.chunk_fields import EMPTY, decode_lenient, decode_typed, is_set, text_size
from ctxgate.inference.chunk_shape import UNFINISHED, shape_of
from ctxgate.inference.record import Record
from ctxgate.inference.sse import DONE, data_of, name_of
from ctxgate.inference.usage_meter import UsageDialect, UsageMeter, lower_bound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.inference.chunk_fields import Choice, Fields
    from ctxgate.inference.chunk_shape import Shape
    from ctxgate.inference.usage_parse import ParsedUsage

_MARKS: Final = (
    b'"usage"',
    b'"error"',
    b'"finish_reason":"',
    b'"system_fingerprint"',
    b'"metrics"',
    b"event:",
    b"data: [",
)
_NO_CHOICES: Final = b'"choices":[]'
_MOST_SHAPES: Final = 8  # looked for in one stream: its events may have none in common


class Ending(StrEnum):
    """How a stream ended, decided at its end."""

    COMPLETED = "completed"
    ERROR = "error"  # the engine reported an error inside the stream
    TRUNCATED = "truncated"  # it broke off


class StreamTerms(Record, frozen=True):
    """What the client asked for and what the gateway added to it.

    `client_wants_usage`: `stream_options.include_usage` is true. `client_wants_continuous`: so is
    `continuous_usage_stats`. `injected_continuous`: the gateway asked for the latter by itself.
    `fingerprint`: the replica's `system_fingerprint` as last seen, where known.
    """

    client_wants_usage: bool = False
    client_wants_continuous: bool = False
    injected_continuous: bool = False
    dialect: UsageDialect = msgspec.field(default_factory=UsageDialect)
    fingerprint: str | None = None


class StreamReader:
    """Reads a stream event by event; its attributes are the facts gathered so far.

    `finish_reasons` is by choice index; `text_bytes` counts the model's own text in UTF-8;
    `content_events` the events that carried any; `error` and `metrics` are raw JSON or None;
    `malformed` counts events whose data is no JSON object.
    """

    __slots__ = (
        "_envelope", "_fingerprint", "_shape", "_shapes", "_terms", "content_events", "done", "error",
        "events", "finish_reasons", "malformed", "meter", "metrics", "system_fingerprint", "text_bytes",
    )  # fmt: skip

    def __init__(self, terms: StreamTerms | None = None) -> None:
        self._terms = terms or StreamTerms()
        # Only a client that did not ask for usage would have seen it on the finishing chunks.
        self._fingerprint = None if self._terms.client_wants_usage else self._terms.fingerprint
        self.meter = UsageMeter(self._terms.dialect)
        self._envelope = 0  # bytes of the last event with text, without the text
        self._shape: Shape | None = None
        self._shapes = 0
        self.events = 0
        self.content_events = 0
        self.text_bytes = 0
        self.malformed = 0
        self.finish_reasons: dict[int, str] = {}
        self.done = False
        self.error: bytes | None = None
        self.metrics: bytes | None = None
        self.system_fingerprint: str | None = None

    def on_event(self, event: bytes) -> bytes | None:
        """Take one whole event; the bytes to forward, or None to withhold it."""
        self.events += 1
        payload = data_of(event)
        if payload is None:
            return event
        if payload == DONE:
            self.done = True
            return event
        try:
            chunk: Fields | None = decode_typed(payload)
        except (msgspec.DecodeError, RecursionError):
            chunk = decode_lenient(payload)
        if chunk is None:
            self.done = self.done or payload.strip() == DONE
            self.malformed += not self.done
            return event
        finishing = self._read_choices(event, chunk.choices) if chunk.choices else False
        if chunk.system_fingerprint is not None:
            self.system_fingerprint = chunk.system_fingerprint
            finishing = False  # nothing to put back
        self._read_rest(event, payload, chunk)
        if chunk.usage is not EMPTY:
            return self._on_usage(event, payload, chunk, finishing)
        return self._with_fingerprint(event, payload) if finishing else event

    def skim(self, chunk: bytes) -> int:
        """How many bytes at the start of a read are whole events of ordinary text; they are taken note of.

        Most of a stream is such events, and none of them changes on its way. They are known by what a
        JSON text cannot hide inside a string: a member's name between unescaped quotes. What they count
        for an estimate, the text's size, is taken from the last event that was read in full.
        """
        if not self.content_events or self._terms.injected_continuous:
            return 0
        shape = self._shape
        length, events = shape.run(chunk) if shape is not None else (0, 0)
        if shape is None or not length:
            return self._skim_unmarked(chunk)
        self.events += events
        self.content_events += events
        self.text_bytes += length - events * shape.envelope
        return length

    def _skim_unmarked(self, chunk: bytes) -> int:
        """The same for events that are not all of one shape."""
        length = len(chunk)
        for mark in _MARKS:
            if (found := chunk.find(mark, 0, length)) >= 0:
                length = found
        length = chunk.rfind(b"\n\n", 0, length) + 2
        events = chunk.count(b"\n\n", 0, length)
        if length < 3 or chunk.count(UNFINISHED, 0, length) != events:
            return 0
        if chunk.count(b"data: {", 0, length) != events or b"\r" in chunk:
            return 0
        self.events += events
        self.content_events += events
        self.text_bytes += max(length - events * self._envelope, 0)
        last = chunk[chunk.rfind(b"\n\n", 0, length - 2) + 2 : length] if events > 1 else chunk[:length]
        self._look_for_shape(last, len(last) - self._envelope)
        return length

    def _look_for_shape(self, event: bytes, text_bytes: int) -> None:
        if text_bytes > 0 and self._shapes < _MOST_SHAPES:
            self._shapes += 1
            self._shape = shape_of(event, text_bytes, _MARKS)

    def _read_choices(self, event: bytes, choices: list[Choice]) -> bool:
        """Gather text and finish reasons; whether a choice ends here."""
        size, finishing = 0, False
        for choice in choices:
            size += text_size(choice)
            if choice.finish_reason is not None:
                self.finish_reasons[choice.index] = choice.finish_reason
                finishing = True
        if size:
            self.text_bytes += size
            self.content_events += 1
            self._envelope = len(event) - size
            self._look_for_shape(event, size)
        return finishing

    def _read_rest(self, event: bytes, payload: bytes, chunk: Fields) -> None:
        if chunk.metrics is not EMPTY:
            self.metrics = bytes(chunk.metrics)
        if is_set(chunk.error):
            self.error = bytes(chunk.error)
        elif chunk.object == "error" or (event[:5] != b"data:" and name_of(event) == b"error"):
            self.error = payload

    def _on_usage(self, event: bytes, payload: bytes, chunk: Fields, finishing: bool) -> bytes | None:
        """A chunk with a usage member: note it, and give the client the stream that it asked for."""
        terms, choices = self._terms, chunk.choices
        if not is_set(chunk.usage):
            return self._with_fingerprint(event, payload) if finishing else event
        if not choices:
            self.meter.add(chunk.usage)
            if not terms.client_wants_usage:
                return event if is_set(chunk.error) else None
            if choices is None and b'"choices"' not in payload:
                return _rewritten(event, payload, with_first(payload, _NO_CHOICES))
            return event
        self.meter.add(chunk.usage, choices[0].index if len(choices) == 1 else None)
        if not self._hides_usage:
            return event
        shown = without_member(payload, "usage", chunk.usage)
        if finishing and self._fingerprint is not None:
            shown = _fingerprinted(shown, self._fingerprint)
        return _rewritten(event, payload, shown)

    @property
    def _hides_usage(self) -> bool:
        """Whether the client asked for no usage beside choices: it is there on the gateway's account."""
        terms = self._terms
        return not terms.client_wants_usage or (
            terms.injected_continuous and not terms.client_wants_continuous
        )

    def _with_fingerprint(self, event: bytes, payload: bytes) -> bytes:
        if self._fingerprint is None:
            return event
        return _rewritten(event, payload, _fingerprinted(payload, self._fingerprint))

    def close(self, tail: bytes) -> bytes:
        """Take what is left after the last whole event, once the upstream is done; what to forward.

        A last event without its blank line is still an event; half an event is dropped. If the answer
        is not complete even then, the tail is terminated, so that an error event can follow.
        """
        payload = data_of(tail)
        if payload is None or (payload != DONE and decode_lenient(payload) is None):
            return b""
        forwarded = self.on_event(tail)
        if forwarded is None:
            return b""
        return forwarded if self.done or self.finished else forwarded + b"\n\n"

    @property
    def finished(self) -> bool:
        """Whether every choice asked for has its finish reason."""
        return len(self.finish_reasons) >= self._terms.dialect.choices

    @property
    def first_content_seen(self) -> bool:
        """Whether any text of the model has come."""
        return self.content_events > 0

    def usage(self) -> ParsedUsage:
        """The usage as last reported. Of a stream cut short the output is only a lower bound: estimated."""
        parsed = self.meter.result()
        if parsed.usage is None or self.done or self.finished or self.meter.closed:
            return parsed
        return type(parsed)(lower_bound(parsed.usage), parsed.anomalies, parsed.unknown_fields)


@dataclass(frozen=True, slots=True)
class FinishFacts:
    """What settling needs of a whole (not streamed) answer. Raw members are JSON, or None when absent."""

    usage: bytes | None = None
    metrics: bytes | None = None
    finish_reasons: Mapping[int, str] = field(default_factory=dict)
    text_bytes: int = 0
    error: bytes | None = None
    system_fingerprint: str | None = None
    malformed: bool = False


def finish_facts(body: bytes) -> FinishFacts:
    """Read a JSON answer of chat/completions, completions or embeddings."""
    try:
        answer: Fields | None = decode_typed(body)
    except (msgspec.DecodeError, RecursionError):
        answer = decode_lenient(body)
    if answer is None:
        return FinishFacts(malformed=True)
    choices = answer.choices or []
    error = bytes(answer.error) if is_set(answer.error) else None
    return FinishFacts(
        usage=bytes(answer.usage) if is_set(answer.usage) else None,
        metrics=bytes(answer.metrics) if is_set(answer.metrics) else None,
        finish_reasons={c.index: c.finish_reason for c in choices if c.finish_reason is not None},
        text_bytes=sum(text_size(choice) for choice in choices),
        error=body if error is None and answer.object == "error" else error,
        system_fingerprint=answer.system_fingerprint,
    )


def ending(reader: StreamReader, clean_eof: bool) -> Ending:
    """How the stream ended. `clean_eof`: the upstream closed its body properly, nothing was cut.

    An error event outranks everything, `[DONE]` proves completion, and without it an answer is whole
    only if the body ended properly with every choice finished.
    """
    if reader.error is not None:
        return Ending.ERROR
    if reader.done or (clean_eof and reader.finished):
        return Ending.COMPLETED
    return Ending.TRUNCATED


def error_event(message: str, *, kind: str, code: str | None) -> bytes:
    """An error inside a stream, in OpenAI's envelope. It is the stream's last event: no `[DONE]` follows."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


def truncation_event() -> bytes:
    """What a client gets when the upstream dies inside an answer."""
    return error_event(
        "The upstream connection ended before the answer was complete.",
        kind="server_error",
        code="upstream_truncated",
    )


def _rewritten(event: bytes, payload: bytes, shown: bytes) -> bytes:
    """The event with `shown` in place of its payload; its other fields stay."""
    if len(event) == len(payload) + 8 and event.startswith(b"data: "):
        return b"data: " + shown + event[-2:]
    if payload in event:
        return event.replace(payload, shown, 1)
    return b"data: " + shown.replace(b"\n", b" ") + b"\n\n"  # the payload came on several data lines


def _fingerprinted(payload: bytes, fingerprint: str) -> bytes:
    return with_last(payload, b'"system_fingerprint":' + msgspec.json.encode(fingerprint))
