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
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from ctxgate.compression.ask import together
from ctxgate.compression.compaction import ShapingMemory, root_of
from ctxgate.compression.diff_parts import HEAD_ROLES
from ctxgate.compression.recent import Recent
from ctxgate.compression.tool_output import LEAST_LIMIT
from ctxgate.compression.validity import Invalid
from ctxgate.compression.window import KEEP, Compact, Reason, decide, observed, reread
from ctxgate.compression.window import target as target_of
from ctxgate.gateway.archive import reference_of
from ctxgate.gateway.context_background import Compactor
from ctxgate.gateway.context_inline import Inline, believes
from ctxgate.gateway.context_lengths import ExactCounts, Tokenizers, Windows
from ctxgate.gateway.context_level import Mode
from ctxgate.gateway.context_long import is_covered, locate
from ctxgate.gateway.context_records import Records, weight
from ctxgate.gateway.context_recurring import places, shortened
from ctxgate.gateway.context_shown import Shown
from ctxgate.gateway.context_sizes import Estimate, Lengths, total
from ctxgate.gateway.context_terms import Known, Needs, asked_output, state_before, terms_of
from ctxgate.gateway.context_tool import RecallTool
from ctxgate.gateway.context_turn import Shaped, Turn
from ctxgate.gateway.first_look import first_look, first_sizes
from ctxgate.gateway.flow import Surface
from ctxgate.gateway.forms import FRESH_US
from ctxgate.gateway.ledger import LedgerError
from ctxgate.gateway.summarizing import summarize
from ctxgate.inference.usage import Certainty

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ctxgate.compression.ask import Asking
    from ctxgate.compression.compaction import Compaction
    from ctxgate.compression.window import Conversation, Decision, Terms
    from ctxgate.compression.window_errors import Refusal
    from ctxgate.gateway.context_background import Summarize
    from ctxgate.gateway.flow import Allowed, Answered, Held
    from ctxgate.gateway.layout import Laid
    from ctxgate.gateway.services import Services
    from ctxgate.inference.usage import Usage

T = TypeVar("T")

log = logging.getLogger(__name__)
MIN_BYTES: Final = 8192
"""Smaller bodies pass as they are: no window is too small for them, and they cost nothing to speak of."""

REMEMBERED_BYTES: Final = 2**27
"""Of what is known of conversations, with the records that they go out under."""

DROPPED: Final = ("store", "hidden", "invalid", "stale", "defect", "unused", "busy")
"""Why a conversation went out uncompacted although it has a compaction: the store gave no answer in time,
repeated members hide the place, the result failed the checker, what has come since belongs to what would be
left out, an error in the stage itself. And why none was made in the background: the conversation could not
use those before it, too many are under way at its replica."""


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
        self._counts = ExactCounts(services)
        self.records = Records()
        self.shown = Shown(services)
        self.tool = RecallTool(services)
        self.tokenizers = Tokenizers()
        self._memory = services.layout.memory
        self.views = self._memory.views
        self.shaping = ShapingMemory(secrets.randbits(64))
        self._states: Recent[bytes, Known] = Recent(REMEMBERED_BYTES, lambda known: weight(known.record))
        self.compactor = Compactor(self, services, written_by)
        self._inline = Inline(self, services)
        self._remembers_since_us: int | None = None

    # ---- before a request goes out -------------------------------------------------------------------

    async def shape(
        self, allowed: Allowed, laid: Laid, mode: Mode, *, refused: Refusal | None = None
    ) -> Shaped:
        """The body as it goes on. Never raises for a failure of its own.

        `refused`: what an engine said to this request's prompt.
        """
        inbound = allowed.identified.inbound
        if inbound.surface is not Surface.CHAT or not inbound.messages:
            return Shaped(laid.body)
        team = self._services.config.teams.get(allowed.identified.key.team)
        if team is None:  # as with the layout: who has no settings gets nothing done
            return Shaped(laid.body)
        results = team.context.tool_results
        raw = inbound.body.raw
        small = len(raw) < (LEAST_LIMIT if results and b'"tool"' in raw else MIN_BYTES) and refused is None
        if (small and not team.context.recall_tool) or (mode is Mode.OFF and not results):
            return Shaped(laid.body)
        try:
            if mode is not Mode.OFF:
                return await self._shape(allowed, laid, mode, refused)
            await self._came_whole(self._turn(allowed, laid, mode))
        except Invalid as invalid:
            self._dropped("hidden" if invalid.reason == "hidden" else "invalid")
        except Exception as error:  # noqa: BLE001 - no defect in it may fail a request that works without it
            self._defect(inbound.request_id, error)
        return Shaped(laid.body)

    async def _shape(self, allowed: Allowed, laid: Laid, mode: Mode, refused: Refusal | None) -> Shaped:
        if not laid.facts:
            await first_look(self.views, _tenant(allowed), allowed.identified.inbound.messages)
        turn = self._turn(allowed, laid, mode)
        await self.tool.offer(turn)
        await first_sizes(self.lengths, turn.facts, laid.body.items("messages"))
        record = await self._known_record(turn)
        if record is not None:
            await locate(turn)
        await self._put(turn, record)
        await turn.measure(self.lengths, self.tokenizers)
        if refused is None:
            reason = await self.too_long(turn)
        else:
            reason = Reason.WINDOW if believes(turn, refused) else None
        if reason is not None:
            await self._inline.mask(turn, reason)
        if turn.record is not None or turn.shown:
            whole = total(self.lengths.sizes(turn.facts, laid.body.items("messages")))
            size = self.lengths.of(turn.model.name).tokens(whole.plus(turn.tools))
            turn.client_tokens = round(size * turn.scale(self.lengths))
        return Shaped(turn.body, turn.reasons(), turn)

    async def _came_whole(self, turn: Turn) -> None:
        """Note that a request's tool results go out as they came, so that no later request changes them."""
        try:
            await self.answered_by_store(turn.tenant, self.shown.came_whole(turn))
        except (LedgerError, TimeoutError):
            self._dropped("store")
            self.shown.without_store(turn, whole=True)

    def _turn(self, allowed: Allowed, laid: Laid, mode: Mode) -> Turn:
        identified = allowed.identified
        key, messages = identified.key, identified.inbound.messages
        tenant = _tenant(allowed)
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
            harder=allowed.harder,
        )

    async def _put(self, turn: Turn, record: Compaction | None) -> None:
        """Apply the compaction, and what is brought back of what it leaves out. Raises `Invalid`."""
        turn.put(record, self.views, self.shaping)
        at = self.shown.may_recall(turn)
        if not at:
            return
        snippets = await self.shown.brought_back(turn, at, self.windows.of(turn.pool, turn.model))
        if snippets:
            self.shown.put(turn, snippets)
            turn.put(record, self.views, self.shaping)

    async def _known_record(self, turn: Turn) -> Compaction | None:
        """The compaction that the conversation has, if there is one; what has arrived is seen to as well."""
        self._ask_again_each_day()
        read = self.records.read(turn.root, turn.hashes)
        try:
            if turn.context.tool_results:
                asked = together(read, await self.shown.arrivals(turn))
                record, arrived = await self.answered_by_store(turn.tenant, asked)
                self.shown.arrived(turn, arrived)
            else:
                record = await self.answered_by_store(turn.tenant, read)
        except (LedgerError, TimeoutError) as error:
            log.warning("compactions cannot be read: %s", type(error).__name__)
            self._dropped("store")
            turn.frozen = False
            if turn.context.tool_results:
                self.shown.without_store(turn)
            record = self.records.known(turn.root, turn.hashes)
        if record is None or await is_covered(turn, record):
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
            self._forget()
            self._remembers_since_us = now_us

    def _forget(self) -> None:
        self.records.forget()
        self.shown.forget()
        self.tool.memory.forget()

    def terms(self, turn: Turn, known: Known | None, *, background: bool) -> Terms:
        """The terms of a decision on a conversation."""
        head = next((at for at, each in enumerate(turn.facts) if each.role not in HEAD_ROLES), 0)
        size = total(self.lengths.sizes(turn.facts[:head], turn.laid.items("messages")[:head]))
        prefix = self.lengths.of(turn.model.name).tokens(size.plus(turn.tools))
        window = self.windows.of(turn.pool, turn.model)
        if turn.refusal is not None:
            named = turn.refusal.overflow.window
            window = named if window is None else min(window, named)
        needs = Needs(prefix, asked_output(turn.laid), window)
        now_us = self._services.now_us()
        terms = terms_of(
            turn.context, turn.pool, needs, known, now_us=now_us, background=background, harder=turn.harder
        )
        return replace(terms, latency=self._services.speeds.latency(turn))

    def _state(self, turn: Turn, terms: Terms) -> Conversation:
        length = turn.estimate.tokens - (0 if turn.made else turn.arriving)
        return state_before(turn.known, terms, turn.record, max(length, 0))

    async def too_long(self, turn: Turn) -> Reason | None:
        """Why the prompt must be made shorter before it goes out; None where it need not."""
        terms = self.terms(turn, turn.known, background=False)
        limits, state = terms.limits, self._state(turn, terms)
        exhausted = turn.estimate.tokens < state.exhausted_until
        edge = limits.brink() if exhausted else limits.window_trigger()
        if edge is not None and turn.estimate.is_near(edge):
            exact = await self._counts.count(turn.pool, turn.model, turn.body)
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

    async def taken(self, held: Held) -> None:
        """An engine has taken the prompt, and the client has had no byte yet. Never raises."""
        turn = held.routed.planned.turn
        if turn is None or (turn.refusal is None and not turn.pending):
            return
        try:
            await self._inline.taken(turn)
        except Exception as error:  # noqa: BLE001 - the answer is there
            self._defect(turn.identified.inbound.request_id, error)

    # ---- after its answer ----------------------------------------------------------------------------

    def answered(self, answered: Answered, further: Sequence[Usage] = ()) -> None:
        """Learn from an answer that has been sent, and begin a compaction where it pays. Never raises.

        `further`: what other attempts used that went on with it.
        """
        turn = answered.held.routed.planned.turn
        usage = answered.usage
        if turn is None or usage.prompt is None or usage.uncached.certainty is not Certainty.MEASURED:
            return
        try:
            self._answered(turn, answered, usage.prompt, further)
        except Exception as error:  # noqa: BLE001 - nor may it fail a request that was answered
            self._defect(turn.identified.inbound.request_id, error)

    def _answered(self, turn: Turn, answered: Answered, prompt: int, further: Sequence[Usage]) -> None:
        usage, before = answered.usage, turn.known
        same = before is not None and before.record == turn.record and before.tools == turn.tools
        if before is not None and same and not before.estimated:
            self.lengths.learn(turn.model.name, turn.said.minus(before.said), prompt - before.tokens)
        else:
            self.lengths.learn(turn.model.name, turn.said, prompt)
        place = answered.held.attempt.pool, answered.held.attempt.replica
        if place[0] == turn.pool.name:
            self.windows.took(turn.pool, place[1], turn.model, prompt + (usage.output.value or 0))
        terms = self.terms(turn, before, background=True)
        state = observed(self._state(turn, terms), terms, prompt, usage.cached.reported)
        for more in further:  # each read the history once more
            if more.prompt is not None and more.uncached.certainty is Certainty.MEASURED:
                state = reread(state, terms, more.prompt, more.cached.reported)
        known = Known(
            length=len(turn.facts),
            tokens=prompt,
            said=turn.said,
            record=turn.record,
            state=state,
            largest=max(
                *(each.output.value or 0 for each in (usage, *further)),
                0 if before is None else before.largest,
            ),
            batch=max(0 if before is None else before.batch, turn.arriving if before is not None else 0),
            tools=turn.tools,
        )
        self.remember(turn, known)
        terms = self.terms(turn, known, background=True)
        decision = self._decision(turn, state, terms)
        if isinstance(decision, Compact):
            self.compactor.begin(answered.held, turn, known, terms, decision)

    def remember(self, turn: Turn, known: Known) -> None:
        """What is known of the conversation up to this request's last message, or to where it recurs."""
        self._states.put(turn.hashes[-1], known)
        for length in places(turn)[1:]:
            measured = self._states.get(turn.hashes[length - 1])
            if measured is None or measured.estimated:
                self._states.put(turn.hashes[length - 1], shortened(known, turn, length, self.lengths))

    def _decision(self, turn: Turn, state: Conversation, terms: Terms) -> Decision:
        decision = self._decide(state, terms)
        if not isinstance(decision, Compact) or decision.reason in (Reason.WINDOW, Reason.TIER):
            return decision
        pays = decision.reason is Reason.LATENCY or self._services.savings.allows(turn)
        return decision if turn.mode is Mode.AUTO and pays else KEEP

    def wiped(self, tenant: str, forms: Collection[bytes]) -> None:
        """Forget texts that are gone from the store of forms, by their keys."""
        if forms:
            self._services.forms.wiped(tenant, forms, self._services.now_us())
            self._forget()

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


def _tenant(allowed: Allowed) -> str:
    key = allowed.identified.key
    return f"{key.organisation}/{key.team}"  # no name holds a slash
