"""Books what compaction saves: what each answer would have cost otherwise, and where it does not pay."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from ctxgate.compression.counterfactual import Terms, Turn
from ctxgate.compression.diff_parts import HEAD_ROLES
from ctxgate.compression.window import Reason
from ctxgate.gateway.context_sizes import total
from ctxgate.gateway.counterfactuals import Beside, Counterfactuals
from ctxgate.gateway.instants import day_of
from ctxgate.gateway.ledger import LOOK_UP
from ctxgate.inference.lengths import measure
from ctxgate.inference.rates import format_usd, rates_at
from ctxgate.inference.usage import Certainty

if TYPE_CHECKING:
    from ctxgate.compression.compaction import Compaction
    from ctxgate.gateway.context_turn import Turn as Request
    from ctxgate.gateway.counterfactuals import Kind
    from ctxgate.gateway.flow import Held
    from ctxgate.gateway.services import Services
    from ctxgate.inference.rates import Charge, Rates
    from ctxgate.inference.usage import Usage

log = logging.getLogger(__name__)
UNKNOWN: Final = Beside(None, None)
_FORCED: Final = frozenset({Reason.WINDOW.value, Reason.TIER.value})


class Savings:
    """Belongs to one event loop. Nothing here fails a request or leaves an attempt unbooked."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._counterfactuals = Counterfactuals(self._switched_off)

    def allows(self, request: Request) -> bool:
        """Whether conversations like this one may be compacted for money."""
        return self._counterfactuals.allows(_kind(request))

    def settled(self, held: Held, usage: Usage, charge: Charge, now_us: int) -> Beside:
        """What an attempt would have cost otherwise. Called once for each, with what it cost."""
        planned = held.routed.planned
        try:
            if planned.origin is not None and held.attempt.purpose == LOOK_UP:
                return self._went_on(planned.origin, charge)
            if planned.origin is not None:
                if charge.total is not None:
                    self._counterfactuals.called(planned.origin.hashes[-1], charge.total)
            elif planned.turn is not None and _is_measured(usage):
                return self._answered(held, planned.turn, usage, charge, now_us)
        except Exception as error:  # noqa: BLE001 - what it would have cost is worth less than what it did
            log.error("what an attempt saved is unknown: %s", type(error).__name__)
        return UNKNOWN

    def _went_on(self, request: Request, charge: Charge) -> Beside:
        """An answer went on after a look-up. The client's own prompt holds all that was looked up.

        Had it been sent, the answer would have ended where this attempt's does, so its words count in place
        of those before, which made the call; and nothing would have been read once more.
        """
        before = request.answer_nano
        if charge.total is None or charge.output is None or before is None:
            return UNKNOWN
        request.answer_nano, more = charge.output, charge.output - before
        self._counterfactuals.looked_up(request.hashes[-1], charge.total - more)
        return Beside(more, more)

    def _answered(self, held: Held, request: Request, usage: Usage, charge: Charge, now_us: int) -> Beside:
        request.answer_nano = charge.output
        known, pool = request.known, held.routed.pool
        day = day_of(held.attempt.opened_at_us)

        def rates(tokens: int) -> Rates:
            return rates_at(pool.rates, day, tokens)

        terms = self._services.context.terms(request, known, background=True)
        client = request.client_tokens
        took_effect = known is not None and request.record is not None and request.record != known.record
        turn = Turn(
            prompt=usage.prompt or 0,
            cached=usage.cached.reported,
            output=usage.output.value or 0,
            removed=0 if client is None else max(0, client - request.estimate.tokens),
            shared=self._shared(request) if took_effect else None,
            forced=request.record is not None and request.record.reason in _FORCED,
        )
        before = None if known is None else request.hashes[known.length - 1]
        terms_of = Terms(rates, terms.shape, terms.limits.window)
        return self._counterfactuals.answered(
            before, request.hashes[-1], _kind(request), turn, terms_of, charge.total, now_us
        )

    def _shared(self, request: Request) -> int:
        """Tokens of the prompt before the first message that a new record changes."""
        record, old = request.record, None if request.known is None else request.known.record
        first = _first_change(record, old)
        gone = set() if record is None else record.gone()
        lengths = self._services.context.lengths
        sizes = lengths.sizes(request.facts[:first], request.laid.items("messages")[:first])
        kept = (
            measure(request.texts[at]) if at in request.texts else size
            for at, size in enumerate(sizes)
            if at not in gone
        )
        return lengths.of(request.model.name).tokens(total(kept).plus(request.tools))

    def _switched_off(self, kind: Kind, nano: int) -> None:
        team = kind[0].rpartition("/")[2]
        log.warning(
            "compaction for money is off for one kind of conversation of team %s: its latest ones have cost"
            " %s dollars more than they saved",
            team,
            format_usd(-nano),
        )
        self._services.telemetry.compaction_off.labels(team).inc()


def _kind(request: Request) -> Kind:
    """The team, and what its conversations of this kind begin with: the leading system messages."""
    head = next((at for at, each in enumerate(request.facts) if each.role not in HEAD_ROLES), 0)
    return request.tenant, request.hashes[head - 1] if head else b""


def _is_measured(usage: Usage) -> bool:
    """Whether the engine read a prompt and says how long it was; one that it refused is no request."""
    return bool(usage.prompt) and usage.uncached.certainty is Certainty.MEASURED


def _first_change(record: Compaction | None, old: Compaction | None) -> int:
    """The first message that a record leaves out, shortens or puts its summary before, unlike the old one."""
    first = min(_changed(record) - _changed(old), default=0)
    if record is not None and record.dropped and (old is None or old.carrier != record.carrier):
        first = min(first, record.dropped[0][0])
    return first


def _changed(record: Compaction | None) -> set[int]:
    """The messages that a record leaves out or shortens."""
    if record is None:
        return set()
    return {*record.gone(), *record.masked, *(at for at, _ in record.split)}
