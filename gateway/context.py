"""The context stage: what of a long conversation goes out, and when less of it will.

Before a request goes out: the compaction that its conversation has, applied; and where it would not fit the
window even so, masking in line, which is kept like any other compaction. After its answer: what it cost, and
whether a compaction in the background is worth its price.

Whatever goes wrong here, the prompt goes out as layout left it and the event is counted. A prompt that the
engine then refuses as too long comes back, shorter, before any byte went to the client.
"""

from __future__ import annotations

import logging
import secrets
import traceback
from typing import TYPE_CHECKING, Final, TypeVar

from ctxgate.compression.ask import together
from ctxgate.compression.compaction import ShapingMemory, chosen, covered, root_of
from ctxgate.compression.plan import PlanEdit
from ctxgate.compression.recent import Recent
from ctxgate.compression.validity import Invalid
from ctxgate.compression.window import KEEP, Compact, Reason, decide, observed
from ctxgate.compression.window import target as target_of
from ctxgate.gateway.archive import reference_of
from ctxgate.gateway.context_background import Compactor
from ctxgate.gateway.context_lengths import Tokenizers, Windows, count_exactly
from ctxgate.gateway.context_level import Mode
from ctxgate.gateway.context_masking import Goal, masked
from ctxgate.gateway.context_records import Records
from ctxgate.gateway.context_shown import Shown
from ctxgate.gateway.context_sizes import Estimate, Lengths, size_of_tools, total
from ctxgate.gateway.context_terms import Known, Needs, asked_output, state_before, terms_of
from ctxgate.gateway.context_turn import Shaped, Turn
from ctxgate.gateway.flow import Surface
from ctxgate.gateway.forms import FRESH_US
from ctxgate.gateway.ledger import LedgerError
from ctxgate.gateway.summarizing import summarize
from ctxgate.inference.usage import Certainty

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxgate.compression.ask import Asking
    from ctxgate.compression.compaction import Compaction
    from ctxgate.compression.window import Conversation, Decision, Terms
    from ctxgate.compression.window_errors import Overflow
    from ctxgate.gateway.context_background import Summarize
    from ctxgate.gateway.flow import Allowed, Answered
    from ctxgate.gateway.layout import Laid
    from ctxgate.gateway.services import Services

T = TypeVar("T")

log = logging.getLogger(__name__)
MIN_BYTES: Final = 8192
"""Smaller bodies pass as they are: no window is too small for them, and they cost nothing to speak of."""

REMEMBERED_CONVERSATIONS: Final = 100_000
DROPPED: Final = ("store", "hidden", "invalid", "stale", "defect")
"""Why a conversation went out uncompacted although it has a compaction: the store gave no answer in time,
repeated members hide the place, the result failed the checker, what has come since belongs to what would be
left out, an error in the stage itself."""

_TRIES: Final = 4  # to put a record into a slot that others fill at the same time
_SHORTER: Final = (7, 10)  # of the target before, for a prompt that was refused again
_UNCOUNTED: Final = (3, 2)  # of the window: a prompt that was refused before its tokens were counted


class ContextStage:
    """Shapes the context of requests. Belongs to one event loop."""

    def __init__(
        self,
        services: Services,
        written_by: Summarize = summarize,
        decided_by: Callable[[Conversation, Terms], Decision] = decide,
    ) -> None:
        self._services = services
        self._decide = decided_by
        self.lengths = Lengths()
        self.windows = Windows(services.fleet, services.config.models)
        self.records = Records()
        self.shown = Shown(services)
        self._tokenizers = Tokenizers()
        self._memory = services.layout.memory
        self.views = self._memory.views
        self._shaping = ShapingMemory(secrets.randbits(64))
        self._states: Recent[bytes, Known] = Recent(REMEMBERED_CONVERSATIONS)
        self.compactor = Compactor(self, services, written_by)
        self._remembers_since_us: int | None = None

    # ---- before a request goes out -------------------------------------------------------------------

    async def shape(
        self, allowed: Allowed, laid: Laid, mode: Mode, *, refused: tuple[Overflow, int] | None = None
    ) -> Shaped:
        """The body as it goes on. Never raises for a failure of its own.

        `refused`: what an engine said to this request's prompt, and how often it was refused.
        """
        inbound = allowed.identified.inbound
        small = len(inbound.body.raw) < MIN_BYTES and refused is None
        if mode is Mode.OFF or small or inbound.surface is not Surface.CHAT or not inbound.messages:
            return Shaped(laid.body)
        try:
            return await self._shape(allowed, laid, mode, refused)
        except Invalid as invalid:
            self._dropped("hidden" if invalid.reason == "hidden" else "invalid")
        except Exception as error:  # noqa: BLE001 - no defect in it may fail a request that works without it
            self._defect(inbound.request_id, error)
        return Shaped(laid.body)

    async def _shape(
        self, allowed: Allowed, laid: Laid, mode: Mode, refused: tuple[Overflow, int] | None
    ) -> Shaped:
        turn = self._turn(allowed, laid, mode)
        record = await self._known_record(turn)
        await self._put(turn, record)
        await turn.measure(self.lengths, self._tokenizers)
        if refused is not None:
            self._learn_refusal(turn, refused[0])
        reason = await self._too_long(turn) if refused is None else Reason.WINDOW
        if reason is not None:
            await self._mask(turn, reason, 0 if refused is None else refused[1])
        if turn.record is not None or turn.shown:
            whole = total(self.lengths.sizes(turn.facts, laid.body.items("messages")))
            size = self.lengths.of(turn.model.name).tokens(whole.plus(size_of_tools(laid.body)))
            turn.client_tokens = round(size * turn.scale(self.lengths))
        return Shaped(turn.body, _reasons(turn.record), turn)

    def _turn(self, allowed: Allowed, laid: Laid, mode: Mode) -> Turn:
        identified = allowed.identified
        key, messages = identified.key, identified.inbound.messages
        tenant = f"{key.organisation}/{key.team}"  # no name holds a slash
        facts = laid.facts or self.views.messages(tenant, messages)
        hashes = self._memory.chains.of(tenant, facts).hashes
        before = next(self._states.known(reversed(hashes)), None)
        return Turn(
            identified=identified,
            pool=allowed.pools[0],
            model=allowed.model,
            context=self._services.config.teams[key.team].context,
            mode=mode,
            tenant=tenant,
            facts=facts,
            hashes=hashes,
            root=root_of(facts, hashes),
            laid=laid.body,
            reference=lambda digest: reference_of(tenant, digest),
            known=None if before is None else self._states.get(before),
        )

    async def _put(self, turn: Turn, record: Compaction | None) -> None:
        """Apply the compaction, and what is brought back of what it leaves out. Raises `Invalid`."""
        turn.put(record, self.views, self._shaping)
        at = self.shown.may_recall(turn)
        if not at:
            return
        fresh = await self.shown.found(turn, at, self.windows.of(turn.pool, turn.model))
        try:
            snippets = await self.answered_by_store(turn.tenant, self.shown.recalled(turn, at, fresh))
        except (LedgerError, TimeoutError) as error:
            log.warning("what is brought back cannot be kept: %s", type(error).__name__)
            self._dropped("store")
            return
        if snippets:
            self.shown.put(turn, snippets)
            turn.put(record, self.views, self._shaping)

    async def _known_record(self, turn: Turn) -> Compaction | None:
        """The compaction that the conversation has, if there is one; what has arrived is seen to as well."""
        self._ask_again_each_day()
        try:
            if turn.context.tool_results:
                asked = together(self.records.read(turn.root), await self.shown.arrivals(turn))
                records, arrived = await self.answered_by_store(turn.tenant, asked)
                self.shown.arrived(turn, arrived)
            else:
                records = await self.answered_by_store(turn.tenant, self.records.read(turn.root))
        except (LedgerError, TimeoutError) as error:
            log.warning("compactions cannot be read: %s", type(error).__name__)
            self._dropped("store")
            turn.frozen = False
            records = self.records.known(turn.root)
        record = chosen(records, turn.hashes)
        if record is None or covered(record, turn.facts):
            return record
        self._dropped("stale")
        return None

    async def answered_by_store(self, tenant: str, work: Asking[T]) -> T:
        """What a computation comes to that asks the store. Raises LedgerError or TimeoutError."""
        forms, now_us = self._services.forms, self._services.now_us()
        deadline = forms.deadline()
        try:
            ask = next(work)
            while True:
                ask = work.send(await forms.answer(tenant, ask, now_us, deadline))
        except StopIteration as end:
            result: T = end.value
            return result

    def _ask_again_each_day(self) -> None:
        """Let the store know what is in use, though memory would have answered."""
        now_us = self._services.now_us()
        if self._remembers_since_us is None:
            self._remembers_since_us = now_us
        elif now_us - self._remembers_since_us > FRESH_US:
            self.records.forget()
            self.shown.forget()
            self._remembers_since_us = now_us

    def terms(self, turn: Turn, known: Known | None, *, background: bool) -> Terms:
        """The terms of a decision on a conversation."""
        head = next((at for at, each in enumerate(turn.facts) if each.role not in _LEADING), 0)
        size = total(self.lengths.sizes(turn.facts[:head], turn.laid.items("messages")[:head]))
        prefix = self.lengths.of(turn.model.name).tokens(size.plus(size_of_tools(turn.laid)))
        needs = Needs(prefix, asked_output(turn.laid), self.windows.of(turn.pool, turn.model))
        now_us = self._services.now_us()
        return terms_of(turn.context, turn.pool, needs, known, now_us=now_us, background=background)

    def _state(self, turn: Turn, terms: Terms) -> Conversation:
        length = turn.estimate.tokens - (0 if turn.made else turn.arriving)
        return state_before(turn.known, terms, turn.record, max(length, 0))

    async def _too_long(self, turn: Turn) -> Reason | None:
        """Why the prompt must be made shorter before it goes out; None where it need not."""
        terms = self.terms(turn, turn.known, background=False)
        limits, state = terms.limits, self._state(turn, terms)
        exhausted = turn.estimate.tokens < state.exhausted_until
        edge = limits.brink() if exhausted else limits.window_trigger()
        if edge is not None and turn.estimate.is_near(edge):
            exact = await count_exactly(self._services, turn.pool, turn.model, turn.body)
            if exact is not None:
                self.lengths.learn(turn.model.name, turn.said, exact)
                turn.estimate = Estimate(exact, 0)
        length = turn.estimate.tokens
        if edge is not None and length >= edge:
            return Reason.WINDOW
        if limits.tier_edge is None or exhausted or length <= limits.tier_edge:
            return None
        below = state.tokens <= limits.tier_edge and target_of(terms) < limits.tier_edge
        return Reason.TIER if below else None

    def _learn_refusal(self, turn: Turn, overflow: Overflow) -> None:
        """Take over what an engine said of the window and the prompt's length."""
        self.windows.learn(turn.pool, turn.model, overflow)
        length = overflow.prompt
        if length is not None and not overflow.at_least:
            self.lengths.learn(turn.model.name, turn.said, length)
            turn.estimate = Estimate(length, 0)
            return
        least = length or overflow.window * _UNCOUNTED[0] // _UNCOUNTED[1]
        turn.estimate = Estimate(max(turn.estimate.tokens, least), 0)

    async def _mask(self, turn: Turn, reason: Reason, refusals: int) -> None:
        """Make the prompt fit without a model, and keep what was decided for later requests."""
        for _ in range(_TRIES):
            terms = self.terms(turn, turn.known, background=False)
            wanted, most = target_of(terms), terms.limits.hard_trigger()
            if refusals:  # what was thought to fit did not
                most = wanted
            if refusals > 1:
                most = wanted = wanted * _SHORTER[0] // _SHORTER[1]
            facts = self.views.messages(turn.tenant, turn.messages)
            goal = Goal(wanted, terms.shape.tail, most, reason)
            record = await masked(turn, self.lengths, facts, goal)
            if record is None:
                return
            if await self._settled(turn, record):
                return

    async def _settled(self, turn: Turn, record: Compaction) -> bool:
        """Put a new record into effect. False where another process was first and more must be left out."""
        before = turn.record
        first: Compaction | None = record
        if turn.frozen:
            try:
                first = await self.answered_by_store(turn.tenant, self.records.claim(turn.root, record))
            except (LedgerError, TimeoutError) as error:
                log.warning("a compaction cannot be kept: %s", type(error).__name__)
                self._dropped("store")
                turn.frozen, first = False, record
        if first is None:
            turn.frozen, first = False, record
        if first != record:  # another process has put one there
            other = chosen(self.records.known(turn.root), turn.hashes)
            if other is not None and other != before and covered(other, turn.facts):
                turn.put(other, self.views, self._shaping)
                await turn.measure(self.lengths, self._tokenizers)
            return other != before and await self._too_long(turn) is None
        turn.put(record, self.views, self._shaping)
        await turn.measure(self.lengths, self._tokenizers)
        turn.made = True
        self.compactor.left_out(turn, record, before)
        return True

    # ---- after its answer ----------------------------------------------------------------------------

    def answered(self, answered: Answered) -> None:
        """Learn from an answer that has been sent, and begin a compaction where it pays. Never raises."""
        turn = answered.held.routed.planned.turn
        usage = answered.usage
        if turn is None or usage.prompt is None or usage.uncached.certainty is not Certainty.MEASURED:
            return
        try:
            self._answered(turn, answered, usage.prompt)
        except Exception as error:  # noqa: BLE001 - nor may it fail a request that was answered
            self._defect(turn.identified.inbound.request_id, error)

    def _answered(self, turn: Turn, answered: Answered, prompt: int) -> None:
        usage, before = answered.usage, turn.known
        same = before is not None and before.record == turn.record
        if same and before is not None:
            self.lengths.learn(turn.model.name, turn.said.minus(before.said), prompt - before.tokens)
        else:
            self.lengths.learn(turn.model.name, turn.said, prompt)
        terms = self.terms(turn, before, background=True)
        cached = usage.cached.value if usage.cached.certainty is Certainty.MEASURED else None
        state = observed(self._state(turn, terms), terms, prompt, cached)
        known = Known(
            length=len(turn.facts),
            tokens=prompt,
            said=turn.said,
            record=turn.record,
            state=state,
            largest=max(usage.output.value or 0, 0 if before is None else before.largest),
            batch=max(0 if before is None else before.batch, turn.arriving if before is not None else 0),
        )
        self.remember(turn, known)
        terms = self.terms(turn, known, background=True)
        decision = self._decision(turn, state, terms)
        if isinstance(decision, Compact):
            self.compactor.begin(answered.held, turn, known, terms, decision)

    def remember(self, turn: Turn, known: Known) -> None:
        """What is known of the conversation up to this request's last message."""
        self._states.put(turn.hashes[-1], known)

    def _decision(self, turn: Turn, state: Conversation, terms: Terms) -> Decision:
        decision = self._decide(state, terms)
        if not isinstance(decision, Compact) or decision.reason in (Reason.WINDOW, Reason.TIER):
            return decision
        pays = decision.reason is Reason.LATENCY or self._services.savings.allows(turn)
        return decision if turn.mode is Mode.AUTO and pays else KEEP

    async def close(self) -> None:
        """End what runs in the background; what it has paid for is booked."""
        await self.compactor.close()

    def _dropped(self, reason: str) -> None:
        self._services.telemetry.context_dropped.labels(reason).inc()

    def _defect(self, request_id: str, error: Exception) -> None:
        # Its text is not logged: it may quote a prompt.
        place = traceback.extract_tb(error.__traceback__)[-1]
        log.error(
            "the context of request %s: %s in %s, line %s",
            request_id,
            type(error).__name__,
            place.name,
            place.lineno,
        )
        self._dropped("defect")


_LEADING: Final = frozenset({"system", "developer"})


def _reasons(record: Compaction | None) -> tuple[PlanEdit, ...]:
    """What a record changes, in words."""
    if record is None:
        return ()
    parts = [
        f"{count} {what}"
        for count, what in (
            (len(record.gone()), "messages left out"),
            (len(record.masked), "tool results masked"),
            (len(record.split), "messages cut"),
        )
        if count
    ]
    return (PlanEdit("messages", f"compaction ({record.by}, {record.reason}): {', '.join(parts)}"),)
