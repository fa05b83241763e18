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
from datetime import UTC, datetime
from itertools import chain, repeat
from typing import TYPE_CHECKING, Final

from ctxgate.gateway import metering
from ctxgate.gateway.edge import EVENT_STREAM, JSON
from ctxgate.gateway.errors import Kind, Refused
from ctxgate.gateway.flow import UPSTREAM_PATHS, Answered, Settled, Surface
from ctxgate.gateway.ledger import AttemptSettled, LedgerError, Outcome
from ctxgate.gateway.services import noted
from ctxgate.gateway.upstream_errors import pass_on
from ctxgate.inference import rates
from ctxgate.inference.chat_stream import Ending, StreamReader, ending, finish_facts, truncation_event
from ctxgate.inference.client import Dropped, Unreachable
from ctxgate.inference.sse import EventTooLarge, SseSplitter
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, Certainty

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ctxgate.gateway.edge import Headers, Reply
    from ctxgate.gateway.flow import Held
    from ctxgate.gateway.services import Services
    from ctxgate.inference.client import UpstreamResponse
    from ctxgate.inference.rates import Charge
    from ctxgate.inference.usage import Usage

MAX_ERROR_BYTES: Final = 2**20
MAX_ANSWER_BYTES: Final = 2**28
_ABORT_AGAIN_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0)
_DURABLE_WITHIN_S: Final = 2.0
_AFTER_DONE_S: Final = 2.0
_DEADLINE_STEP_S: Final = 0.25
_MOST_IDS: Final = 1024  # a call of more prompts is hung up on: its list of ids would be a burden of its own
OVERLOAD: Final = frozenset({429, 503})


class Attempt:
    """One attempt. `run` settles it on every way out and says whether another one may help."""

    def __init__(self, services: Services, held: Held, reply: Reply) -> None:
        self._services = services
        self._held = held
        self._reply = reply
        self._row = held.attempt
        self._record = services.fleet.record(held.attempt.pool, held.attempt.replica)
        self._splitter = SseSplitter()
        self._reader: StreamReader | None = None
        self._deadline: asyncio.Timeout | None = None
        self._until = 0.0
        self._loop = asyncio.get_running_loop()
        self._aborter: asyncio.Task[None] | None = None
        self._answered: Answered | None = None
        self._ttft_us: int | None = None
        self._terms = metering.terms_of(
            held, reports_cached=self._record.reports_cached, fingerprint=self._record.fingerprint
        )
        self._inbound = held.routed.planned.allowed.identified.inbound
        self._done_event = b""
        self._costed = False
        self._writing = False
        self._headers_came = False
        self._text_bytes = 0
        self.refusal: tuple[int, bytes] | None = None  # the engine's error, while it has not been sent

    async def run(self) -> Answered:
        """The whole exchange. Raises `Refused` while nothing was sent, else answers the client itself."""
        self._reply.on_gone = self._client_gone
        try:
            with self._services.fleet.taken(self._row.pool, self._row.replica):
                opened = self._services.ledger.open(self._row)
                opened.add_done_callback(noted)
                return await self._exchange(opened)
        finally:
            self._reply.on_gone = None
            if self._aborter is not None:
                self._aborter.cancel()
            if self._answered is None:  # a defect, or the gateway is being stopped
                self._settle(Outcome.FAILED, None, None, self._usage_of_a_failure())

    async def _exchange(self, opened: Awaitable[None]) -> Answered:
        limits = self._services.config.limits
        headers = self._services.upstream_headers(self._held.routed.pool)
        headers["x-request-id"] = self._row.attempt_id
        url = self._held.routed.replica.url + UPSTREAM_PATHS[self._inbound.surface]
        body = self._held.routed.planned.plan.outgoing
        try:
            async with asyncio.timeout(limits.first_byte_timeout_s) as self._deadline:
                if self._reply.gone:
                    self._client_gone()
                async with await self._services.client.open(url, body, headers) as response:
                    self._headers_came = True
                    self._wait_at_most(limits.idle_timeout_s)
                    await opened
                    return await self._relay(response)
        except LedgerError as error:
            self._settle(Outcome.FAILED, None, None, NOTHING_KNOWN)
            raise Refused(Kind.LEDGER_UNAVAILABLE, "The ledger cannot take this request.") from error
        except Unreachable:
            return self._settle(Outcome.UNREACHABLE, None, None, NOTHING_USED, retriable=True)
        except (Dropped, TimeoutError, EventTooLarge) as error:
            return await self._broken(error)
        finally:
            self._deadline = None

    async def _relay(self, response: UpstreamResponse) -> Answered:
        if response.status != 200:
            return await self._engine_refused(response)
        if response.is_event_stream:
            return await self._stream(response)
        return await self._whole(response)

    async def _engine_refused(self, response: UpstreamResponse) -> Answered:
        """The engine's own error: overload and faults may be tried elsewhere, the rest is the client's."""
        body = await response.body(MAX_ERROR_BYTES)
        self.refusal = pass_on(response.status, body)
        if response.status in OVERLOAD:
            return self._settle(Outcome.OVERLOADED, response.status, None, NOTHING_USED, retriable=True)
        if self.refusal[0] >= 500:  # also a replica that refuses the gateway's key, or answers no JSON API
            usage = NOTHING_KNOWN if response.status >= 500 else NOTHING_USED
            return self._settle(Outcome.UPSTREAM_ERROR, response.status, None, usage, retriable=True)
        answered = self._settle(Outcome.REJECTED, response.status, None, NOTHING_USED)
        await self._durable()
        await self._reply.whole(self.refusal[0], [JSON, *self.headers()], self.refusal[1])
        return answered

    async def _whole(self, response: UpstreamResponse) -> Answered:
        """An answer in one piece: settled before it is sent, so that its price can be told."""
        body = await response.body(MAX_ANSWER_BYTES)
        facts = finish_facts(body)
        self._text_bytes = facts.text_bytes
        metered = metering.usage_of_answer(facts, self._terms.dialect, self._inbound.surface, self._basis())
        usage = self._noted(metered)
        outcome = Outcome.CLIENT_DISCONNECTED if self._reply.gone else Outcome.COMPLETED
        if facts.error is not None or facts.malformed:
            outcome = Outcome.UPSTREAM_ERROR
        answered = self._settle(outcome, response.status, metering.finish_reason(facts.finish_reasons), usage)
        await self._durable()
        headers = [(b"content-type", response.content_type.encode()), *self.headers()]
        cost = self._charge(usage).total
        if cost is not None:
            headers.append((b"x-ctxgate-cost", rates.format_usd(cost).encode()))
            body = metering.with_cost(body, cost)
        await self._reply.whole(response.status, headers, body)
        return answered

    async def _stream(self, response: UpstreamResponse) -> Answered:
        """A stream: every event leaves as it comes, only `[DONE]` waits until the call is booked."""
        reader = self._reader = StreamReader(self._terms)
        await self._reply.start(response.status, [*EVENT_STREAM, *self.headers()])
        idle_s = self._services.config.limits.idle_timeout_s
        async for chunk in response.chunks():
            out = self._take(reader, chunk)
            if out:
                self._writing = True
                await self._reply.write(out)
                self._writing = False
            self._wait_at_most(_AFTER_DONE_S if reader.done else idle_s)
        if tail := self._take_tail(reader):
            await self._reply.write(tail)
        return await self._stream_ended(reader, clean_eof=True)

    def _take(self, reader: StreamReader, chunk: bytes) -> bytes:
        """The bytes to forward for one chunk; `[DONE]` is kept back."""
        out: list[bytes] = []
        while chunk:
            length = reader.skim(chunk) if self._splitter.empty else 0
            if length:
                out.append(chunk[:length])
            else:
                # Before the first text an event is read at a time, so that the rest can be skimmed.
                first = not reader.content_events and self._splitter.empty
                length = chunk.find(b"\n\n") + 2 if first else len(chunk)
                length = length if length > 1 else len(chunk)
                out += self._read(reader, chunk[:length])
            chunk = chunk[length:]
        if self._ttft_us is None and reader.content_events:
            self._ttft_us = self._services.now_us() - self._row.opened_at_us
        return out[0] if len(out) == 1 else b"".join(out)

    def _read(self, reader: StreamReader, chunk: bytes) -> list[bytes]:
        """The events of a chunk that go on to the client."""
        out: list[bytes] = []
        for event in self._splitter.feed(chunk):
            forwarded = reader.on_event(event)
            if reader.done:
                self._done_event = self._done_event or forwarded or b""
            elif forwarded is not None:
                if reader.meter.closed and not self._costed:
                    forwarded = self._with_cost(reader, forwarded)
                out.append(forwarded)
        return out

    def _take_tail(self, reader: StreamReader) -> bytes:
        """The bytes to forward of a last event that came without its blank line."""
        if self._done_event:
            return b""
        tail = reader.close(self._splitter.tail())
        if not reader.done:
            return tail
        self._done_event = tail
        return b""

    def _with_cost(self, reader: StreamReader, event: bytes) -> bytes:
        self._costed = True
        cost = self._charge(self._usage_of(reader)).total
        return event if cost is None else metering.with_cost(event, cost)

    async def _stream_ended(self, reader: StreamReader, *, clean_eof: bool) -> Answered:
        """Book the stream by how it ended, then let its last bytes go."""
        ended = ending(reader, clean_eof)
        outcome = {
            Ending.COMPLETED: Outcome.COMPLETED,
            Ending.ERROR: Outcome.UPSTREAM_ERROR,
            Ending.TRUNCATED: Outcome.TRUNCATED,
        }[ended]
        if self._reply.gone and ended is not Ending.ERROR:
            outcome = Outcome.CLIENT_DISCONNECTED
        reason = metering.finish_reason(reader.finish_reasons)
        self._text_bytes = reader.text_bytes
        answered = self._settle(outcome, 200, reason, self._usage_of(reader))
        if reader.system_fingerprint is not None:
            self._record.fingerprint = reader.system_fingerprint
        await self._durable()
        if answered.outcome is Outcome.TRUNCATED:
            self._services.telemetry.truncated.labels(self._row.pool).inc()
            await self._reply.end(truncation_event())
        else:
            await self._reply.end(self._done_event if ended is Ending.COMPLETED else b"")
        return answered

    async def _broken(self, error: Exception) -> Answered:
        """The replica gave no whole answer, or the client took none."""
        if self._answered is not None and self._reader is None:
            return self._answered  # booked in time; only its sending was late
        if self._writing and isinstance(error, TimeoutError):
            self._reply.gone = True  # it has taken nothing for the whole idle time: as good as gone
        if self._reader is not None:
            if self._reader.done:  # everything was said; only the connection's end is missing
                return await self._stream_ended(self._reader, clean_eof=True)
            self._abort_in_background()
            return await self._stream_ended(self._reader, clean_eof=False)
        self._abort_in_background()
        if self._reply.gone:
            return self._settle(Outcome.CLIENT_DISCONNECTED, None, None, self._usage_so_far())
        self.refusal = None
        timed_out = isinstance(error, TimeoutError)
        lost = isinstance(error, Dropped) and not self._headers_came
        answered = self._settle(
            Outcome.UNREACHABLE, None, None, NOTHING_KNOWN, retriable=not timed_out, connection_lost=lost
        )
        if timed_out:
            raise Refused(Kind.UPSTREAM_TIMEOUT, "The model server did not answer in time.")
        return answered

    def _settle(
        self,
        outcome: Outcome,
        status: int | None,
        reason: str | None,
        usage: Usage,
        *,
        retriable: bool = False,
        connection_lost: bool = False,
    ) -> Answered:
        """Book the attempt. The only place that does, and the first call is the only one that counts."""
        if self._answered is not None:
            return self._answered
        now_us = self._services.now_us()
        total_us = now_us - self._row.opened_at_us
        charge = self._charge(usage)
        answered = Answered(
            self._held, outcome, status, reason, self._ttft_us, usage, retriable, connection_lost
        )
        self._answered = answered
        row = AttemptSettled(
            self._row.attempt_id, outcome, status, reason, self._ttft_us, total_us, now_us, usage, charge
        )
        self._settled = self._services.ledger.settle(row)
        self._settled.add_done_callback(noted)
        self._services.fleet.ended(self._row.pool, self._row.replica, outcome, now_us)
        self._services.telemetry.settled(Settled(answered, charge), total_us)
        self._learn(usage)
        return answered

    async def _durable(self) -> None:
        """Wait until the settlement is on disk, so that a client never holds an unbooked answer.

        A store that is slow or failing does not keep the answer back for long: the ledger holds the
        settlement and tries again.
        """
        if not self._settled.done():
            await asyncio.wait((self._settled,), timeout=_DURABLE_WITHIN_S)

    def _charge(self, usage: Usage) -> Charge:
        day = datetime.fromtimestamp(self._row.opened_at_us / 1e6, UTC).date()
        return rates.charge(usage, self._held.routed.pool.rates, day)

    def _usage_of(self, reader: StreamReader) -> Usage:
        return self._noted(metering.usage_of_stream(reader, self._basis()))

    def _usage_so_far(self) -> Usage:
        if self._reader is not None:
            return self._usage_of(self._reader)
        return metering.nothing_reported(self._basis())

    def _usage_of_a_failure(self) -> Usage:
        try:
            return self._usage_so_far()
        except Exception:  # noqa: BLE001 - the defect may lie in the metering; the row is closed all the same
            return NOTHING_KNOWN

    def _noted(self, metered: metering.Metered) -> Usage:
        for anomaly in metered.anomalies:
            self._services.telemetry.anomalies.labels(self._row.pool, anomaly).inc()
        return metered.usage

    def _basis(self) -> metering.Basis:
        return metering.Basis(
            self._row.estimated_prompt_tokens,
            self._row.predicted_cached_tokens,
            self._services.output_ratios.of(self._row.model),
        )

    def _learn(self, usage: Usage) -> None:
        """Calibrate estimates, and remember that a replica reports its cache hits."""
        if usage.cached.certainty is Certainty.MEASURED and usage.cached.value:
            self._record.reports_cached = True
        if usage.uncached.certainty is Certainty.MEASURED and usage.prompt:
            self._services.prompt_ratios.learn(self._row.model, self._row.body_bytes, usage.prompt)
        if usage.output.certainty is Certainty.MEASURED and usage.output.value and self._text_bytes:
            self._services.output_ratios.learn(self._row.model, self._text_bytes, usage.output.value)

    def headers(self) -> Headers:
        """What the client is told beside the answer: its request id, and where the call went."""
        headers = [
            (b"x-request-id", self._row.request_id.encode()),
            (b"x-ctxgate-pool", self._row.pool.encode()),
            (b"x-ctxgate-replica", self._row.replica.encode()),
            (b"x-ctxgate-task", self._row.task.encode("latin-1", "replace")),
        ]
        planned = self._held.routed.planned
        if planned.plan.layout_edits:
            layout = f"{planned.level}; edits={planned.plan.layout_edits}"
            headers.append((b"x-ctxgate-layout", layout.encode()))
        return headers

    def _wait_at_most(self, seconds: float) -> None:
        """Move the deadline of the exchange; once the client has gone, the drain's deadline stands."""
        if self._deadline is None or self._reply.gone:
            return
        deadline = self._loop.time() + seconds
        if abs(deadline - self._until) > _DEADLINE_STEP_S:  # a timer for every chunk would cost more
            self._until = deadline
            self._deadline.reschedule(deadline)

    def _client_gone(self) -> None:
        """The client left: end the call at the engine, and stay for its usage."""
        if self._deadline is None or self._answered is not None or self._deadline.expired():
            return
        limit = self._services.config.limits.abort_drain_s if self._abortable() else 0.0
        self._deadline.reschedule(self._loop.time() + limit)
        if self._abortable() and self._aborter is None:
            self._aborter = self._loop.create_task(self._abort_until_done())

    def _abortable(self) -> bool:
        ids = 0 if self._inbound.surface is Surface.EMBEDDINGS else self._terms.dialect.prompts
        return self._held.routed.pool.abort and 0 < ids <= _MOST_IDS

    def _engine_ids(self) -> list[str]:
        """The ids vLLM gives the parts of this call."""
        if self._inbound.surface is Surface.CHAT:
            return [f"chatcmpl-{self._row.attempt_id}"]
        return [f"cmpl-{self._row.attempt_id}-{i}" for i in range(self._terms.dialect.prompts)]

    async def _abort_until_done(self) -> None:
        """Abort, and again: an engine that is still reading the prompt does not know the id yet."""
        for delay in chain(_ABORT_AGAIN_S, repeat(_ABORT_AGAIN_S[-1])):
            if not await self._abort():
                break
            await asyncio.sleep(delay)
        # This replica offers no abort: hang up, which ends the call there.
        if self._deadline is not None and self._answered is None and not self._deadline.expired():
            self._deadline.reschedule(self._loop.time())

    async def _abort(self) -> bool:
        headers = self._services.upstream_headers(self._held.routed.pool)
        return await self._services.client.abort(self._held.routed.replica.url, self._engine_ids(), headers)

    def _abort_in_background(self) -> None:
        """Make sure that nothing runs on at an engine whose answer was lost."""
        if self._abortable() and self._aborter is None:
            self._services.spawn(self._abort())
