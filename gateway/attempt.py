"""One try of one request at one replica: open, forward, settle exactly once.

The request's own task runs the whole exchange, also after its client has left: then the call is
aborted at the engine by its id, and the answer is read on to its end, because the engine closes an
aborted call with its exact usage. A replica that offers no abort is disconnected, and its usage is
estimated and marked so.

    opened ─┬─ no answer ───────────────> settled; may be tried elsewhere
            ├─ the engine refuses ──────> settled; its error passes, or another try
            ├─ a whole answer ──────────> settled, durable, then sent
            └─ a stream ────────────────> sent as it comes; settled, durable, then its last bytes
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from ctxgate.gateway import metering
from ctxgate.gateway.booking import Booking
from ctxgate.gateway.calling_off import CallingOff, Cause
from ctxgate.gateway.edge import EVENT_STREAM, JSON
from ctxgate.gateway.errors import STOPPING, Kind, Refused, event_of
from ctxgate.gateway.flow import UPSTREAM_PATHS
from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.routing import predicted, tier_told
from ctxgate.gateway.signs import error_code
from ctxgate.gateway.upstream_errors import pass_on, too_long, too_long_event, with_reason
from ctxgate.inference import rates
from ctxgate.inference.chat_relay import StreamRelay
from ctxgate.inference.chat_stream import Ending, StreamReader, ending, finish_facts, truncation_event
from ctxgate.inference.client import AnswerTooLarge, Dropped, Unreachable
from ctxgate.inference.engine_load import ASK_HEADER
from ctxgate.inference.sse import EventTooLarge
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED

if TYPE_CHECKING:
    from ctxgate.compression.window_errors import Overflow
    from ctxgate.gateway.edge import Headers, Reply
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.flow import Answered, Held
    from ctxgate.gateway.services import Services
    from ctxgate.inference.client import UpstreamResponse
    from ctxgate.inference.usage import Usage

MAX_ERROR_BYTES: Final = 2**20
MAX_ANSWER_BYTES: Final = 2**28
REFUSES_WITHIN_S: Final = 2.0
"""How long the head of a stream waits for its first event: a refusal takes no longer."""

_AFTER_DONE_S: Final = 2.0
_PRINTABLE: Final = "!#$&'()*+,/:;<=>?@[]^`{|}~ "
_UNQUOTED: Final = re.compile(r"[0-9A-Za-z._~/:-]+", re.ASCII).fullmatch
OVERLOAD: Final = frozenset({429, 503})
_CALLED_OFF: Final = {
    Cause.CLIENT_GONE: Outcome.CLIENT_DISCONNECTED,
    Cause.TOO_LATE: Outcome.TIMED_OUT,
    Cause.SHUTDOWN: Outcome.SHUTDOWN,
}
_TOO_LATE: Final = Refused(Kind.UPSTREAM_TIMEOUT, "The model server did not answer in time.")


def _shown(task: str) -> str:
    """A task's name as a header can carry it; most need no quoting."""
    return task if _UNQUOTED(task) else quote(task, safe=_PRINTABLE)


class Attempt:
    """One attempt. `run` settles it on every way out and says whether another one may help."""

    def __init__(self, services: Services, held: Held, reply: Reply) -> None:
        self._services = services
        self._held = held
        self._reply = reply
        self._row = held.attempt
        self._record = services.fleet.record(held.attempt.pool, held.attempt.replica)
        self._inbound = held.routed.planned.allowed.identified.inbound
        self._terms = metering.terms_of(
            held,
            reports_cached=self._record.reports_cached is True,
            fingerprint=self._record.fingerprint,
            window=self._record.windows.get(held.routed.planned.allowed.model.engine_name),
        )
        self._booking = Booking(services, held)
        self._off = CallingOff(services, held, self._terms.dialect.prompts)
        self._reader: StreamReader | None = None
        self._passing: StreamRelay | None = None
        self._tier = tier_told(held)  # to be reported in the answer; empty where it is not
        self._headers_came = False
        self._gave_way = False
        self.refusal: tuple[int, bytes] | None = None  # the engine's error, while it has not been sent

    async def run(self) -> Answered:
        """The whole exchange. Raises `Refused` while nothing was sent, else answers the client itself."""
        self._reply.on_gone = self._client_gone
        self._services.attempts.add(self)
        try:
            with self._services.routing.counted(self._held) as self._booking.taken:
                self._booking.open()
                return await self._exchange()
        except asyncio.CancelledError:  # the gateway is being stopped, and its grace is over
            self._settle(Outcome.SHUTDOWN, self._booking.usage_so_far(self._reader))
            raise
        finally:
            self._services.attempts.discard(self)
            self._reply.on_gone = None
            self._off.finish()
            self._settle(Outcome.FAILED, NOTHING_KNOWN)  # counts only where a defect has left it open

    def call_off(self) -> None:
        """The gateway is being stopped: end the call and book what it used."""
        self._off.call_off(Cause.SHUTDOWN)

    def give_way(self, silent: ReplicaRecord) -> None:
        """A replica says nothing any more: calls there without an answer go elsewhere."""
        if self._record is not silent or self._headers_came or self._off.cause is not None:
            return
        number, fleet = self._row.attempt_number, self._services.fleet
        others = [
            record
            for pool in self._held.routed.planned.allowed.pools
            for replica in pool.replicas
            if (record := fleet.known(pool.name, replica.name)) is not None  # it may be gone since
            and record is not silent
            and fleet.healthy(record)
            and not record.draining
        ]
        if number <= len(others) and number < self._services.config.limits.max_attempts:
            self._gave_way = True
            self._off.hang_up()

    async def _exchange(self) -> Answered:
        limits = self._services.config.limits
        headers = self._services.upstream_headers(self._held.routed.pool)
        headers["x-request-id"] = self._row.attempt_id
        headers |= self._services.kv.opened(self._held)
        told_load = self._held.routed.pool.load == "header"
        if told_load:
            headers[ASK_HEADER] = "json"
        url = self._held.routed.replica.url + UPSTREAM_PATHS[self._inbound.surface]
        body = self._held.routed.planned.plan.outgoing
        try:
            async with asyncio.timeout(None) as hard:
                self._off.begin(hard, limits.first_byte_timeout_s)
                if self._reply.gone:
                    self._client_gone()
                async with await self._services.client.open(url, body, headers) as response:
                    self._headers_came = True
                    if told_load and (load := response.load) is not None:
                        self._services.fleet.told_load(self._row.pool, self._row.replica, load)
                    self._off.wait_at_most(limits.idle_timeout_s)
                    await self._booking.opened()
                    return await self._relay(response)
        except Unreachable:
            return self._settle(Outcome.UNREACHABLE, NOTHING_USED, retriable=True)
        except AnswerTooLarge:
            self._off.abort_in_background()
            self._settle(Outcome.UPSTREAM_ERROR, self._booking.usage_so_far(None), status=200)
            raise Refused(Kind.UPSTREAM_BROKEN, "The model server's answer is too large.") from None
        except (Dropped, TimeoutError, EventTooLarge) as error:
            return await self._broken(error)

    async def _relay(self, response: UpstreamResponse) -> Answered:
        if response.status != 200:
            return await self._engine_refused(response)
        if response.is_event_stream:
            return await self._stream(response)
        return await self._whole(response)

    async def _engine_refused(self, response: UpstreamResponse) -> Answered:
        """The engine's own error: overload and faults may be tried elsewhere, the rest is the client's."""
        body = await response.start_of_body(MAX_ERROR_BYTES)
        self.refusal = pass_on(response.status, body)
        status = response.status
        if status in OVERLOAD:
            return self._settle(Outcome.OVERLOADED, NOTHING_USED, status=status, retriable=True)
        if self.refusal[0] >= 500 and status != HTTPStatus.NOT_IMPLEMENTED:
            # Also a replica that refuses the gateway's key, or answers no JSON API.
            usage = NOTHING_KNOWN if status >= 500 else NOTHING_USED
            return self._settle(Outcome.UPSTREAM_ERROR, usage, status=status, retriable=True)
        overflow = too_long(body) if self._held.routed.planned.may_shrink else None
        answered = self._settle(Outcome.REJECTED, NOTHING_USED, status=status, overflow=overflow)
        await self._booking.durable()
        if overflow is not None:
            return answered  # a shorter prompt may go out instead
        await self._reply.whole(self.refusal[0], [JSON, *self.headers()], self.refusal[1])
        return answered

    async def _whole(self, response: UpstreamResponse) -> Answered:
        """An answer in one piece: settled before it is sent, so that its price can be told."""
        body = await response.body(MAX_ANSWER_BYTES)
        await self._services.context.taken(self._held)
        facts = finish_facts(body) if response.is_json else metering.opaque_facts(response.metadata)
        self._booking.text_bytes, self._booking.engine_error = facts.text_bytes, facts.error
        self._booking.metrics = facts.metrics
        usage = self._booking.noted(
            metering.usage_of_answer(facts, self._terms.dialect, self._inbound.surface, self._booking.basis())
        )
        await self._services.misses.compared(self._held, usage)
        cause = self._off.cause
        if cause is not Cause.CLIENT_GONE and not metering.was_aborted(facts.finish_reasons):
            cause = None  # the answer was whole before the engine heard of it
        outcome = Outcome.COMPLETED if cause is None else _CALLED_OFF[cause]
        if facts.error is not None or facts.malformed:
            outcome = Outcome.UPSTREAM_ERROR
        reason = metering.finish_reason(facts.finish_reasons)
        answered = self._settle(outcome, usage, status=response.status, reason=reason)
        await self._booking.durable()
        if cause is not None:
            self._refuse_called_off()
            return answered
        headers = [(b"content-type", response.raw_content_type), *self.headers()]
        if response.metadata:
            headers.append((b"metadata", response.metadata))
        cost = self._booking.charge(usage).total
        if cost is not None:
            headers.append((b"x-ctxgate-cost", rates.format_usd(cost).encode()))
            body = metering.with_cost(body, cost) if response.is_json else body
        if self._tier and response.is_json:
            body = metering.with_tier(body, self._tier)
        await self._reply.whole(response.status, headers, body)
        return answered

    def _refuse_called_off(self) -> None:
        """Tell a client that is still there why it gets no answer. Raises `Refused`."""
        if self._off.cause is Cause.TOO_LATE:
            raise _TOO_LATE.fresh()
        if self._off.cause is Cause.SHUTDOWN:
            raise STOPPING.fresh()

    async def _stream(self, response: UpstreamResponse) -> Answered:
        """A stream: every event leaves as it comes, only `[DONE]` waits until the call is booked."""
        reader = self._reader = StreamReader(self._terms)
        passing = self._passing = StreamRelay(reader, partial(self._with_cost, reader))
        planned, first = self._held.routed.planned, b""
        if planned.turn is not None:  # a long prompt: an engine may only say here that it is too long
            first = await self._first_read(response)
            found = too_long_event(first) if planned.may_shrink and not self._reply.started else None
            if found is not None:
                return await self._stream_refused(*found)
            await self._services.context.taken(self._held)
        await self._start_stream()
        idle_s = self._services.config.limits.idle_timeout_s
        while not reader.done and (chunk := first or await response.next_chunk()):
            first = b""
            out = passing.take(chunk)
            if reader.content_events:
                self._booking.first_text()
            if self._tier and out:
                out, self._tier = metering.with_tier_in_event(out, self._tier), ""
            if out and self._off.cause is None:
                self._off.writing = True
                await self._reply.write(out)
                self._off.writing = False
            self._off.wait_at_most(idle_s)
        if (tail := passing.close()) and self._off.cause is None:
            await self._reply.write(tail)
        answered = await self._stream_ended(reader, clean_eof=True)
        await response.drain(_AFTER_DONE_S)  # only the body's end is left: then its connection is used again
        return answered

    async def _first_read(self, response: UpstreamResponse) -> bytes:
        """The first bytes of a stream. Its client gets the head before them where they take long."""
        read = asyncio.ensure_future(response.next_chunk())
        try:
            await asyncio.wait((read,), timeout=REFUSES_WITHIN_S)
            if not read.done():
                await self._start_stream()
            return await read
        finally:
            read.cancel()

    async def _start_stream(self) -> None:
        """Send the head of a stream, unless that was done."""
        if not self._reply.started:
            await self._reply.start(HTTPStatus.OK, [*EVENT_STREAM, *self.headers()])

    async def _stream_refused(self, overflow: Overflow, error: bytes) -> Answered:
        """The engine's refusal of a prompt as too long, only said inside the stream, as its first event."""
        self._booking.engine_error = error
        self.refusal = pass_on(HTTPStatus.BAD_REQUEST, error)
        answered = self._settle(Outcome.REJECTED, NOTHING_USED, status=HTTPStatus.OK, overflow=overflow)
        await self._booking.durable()
        return answered

    def _with_cost(self, reader: StreamReader, event: bytes) -> bytes:
        cost = self._booking.charge(self._booking.usage_of(reader)).total
        return event if cost is None else metering.with_cost(event, cost)

    async def _stream_ended(self, reader: StreamReader, *, clean_eof: bool) -> Answered:
        """Book the stream by how it ended, then let its last bytes go."""
        ended = ending(reader, clean_eof)
        outcome = {
            Ending.COMPLETED: Outcome.COMPLETED,
            Ending.ERROR: Outcome.UPSTREAM_ERROR,
            Ending.TRUNCATED: Outcome.TRUNCATED,
        }[ended]
        usage = self._booking.usage_of(reader)
        await self._services.misses.compared(self._held, usage)
        if self._off.cause is not None and ended is not Ending.ERROR:
            outcome = _CALLED_OFF[self._off.cause]
        elif not reader.content_events and 400 <= (error_code(reader.error) or 0) < 500:
            outcome, usage = Outcome.REJECTED, NOTHING_USED  # a refusal, only said inside the stream
        self._booking.text_bytes, self._booking.engine_error = reader.text_bytes, reader.error
        self._booking.metrics = reader.metrics
        reason = metering.finish_reason(reader.finish_reasons)
        answered = self._settle(outcome, usage, status=200, reason=reason)
        if reader.system_fingerprint is not None:
            self._record.fingerprint = reader.system_fingerprint
        await self._booking.durable()
        if answered.outcome is Outcome.TRUNCATED:
            self._services.telemetry.truncated.labels(self._row.pool).inc()
        await self._start_stream()  # where the stream broke before its first event
        await self._reply.end(self._last_bytes(answered.outcome))
        return answered

    def _last_bytes(self, outcome: Outcome) -> bytes:
        """`[DONE]` for a whole answer, an error event for a cut one, nothing after an engine's own error."""
        if outcome is Outcome.COMPLETED:
            return b"" if self._passing is None else self._passing.end_marker
        if outcome is Outcome.TRUNCATED:
            return truncation_event()
        if outcome in (Outcome.TIMED_OUT, Outcome.SHUTDOWN):
            return event_of(_TOO_LATE if outcome is Outcome.TIMED_OUT else STOPPING)
        return b""

    def tell_why(self, reason: str) -> None:
        """Add to the engine's refusal why no shorter prompt follows it; without one, nothing."""
        if self.refusal is not None:
            self.refusal = with_reason(self.refusal, reason)

    async def _broken(self, error: Exception) -> Answered:
        """The replica gave no whole answer, or the client took none."""
        if self._booking.answered is not None:
            return self._booking.answered  # booked in time; only its sending or the body's end was late
        if self._off.writing and isinstance(error, TimeoutError):
            self._reply.gone = True  # nothing more is sent to a client that takes nothing
            self._off.cause = Cause.CLIENT_GONE
        self._off.abort_in_background()
        if self._reader is not None:  # where all was said, only the connection's end is missing
            return await self._stream_ended(self._reader, clean_eof=self._reader.done)
        self.refusal = None
        if self._off.cause is not None:
            answered = self._settle(_CALLED_OFF[self._off.cause], self._booking.usage_so_far(None))
            self._refuse_called_off()
            return answered
        lost = not self._headers_came and not self._gave_way
        return self._settle(Outcome.UNREACHABLE, NOTHING_KNOWN, retriable=True, connection_lost=lost)

    def _settle(
        self,
        outcome: Outcome,
        usage: Usage,
        *,
        status: int | None = None,
        reason: str | None = None,
        retriable: bool = False,
        connection_lost: bool = False,
        overflow: Overflow | None = None,
    ) -> Answered:
        return self._booking.settle(
            outcome,
            usage,
            status=status,
            reason=reason,
            retriable=retriable,
            connection_lost=connection_lost,
            overflow=overflow,
        )

    def headers(self) -> Headers:
        """What the client is told beside the answer: its request id, and where the call went."""
        headers = [
            (b"x-request-id", self._row.request_id.encode()),
            (b"x-ctxgate-pool", self._row.pool.encode()),
            (b"x-ctxgate-replica", self._row.replica.encode()),
            (b"x-ctxgate-task", _shown(self._row.task).encode()),
        ]
        headers += predicted(self._held)
        if self._row.predicted_cached_tokens is not None:
            headers.append((b"x-ctxgate-expected-cached", b"%d" % self._row.predicted_cached_tokens))
        if (miss := self._booking.miss) is not None:
            headers.append((b"x-ctxgate-miss", miss.header()))
        planned = self._held.routed.planned
        if planned.plan.layout_edits:
            layout = f"{planned.level}; edits={planned.plan.layout_edits}"
            headers.append((b"x-ctxgate-layout", layout.encode()))
        if planned.turn is not None and (told := planned.turn.told()) is not None:
            headers.append((b"x-ctxgate-compaction", told.encode()))
        return headers

    def _client_gone(self) -> None:
        """The client left: end the call at the engine, and stay for its usage."""
        if self._booking.answered is None:
            self._off.call_off(Cause.CLIENT_GONE)
