"""The way of one request, on one screen.

    identify   key -> tenant, headers -> task              (gateway.identity)
    allow      model and pools the tenant may use
    lay out    for the prefix cache                        (gateway.layout)
    plan       what of the conversation goes out           (gateway.context), and as which bytes
    route      replica, with every candidate's score       (gateway.routing)
    hold       the attempt, opened in the ledger
    forward    bytes to and from the replica               (gateway.attempt)
    settle     usage -> charge -> ledger, metrics, health; exactly once

A failed attempt that sent nothing to the client goes back to `route`, as often as the limits allow and with
what is left of the request's latency budget; once that is over it is not tried again. One that the engine
refused because the prompt is too long goes back to `plan`, and a shorter prompt goes out. An answer in which
the model looks something up goes on in further attempts (gateway.recall_rounds).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ctxgate.compression import plan as planning
from ctxgate.compression.policy import Level
from ctxgate.compression.rules import ALL_RULES
from ctxgate.compression.window_errors import Refusal
from ctxgate.gateway import identity
from ctxgate.gateway.attempt import Attempt
from ctxgate.gateway.cache_salt import strictest
from ctxgate.gateway.context_level import Mode, mode_of
from ctxgate.gateway.context_turn import Shaped
from ctxgate.gateway.endings import UNBOOKABLE, check_time, last_word
from ctxgate.gateway.errors import STOPPING, Kind, Refused
from ctxgate.gateway.flow import Allowed, Held, Planned, Surface
from ctxgate.gateway.inbound import check_engine_fields
from ctxgate.gateway.layout import Laid
from ctxgate.gateway.layout_level import policy_of
from ctxgate.gateway.ledger import OWN_ORGANISATION, AttemptOpened
from ctxgate.gateway.recall_rounds import rounds_of
from ctxgate.inference.record import Record
from ctxgate.routing.tiers import TEAMLESS

if TYPE_CHECKING:
    from collections.abc import Collection

    from ctxgate.gateway.config import Key
    from ctxgate.gateway.edge import Reply
    from ctxgate.gateway.flow import Identified, Inbound, Routed
    from ctxgate.gateway.services import Services
    from ctxgate.routing.prefix_index import Place

MOST_US: Final = 10**15
MOST_REFUSALS: Final = 2
"""How often a prompt that an engine refuses as too long is made shorter and sent again."""


class LaidOut(Record, frozen=True):
    """A prompt as it was laid out, and how far its layout and its context may be changed."""

    laid: Laid
    level: Level
    mode: Mode


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Takes requests from the edge to the ledger."""

    services: Services

    async def serve(self, inbound: Inbound, key: Key, reply: Reply) -> None:
        """Answer one request of a key's holder. Raises `Refused` while nothing has been sent."""
        if not self.services.ledger.healthy:  # before the engine works for nothing
            raise UNBOOKABLE.fresh()
        began_us = self.services.steady_us()
        team = self.services.config.teams.get(key.team)
        classes = TEAMLESS if team is None else team.classes
        identified = identity.identify(inbound, key, self.services.roots, classes)
        allowed = self.allow(identified)
        laid = await self.lay_out(allowed)
        planned = await self.plan(allowed, laid)
        tried: set[Place] = set()
        lost: set[Place] = set()
        attempt: Attempt | None = None
        number = refusals = 0
        while number - refusals < self.services.config.limits.max_attempts:
            spent_us = self.services.steady_us() - began_us
            if attempt is not None:
                check_time(identified.budget, spent_us)
            if self.services.called_off:
                raise STOPPING.fresh()
            routed = self.route(planned, tried, spent_us)
            if routed is None or reply.gone:
                break
            place = (routed.pool.name, routed.replica.name)
            number += 1
            rounds = rounds_of(self, planned, reply, began_us)
            attempt = Attempt(self.services, self.hold(routed, number), rounds.reply if rounds else reply)
            answered = await attempt.run()
            if answered.overflow is not None:
                refusals += 1
                before = planned
                refusal = Refusal(answered.overflow, routed.replica.name, refusals)
                planned = await self.plan(allowed, laid, refusal)
                if planned.plan.size >= before.plan.size:
                    if planned.turn is not None:
                        attempt.tell_why(planned.turn.too_large())
                    break
                continue
            if not answered.retriable:
                try:
                    if rounds is not None:
                        await rounds.go_on(answered, routed, number)
                finally:
                    self.services.context.answered(answered, rounds.further if rounds else ())
                return
            (lost if answered.connection_lost and place not in lost else tried).add(place)
        draining = attempt is None and self.services.routing.draining(allowed)
        await last_word(attempt, reply, draining=draining)

    def allow(self, identified: Identified) -> Allowed:
        """The model and its pools. Raises `Refused`."""
        config = self.services.config
        name = identified.inbound.model
        model = config.models.get(name)
        if model is None:
            message = f"The model '{name[:128]}' does not exist or you do not have access to it."
            raise Refused(Kind.MODEL_NOT_FOUND, message, "model")
        check_engine_fields(identified.inbound.body, identified.key.allow_engine_fields)
        return Allowed(identified, model, tuple(config.pools[p] for p in model.pools))

    async def lay_out(self, allowed: Allowed) -> LaidOut:
        """The prompt as its team's policies lay it out. Raises `Refused` for what they do not allow."""
        inbound, key = allowed.identified.inbound, allowed.identified.key
        config = self.services.config
        engine_name, fleet = allowed.model.engine_name, self.services.fleet
        rules = ALL_RULES.intersection(*(fleet.rules(pool.name, engine_name) for pool in allowed.pools))
        policy = policy_of(inbound, key, config, rules)
        mode = mode_of(inbound, key, config)
        laid = Laid(inbound.body)
        if policy.level is not Level.OFF:
            laid = await self.services.layout.lay_out(allowed.identified, policy, self.services.now_us())
        return LaidOut(laid, policy.level, mode)

    async def plan(
        self,
        allowed: Allowed,
        laid_out: LaidOut | None = None,
        refused: Refusal | None = None,
    ) -> Planned:
        """The outgoing prompt; a failure to plan forwards the prompt as it came, and is counted.

        `refused`: what an engine said to this request's prompt, which was too long for it.
        Raises `Refused` for what the team's policies do not allow.
        """
        laid_out = laid_out or await self.lay_out(allowed)
        inbound, laid, mode = allowed.identified.inbound, laid_out.laid, laid_out.mode
        salt = self.cache_salt(allowed)
        shaped = await self.services.context.shape(allowed, laid, mode, refused=refused)
        body = shaped.body
        try:
            plan = planning.plan(
                body,
                stream=inbound.stream,
                served_model=allowed.model.served_name,
                continuous_usage=any(pool.continuous_usage for pool in allowed.pools),
                laid=laid.reasons,
                shaped=shaped.reasons,
                cache_salt=salt,
            )
        except Exception:  # noqa: BLE001 - no defect in planning may fail a request that works without it
            self.services.telemetry.plan_failures.inc()
            body, shaped = inbound.body, Shaped(inbound.body)
            plan = planning.untouched(inbound.body, salt)
        seen = self.services.misses.look(allowed.identified, body, salt)
        refusals = 0 if refused is None else refused.number
        shrinks = mode is not Mode.OFF and inbound.surface is Surface.CHAT and refusals < MOST_REFUSALS
        return Planned(allowed, plan, laid_out.level, seen, shaped.turn, shrinks)

    def cache_salt(self, allowed: Allowed) -> str | None:
        """What keeps other tenants out of the prompt's cache blocks. Raises `Refused`."""
        identified = allowed.identified
        if identified.inbound.surface is Surface.EMBEDDINGS:
            return None
        isolation = strictest(pool.cache_isolation for pool in allowed.pools)
        return self.services.salts.of(isolation, identified.key, identified.inbound.body)

    def route(self, planned: Planned, tried: Collection[Place] = (), spent_us: int = 0) -> Routed | None:
        """An untried replica of the model's pools, or None when there is none left.

        `spent_us`: what the request has taken since its arrival, in microseconds.
        """
        return self.services.routing.route(planned, tried, spent_us)

    def hold(self, routed: Routed, number: int) -> Held:
        """The attempt as the ledger opens it."""
        identified = routed.planned.allowed.identified
        inbound, key = identified.inbound, identified.key
        turn, expected, chosen = routed.planned.turn, routed.expected, routed.chosen
        ttft_s = None if chosen is None else chosen.ttft_s
        opened = AttemptOpened(
            attempt_id=self.services.new_id(),
            request_id=inbound.request_id,
            attempt_number=number,
            organisation=key.organisation,
            team=key.team,
            key_id=key.key_id,
            task=identified.task.name,
            task_source=identified.task.source,
            surface=inbound.surface.value,
            model=inbound.model,
            pool=routed.pool.name,
            replica=routed.replica.name,
            stream=inbound.stream,
            body_bytes=routed.planned.plan.size,
            opened_at_us=self.services.now_us(),
            predicted_cached_tokens=routed.hit_tokens,
            estimated_prompt_tokens=routed.prompt_tokens,
            client_tokens=None if turn is None else turn.client_tokens,
            job_class=None if key.organisation == OWN_ORGANISATION else identified.job_class,
            predicted_ttft_us=microseconds(ttft_s),
            fits=routed.decision.fits if routed.budget.bounds else None,
            policy=routed.decision.policy,
        )
        return Held(routed, opened, expected)


def microseconds(seconds: float | None) -> int | None:
    """A predicted time as the ledger keeps it: never below zero, as margins may be; None where it is none."""
    if seconds is None or not math.isfinite(seconds):
        return None
    return min(max(round(seconds * 1e6), 0), MOST_US)
