"""Where each attempt goes: what is asked, a snapshot of all replicas that may serve it, and the choice.

    Planned ──> Demand       tokens of the prompt and of the answer, what is left of the latency budget
            ──> snapshot     every replica of the model's pools: health, load, expected hit
            ──> PoolTerms    prices of the day, predicted speed
            ──> routing.choose ──> Routed

Beside that it keeps what each conversation may still spend on leaving its warm replica, and the latest
decisions with all their candidates.
"""

from __future__ import annotations

import logging
from itertools import count
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ctxgate.gateway.cache_salt import strictest
from ctxgate.gateway.decisions import Decisions
from ctxgate.gateway.flow import Routed, Surface
from ctxgate.gateway.instants import day_of
from ctxgate.inference.estimate import estimate_prompt_tokens
from ctxgate.inference.rates import TOKENS_PER_RATE, rates_at
from ctxgate.routing.candidates import TRIED, Candidate, RouteDecision, predict
from ctxgate.routing.choose import choose, rendezvous
from ctxgate.routing.conversations import Conversations
from ctxgate.routing.snapshot import Demand, PoolTerms
from ctxgate.routing.tiers import ServiceTier, tier_used

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ctxgate.gateway.config import Pool, Replica
    from ctxgate.gateway.edge import Headers
    from ctxgate.gateway.fleet import ReplicaRecord, Taken
    from ctxgate.gateway.flow import Allowed, Held, Identified, Planned, Settled
    from ctxgate.gateway.services import Services
    from ctxgate.routing.prefix_index import Place
    from ctxgate.routing.snapshot import LatencyBudget, ReplicaState, Speed

log = logging.getLogger(__name__)
ONLY: Final = "only"  # the reason where there is nothing to choose from
SHORT: Final = "window"  # why a replica may not be chosen whose window is too short for the request
_TIERS: Final = frozenset(tier.value for tier in ServiceTier)


class RoutingStage:
    """Chooses replicas. Belongs to one event loop.

    `speed_of` tells how fast a pool's replicas are, None while that is unknown; `output_tokens` the length
    to expect of a request's answer, in tokens.
    """

    def __init__(self, services: Services) -> None:
        self.speed_of: Callable[[Pool], Speed | None] = services.speeds.of
        self.output_tokens: Callable[[Identified], int] = services.speeds.output_tokens
        self._services = services
        self._turns = count()
        self.conversations = Conversations()
        self.decisions = Decisions()

    # ---- what is known -------------------------------------------------------------------------------

    def prompt_tokens(self, planned: Planned) -> int:
        """The outgoing prompt's length in tokens, estimated."""
        if planned.turn is not None:
            return planned.turn.estimate.tokens
        model = planned.allowed.identified.inbound.model
        ratio = self._services.prompt_ratios.of(model)
        return estimate_prompt_tokens(planned.plan.size, ratio).value or 0

    def terms(self, pools: Sequence[Pool], prompt_tokens: int) -> dict[str, PoolTerms]:
        """The pools as the router weighs them, for a prompt of so many tokens on this day (UTC)."""
        day = day_of(self._services.now_us())
        return {
            pool.name: PoolTerms(
                pool.name,
                order,
                pool.profile,
                rates_at(pool.rates, day, prompt_tokens),
                self.speed_of(pool),
            )
            for order, pool in enumerate(pools)
        }

    # ---- the choice ----------------------------------------------------------------------------------

    def route(self, planned: Planned, tried: Collection[Place] = (), spent_us: int = 0) -> Routed | None:
        """A replica that was not tried, or None when there is none left.

        `spent_us`: microseconds since the request's arrival.
        """
        allowed = planned.allowed
        budget = allowed.identified.budget.left(spent_us) if spent_us else allowed.identified.budget
        pools = self._pools(allowed)
        if len(pools) == 1 and len(pools[0].replicas) == 1:
            place = (pools[0].name, pools[0].replicas[0].name)
            record = self._services.fleet.known(*place)
            if place in tried or record is None or record.draining:
                return None
            return self._only(planned, pools[0], record, budget)
        prompt, fleet = self.prompt_tokens(planned), self._services.fleet
        present = fleet.present(pools)
        hits = self._services.misses.hits(planned.seen, [place for place, _ in present])
        told = self._services.kv.hits(planned.seen, pools)
        if told:
            hits |= told
        terms, demand = self.terms(pools, prompt), self._demand(planned, prompt, budget)
        snapshot = fleet.snapshot(pools, hits, told, self.conversations.live_tokens(fleet.clock()))
        out: list[Candidate] = []
        needed = prompt + demand.output_tokens
        short = _short(present, allowed.model.engine_name, needed) if len(pools) > 1 else ()
        if tried or short:
            snapshot, out = _divided(snapshot, tried, short)
        decision = self._decided(demand, snapshot, terms, out, allowed.model.routing)
        if decision is None:
            return None
        pool = next(pool for pool in pools if pool.name == decision.pool)
        replica = next(replica for replica in pool.replicas if replica.name == decision.replica)
        available = max(hits.values(), default=None)
        place = (pool.name, replica.name)
        there = self._services.misses.expect(planned.seen, place)
        routed = Routed(planned, decision, pool, replica, prompt, there, available, budget, told.get(place))
        self._note(routed, terms)
        return routed

    def draining(self, allowed: Allowed) -> bool:
        """Whether all replicas that may serve a request take nothing new, so that none can be chosen."""
        present = self._services.fleet.present(self._pools(allowed))
        return bool(present) and all(record.draining for _, record in present)

    def _pools(self, allowed: Allowed) -> tuple[Pool, ...]:
        """The request's pools; where a reload has taken all their replicas since, the model's present ones.

        The prompt was salted for the former ones: those that part tenants in another way are not taken.
        """
        pools, fleet, config = allowed.pools, self._services.fleet, self._services.config
        model = config.models.get(allowed.identified.inbound.model)
        if model is None or any(fleet.known(pool.name, one.name) for pool in pools for one in pool.replicas):
            return pools
        present = tuple(config.pools[name] for name in model.pools)
        parts, parted = (strictest(pool.cache_isolation for pool in each) for each in (present, pools))
        return present if parts == parted else pools

    def fixed(self, planned: Planned, pool: Pool, replica: Replica, policy: str) -> Routed:
        """A call of the gateway's own, whose place is given."""
        place = (pool.name, replica.name)
        expected = self._services.misses.expect(planned.seen, place)
        routed = Routed(
            planned,
            RouteDecision(pool.name, replica.name, policy, ()),
            pool,
            replica,
            self.prompt_tokens(planned),
            expected,
            told_tokens=self._services.kv.hits(planned.seen, (pool,)).get(place),
        )
        return replace(routed, available_tokens=routed.hit_tokens)

    def _only(self, planned: Planned, pool: Pool, record: ReplicaRecord, budget: LatencyBudget) -> Routed:
        """The one replica there is: nothing is weighed. Its time is predicted where its speed is known."""
        (replica,) = pool.replicas
        place, policy = (pool.name, replica.name), planned.allowed.model.routing
        expected = self._services.misses.expect(planned.seen, place)
        told = self._services.kv.hits(planned.seen, (pool,)).get(place)
        prompt = self.prompt_tokens(planned)
        hit = told if told is not None or expected is None else expected.tokens
        fits: bool | None = None
        candidates: tuple[Candidate, ...] = ()
        speed = self.speed_of(pool)
        if speed is not None:
            if budget.bounds or (speed.slots is not None and record.in_flight >= speed.slots):
                hits = {} if hit is None else {place: hit}
                snapshot = self._services.fleet.snapshot((pool,), hits)
                (one,) = predict(self._demand(planned, prompt, budget), snapshot, self.terms((pool,), prompt))
                fits, candidates = one.fits, (one.candidate(0.0),)
            else:  # nothing but the time to the first token is asked for
                found = min(hit or 0, max(prompt - 1, 0))
                ttft_s = speed.ttft_s(prompt - found, prompt, record.work())
                candidates = (Candidate(pool.name, replica.name, 0.0, None, found, ttft_s),)
        decision = RouteDecision(pool.name, replica.name, policy, candidates, fits, ONLY)
        routed = Routed(planned, decision, pool, replica, prompt, expected, hit, budget, told)
        self.decisions.keep(routed)
        self._services.telemetry.routed(pool.name, ONLY)
        return routed

    def _demand(self, planned: Planned, prompt: int, budget: LatencyBudget) -> Demand:
        identified = planned.allowed.identified
        standing = self.conversations.of(_conversation(identified))
        return Demand(
            identified.root,
            identified.inbound.request_id,
            prompt,
            self.output_tokens(identified),
            budget,
            0 if standing is None else standing.credit_nano,
            fresh=standing is None,
        )

    def _decided(
        self,
        demand: Demand,
        snapshot: Sequence[ReplicaState],
        terms: Mapping[str, PoolTerms],
        out: Sequence[Candidate],
        policy: str,
    ) -> RouteDecision | None:
        """The choice among those of the snapshot; those that are `out` are kept with it."""
        try:
            return choose(demand, snapshot, terms, (), policy, turn=next(self._turns), others=out)
        except Exception as error:  # noqa: BLE001 - no defect in choosing may fail a request
            log.error("cannot weigh the replicas of a request: %s", type(error).__name__)
            self._services.telemetry.routing_failures.inc()
            decision = rendezvous(demand.root, snapshot)
            return decision and replace(decision, candidates=(*decision.candidates, *out))

    def _note(self, routed: Routed, terms: Mapping[str, PoolTerms]) -> None:
        """Keep the decision, and what it means for the conversation's allowance."""
        chosen, rates = routed.chosen, terms[routed.pool.name].rates
        saved, paid = 0, routed.decision.leaving_nano
        if chosen is not None and rates is not None:
            saved = chosen.hit_tokens * max(rates.uncached - rates.cached, 0) // TOKENS_PER_RATE
        conversation = _conversation(routed.planned.allowed.identified)
        place = (routed.pool.name, routed.replica.name)
        telemetry = self._services.telemetry
        now_us = self._services.fleet.clock()
        if self.conversations.went(
            conversation, place, now_us, tokens=routed.prompt_tokens, saved_nano=saved, paid_nano=paid
        ):
            telemetry.switches.labels(routed.pool.name).inc()
        telemetry.routed(routed.pool.name, routed.decision.reason)
        self.decisions.keep(routed)

    def counted(self, held: Held) -> Taken:
        """The load of an attempt, counted at its replica for as long as the block runs.

        An answer in one piece shows no first token: it is taken for begun when that was predicted.
        """
        routed, attempt = held.routed, held.attempt
        length, chosen = routed.prompt_tokens, routed.chosen
        hit = routed.hit_tokens or 0
        after_s = None
        if not attempt.stream and chosen is not None and attempt.surface != Surface.EMBEDDINGS:
            after_s = chosen.ttft_s
        return self._services.fleet.taken(
            attempt.pool, attempt.replica, new=max(length - hit, 0), length=length, decodes_after_s=after_s
        )

    # ---- what came of it -----------------------------------------------------------------------------

    def settled(self, settled: Settled, total_us: int) -> None:
        """Compare an attempt with what was predicted of it. Never raises."""
        try:
            self._services.telemetry.placed(settled, total_us)
            self._services.scaling.settled(settled)
            self.decisions.settled(settled, total_us)
        except Exception as error:  # noqa: BLE001 - no defect in comparing may leave an attempt unbooked
            log.error("cannot compare an attempt with its prediction: %s", type(error).__name__)


def predicted(held: Held) -> Headers:
    """What the client is told of the choice: the tier, the predicted time, whether its budget is kept."""
    routed, row = held.routed, held.attempt
    headers: Headers = []
    if routed.pool.profile is not None:
        headers.append((b"x-ctxgate-tier", routed.pool.profile.encode()))
    if row.predicted_ttft_us is not None:
        headers.append((b"x-ctxgate-predicted-ttft-ms", b"%d" % -(-row.predicted_ttft_us // 1000)))
    if row.fits is not None:
        headers.append((b"x-ctxgate-fits", b"true" if row.fits else b"false"))
    return headers


def tier_told(held: Held) -> str:
    """The service tier that an answer reports, empty where its client named none that is meant here."""
    asked = held.routed.planned.allowed.identified.service_tier
    if asked not in _TIERS:
        return ""
    return tier_used(held.routed.pool.profile, asked)


def _conversation(identified: Identified) -> tuple[str, str, bytes]:
    """What names a conversation: no other key's has the same name."""
    return identified.key.key_id, identified.task.name, identified.root


def _short(present: Iterable[tuple[Place, ReplicaRecord]], engine_name: str, needed: int) -> frozenset[Place]:
    """The replicas whose window is too short for so many tokens."""
    return frozenset(
        place
        for place, record in present
        if (window := record.windows.get(engine_name)) is not None and window < needed
    )


def _divided(
    snapshot: Sequence[ReplicaState], tried: Collection[Place], short: Collection[Place]
) -> tuple[list[ReplicaState], list[Candidate]]:
    """The replicas that were not tried, and the others. Names of replicas are unique within a pool only.

    Those whose window is too short for the prompt and its answer are left out while there are others.
    """
    left: list[ReplicaState] = []
    unfit: list[ReplicaState] = []
    out: list[Candidate] = []
    for state in snapshot:
        place = (state.pool, state.name)
        if place in tried:
            out.append(Candidate(*place, 0.0, TRIED, state.hit_tokens))
        else:
            (unfit if place in short else left).append(state)
    if not left:
        return unfit, out
    return left, [*out, *(Candidate(one.pool, one.name, 0.0, SHORT, one.hit_tokens) for one in unfit)]
