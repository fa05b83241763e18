"""What an attempt came to, booked exactly once: ledger, metrics, health, what estimates learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxgate.gateway import metering
from ctxgate.gateway.flow import Answered, Settled
from ctxgate.gateway.ledger import AttemptSettled, Outcome
from ctxgate.gateway.signs import sign_of
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, Certainty

if TYPE_CHECKING:
    import asyncio

    from ctxgate.compression.window_errors import Overflow
    from ctxgate.gateway.fleet import Taken
    from ctxgate.gateway.flow import Held
    from ctxgate.gateway.miss import Miss
    from ctxgate.gateway.services import Services
    from ctxgate.inference.chat_stream import StreamReader
    from ctxgate.inference.rates import Charge
    from ctxgate.inference.usage import Usage


class Booking:
    """The ledger's side of one attempt: opened at once, settled by the first `settle` and no other.

    Durations are measured by a clock that never steps back, as the time of day may.
    """

    def __init__(self, services: Services, held: Held) -> None:
        self._services = services
        self._held = held
        self._row = held.attempt
        self._record = services.fleet.record(held.attempt.pool, held.attempt.replica)
        self._began_us = services.steady_us()
        self._ttft_us: int | None = None
        self._opened: asyncio.Future[None] | None = None
        self._settled: asyncio.Future[bool] | None = None
        self.answered: Answered | None = None
        self.taken: Taken | None = None  # the attempt's load at its replica, while it counts
        self.text_bytes = 0
        self.engine_error: bytes | None = None  # reported inside an answer of status 200
        self.metrics: bytes | None = None  # the engine's own of this call, raw JSON
        self._load = self._record.work(), self._record.in_flight  # when the replica was chosen
        self._miss: Miss | None = None
        self._priced: tuple[Usage, Charge] | None = None

    def open(self) -> None:
        """Queue the opening row, and count the prompt as on its way."""
        self._opened = self._services.ledger.open(self._row)
        self._services.misses.dispatched(self._held, self._row.opened_at_us)

    async def opened(self) -> None:
        """Wait until the opening is durable, so that no client holds an answer of an unknown call.

        A store that fails now does not throw an answer away that is being made: the ledger keeps what
        it could not write, and new requests are refused until it can.
        """
        await self._services.patience.wait(self._opened)

    async def durable(self) -> None:
        """Wait until the settlement is, so that a client never holds an unbooked answer; as above."""
        await self._services.patience.wait(self._settled)

    def first_text(self) -> None:
        """Note the time of the first text; only the first call counts."""
        if self._ttft_us is None:
            self._ttft_us = self._elapsed_us()
            if self.taken is not None:
                self.taken.first_token()

    def _elapsed_us(self) -> int:
        return self._services.steady_us() - self._began_us

    def settle(
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
        """Book the attempt. The only place that does, and the first call is the only one that counts."""
        if self.answered is not None:
            return self.answered
        total_us, now_us = self._elapsed_us(), self._services.now_us()
        charge = self.charge(usage)
        answered = Answered(
            self._held, outcome, status, reason, self._ttft_us, usage, retriable, connection_lost, overflow
        )
        self.answered = answered
        findings = self._record.findings.get(self._held.routed.planned.allowed.model.engine_name)
        there = self._services.fleet.known(self._row.pool, self._row.replica) is self._record
        miss = self._services.misses.settled(self._held, usage, now_us, findings, there=there)
        self._miss = miss
        self._services.kv.settled(self._held, usage, reason)
        beside = self._services.savings.settled(self._held, usage, charge, now_us)
        row = AttemptSettled(
            self._row.attempt_id,
            outcome,
            status,
            reason,
            self._ttft_us,
            total_us,
            now_us,
            usage,
            charge,
            miss,
            beside.plain,
            beside.fixed,
        )
        self._settled = self._services.ledger.settle(row)
        if there:  # else it is gone, or its name is another server's by now, which has no part in this
            self._judge(outcome, status, connected=usage != NOTHING_USED)
        settled = Settled(answered, charge, miss)
        self._services.telemetry.settled(settled, total_us)
        self._services.routing.settled(settled, total_us)
        self._services.speeds.learned(answered, total_us, self.metrics, *self._load)
        self._learn(usage)
        return answered

    def _judge(self, outcome: Outcome, status: int | None, *, connected: bool) -> None:
        """What the end says of its replica. Only where no connection was made can nothing have been used."""
        sign = sign_of(outcome, status, self.engine_error, connected=connected)
        root = self._held.routed.planned.allowed.identified.root
        self._services.fleet.ended(self._row.pool, self._row.replica, sign, root)

    @property
    def miss(self) -> Miss | None:
        """Why the attempt misses the cache: as foreseen, and as it was once that is known."""
        return self._miss if self.answered is not None else self._services.misses.foreseen(self._held)

    def charge(self, usage: Usage) -> Charge:
        """The price of a usage at the rates of the day the attempt was opened."""
        if self._priced is None or self._priced[0] != usage:  # a stream's usage is priced for its client, too
            self._priced = usage, metering.charge_of(self._held, usage)
        return self._priced[1]

    def basis(self) -> metering.Basis:
        """What an estimate of this call stands on."""
        return metering.Basis(
            self._row.estimated_prompt_tokens,
            self._row.predicted_cached_tokens,
            self._services.output_ratios.of(self._row.model),
        )

    def usage_of(self, reader: StreamReader) -> Usage:
        """What a stream used, so far or in all."""
        return self.noted(metering.usage_of_stream(reader, self.basis()))

    def usage_so_far(self, reader: StreamReader | None) -> Usage:
        """The best evidence of a call that was cut off; never raises."""
        try:
            return self.usage_of(reader) if reader is not None else metering.nothing_reported(self.basis())
        except Exception:  # noqa: BLE001 - the defect may lie in the metering; the row is closed all the same
            return NOTHING_KNOWN

    def noted(self, metered: metering.Metered) -> Usage:
        """The usage, its oddities counted."""
        for anomaly in metered.anomalies:
            self._services.telemetry.anomalies.labels(self._row.pool, anomaly).inc()
        return metered.usage

    def _learn(self, usage: Usage) -> None:
        """Calibrate estimates, and remember that a replica reports its cache hits."""
        if usage.cached.reported:
            self._record.reports_cached = True
        if usage.uncached.certainty is Certainty.MEASURED and usage.prompt:
            self._services.prompt_ratios.learn(self._row.model, self._row.body_bytes, usage.prompt)
        if usage.output.certainty is Certainty.MEASURED and usage.output.value and self.text_bytes:
            self._services.output_ratios.learn(self._row.model, self.text_bytes, usage.output.value)
