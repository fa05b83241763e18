"""An answer that goes on after the model has looked something up.

    attempt ──> its end, or calls of `context_recall` alone ──> results ──> the prompt, the calls and the
       ^                                                                      results, as a further attempt
       └──────────────────────────────────────────────────────────────────────────────┘

The attempts that follow go to the same replica, which has the prompt in its cache, or to another one where
that fails before it says a word. Each is opened and settled like any other. Where an engine refuses to go
on, the request goes out once more as if there were no such tool.

Calls beside those of other tools cannot be answered at once, for the client has to answer the others first:
their results are put into the client's next requests. So are the calls that were answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression import plan as planning
from ctxgate.compression.recall_tool import (
    NAME,
    HiddenRounds,
    call_json,
    call_message,
    distinct_ids,
    identity_of,
    result_message,
)
from ctxgate.compression.validity import Invalid, check_put_back
from ctxgate.gateway.attempt import Attempt
from ctxgate.gateway.context_terms import asked_output
from ctxgate.gateway.context_tool import without_tool
from ctxgate.gateway.edge import JSON
from ctxgate.gateway.endings import UNBOOKABLE, check_time, last_word
from ctxgate.gateway.errors import STOPPING, Kind, Refused, body_of
from ctxgate.gateway.flow import Planned
from ctxgate.gateway.ledger import LOOK_UP, Outcome
from ctxgate.gateway.merged_reply import MergedReply
from ctxgate.gateway.metering import charge_of
from ctxgate.gateway.recall_answers import RecallAnswers
from ctxgate.inference import wire
from ctxgate.inference.call_filter import ENDS
from ctxgate.inference.expand import expanded

if TYPE_CHECKING:
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.edge import Reply
    from ctxgate.gateway.flow import Answered, Routed
    from ctxgate.gateway.pipeline import Pipeline
    from ctxgate.inference.usage import Usage
    from ctxgate.inference.wire import Body
    from ctxgate.routing.prefix_index import Place

MOST_ROUNDS: Final = 3
"""Rounds of one answer in which calls are answered, within its latency budget. In one more they are told that
there were too many, and after that the answer goes on without the tool."""

MOST_REFUSALS: Final = 1
"""Rounds in which nothing is looked up any more and the tool stays: a prompt without it misses the cache."""

MOST_CALLS: Final = 4
"""Calls of one round that are answered."""

_BROKEN: Final = Refused(Kind.UPSTREAM_BROKEN, "The model server broke its answer off.")


def rounds_of(pipeline: Pipeline, planned: Planned, reply: Reply, began_us: int) -> RecallRounds | None:
    """What takes a request's answer on; None where its model has not got the tool."""
    turn = planned.turn
    return (
        None if turn is None or not turn.offered else RecallRounds(pipeline, planned, turn, reply, began_us)
    )


class RecallRounds:
    """The rounds of one request's answer. `reply` is what its first attempt answers.

    `further`: what the attempts after the first one used. `began_us`: when the request began.
    """

    def __init__(self, pipeline: Pipeline, planned: Planned, turn: Turn, reply: Reply, began_us: int) -> None:
        self._pipeline = pipeline
        self._services = pipeline.services
        self._planned = planned
        self._turn = turn
        self._began_us = began_us
        self._answers = RecallAnswers(pipeline.services, turn)
        self._body = turn.body
        self._before: list[bytes] = []
        self._said = ""
        self._thought = ""
        self._rounds = 0
        self._refusals = 0  # rounds in which nothing was looked up
        self._used = 0  # output tokens
        self.further: list[Usage] = []
        self.reply = MergedReply(reply, self._ends)

    async def go_on(self, answered: Answered, routed: Routed, number: int) -> None:
        """Take the answer on to its end, after an attempt that was the request's `number`-th."""
        try:
            while self.reply.goes_on and not self._is_over():
                if answered.outcome is not Outcome.COMPLETED:
                    if not self.reply.started:
                        raise _BROKEN.fresh()
                    await self.reply.finish()  # its client has been told why
                    return
                self._used += answered.usage.output.value or 0
                self.reply.paid(answered.usage, charge_of(answered.held, answered.usage).total)
                body = await self._round()
                if self._is_over():
                    return
                answered, number = await self._attempts(body, routed, number)
        except Refused as refused:
            if not self.reply.started:
                raise
            if not self._is_over():
                self.reply.refused = refused.status, [JSON], body_of(refused)
                await self.reply.told()
        finally:
            self.reply.release()

    def _is_over(self) -> bool:
        return self.reply.ended or self.reply.gone

    def _spent_us(self) -> int:
        return self._services.steady_us() - self._began_us

    def _is_late(self) -> bool:
        """Whether nothing more is looked up in this answer."""
        most = self._planned.allowed.identified.budget.total_us
        return self._rounds > MOST_ROUNDS or (most is not None and self._spent_us() >= most)

    async def _round(self) -> Body | None:
        """Answer the calls of the last attempt; the prompt to go on with, None where it cannot be."""
        reply, spoken = self.reply, self.reply.spoken
        self._rounds += 1
        ids = distinct_ids([call.id for call in reply.own])
        raw = [call_json(id_, call.arguments) for id_, call in zip(ids, reply.own, strict=True)]
        message = call_message(spoken.text, (spoken.thought_as, spoken.thought), raw)
        results = [result_message(id_, text) for id_, text in zip(ids, await self._results(), strict=True)]
        self._said += spoken.text
        self._thought += spoken.thought
        self._before += [message, *results]
        items = self._body.items("messages")
        last = len(items) - 1
        body = expanded(self._body, {last: [bytes(items[last]), message, *results]})
        if body is None:
            return None
        views, tenant = self._services.layout.memory.views, self._turn.tenant
        try:
            # What stands before the last message has not changed, and was checked with the request.
            before, after = (
                views.messages(tenant, items[last:]),
                views.messages(tenant, body.items("messages")[last:]),
            )
            check_put_back(before, after, {0: (0, 1 + len(results))})
        except Invalid:
            return None
        self._body = body
        return body

    async def _results(self) -> list[str]:
        """The texts of the results of the last attempt's calls."""
        answers, late = self._answers, self._is_late()
        self._refusals += late
        found: list[str] = []
        for place, call in enumerate(self.reply.own):
            refused = late or place >= MOST_CALLS
            found.append(
                answers.refuse() if refused else await answers.answer(call.arguments, self._body.raw)
            )
        return found

    async def _attempts(self, body: Body | None, routed: Routed, number: int) -> tuple[Answered, int]:
        """Go on with a prompt, at another replica if need be. Ends the answer where no attempt succeeds."""
        services, reply = self._services, self.reply
        offered = body is not None and self._refusals <= MOST_REFUSALS
        if body is not None and not offered:
            body = wire.parse(without_tool(body))
        planned = self._plain() if body is None else self._plan(body, output_used=self._used)
        place = services.routing.fixed(planned, routed.pool, routed.replica, LOOK_UP)
        lost: set[Place] = set()
        tried: set[Place] = set()
        most = number + services.config.limits.max_attempts
        while True:
            number += 1
            self._check(again=bool(lost or tried))
            reply.begin(answers=offered)
            attempt = self._attempt(place, number)
            answered = await attempt.run()
            self.further.append(answered.usage)
            if self._is_over():
                return answered, number
            if reply.refused is not None and body is not None:  # once more, as if there were no such tool
                services.telemetry.recall_tool.labels("failed").inc()
                body, planned, offered = None, self._plain(), False
                place = services.routing.fixed(planned, routed.pool, routed.replica, LOOK_UP)
                continue
            if not answered.retriable and reply.refused is None:
                return answered, number
            name = (place.pool.name, place.replica.name)
            (lost if answered.connection_lost and name not in lost else tried).add(name)
            again = place if name not in tried else self._pipeline.route(planned, tried, self._spent_us())
            if not answered.retriable or number >= most or again is None:
                if reply.refused is None:
                    await last_word(attempt, reply)
                await reply.told()
                return answered, number
            place = again

    def _check(self, *, again: bool) -> None:
        """Raise `Refused` where no further attempt may be made. `again`: the one before has failed."""
        if self._services.called_off:
            raise STOPPING.fresh()
        if not self._services.ledger.healthy:  # before the engine works for nothing
            raise UNBOOKABLE.fresh()
        if again:
            check_time(self._planned.allowed.identified.budget, self._spent_us())

    def _attempt(self, routed: Routed, number: int) -> Attempt:
        held = self._pipeline.hold(routed, number)
        row = msgspec.structs.replace(held.attempt, purpose=LOOK_UP)
        return Attempt(self._services, msgspec.structs.replace(held, attempt=row), self.reply)

    def _plan(self, body: Body, *, output_used: int) -> Planned:
        """A further attempt's prompt, past every stage that decides something."""
        before, allowed = self._planned, self._planned.allowed
        inbound = allowed.identified.inbound
        salt = self._pipeline.cache_salt(allowed)
        if (options := _options(body, output_used)) != {}:
            body = wire.parse(b"".join(wire.with_members(body, options)))
        plan = planning.plan(
            body,
            stream=inbound.stream,
            served_model=allowed.model.served_name,
            continuous_usage=any(pool.continuous_usage for pool in allowed.pools),
            cache_salt=salt,
        )
        seen = self._services.misses.look(allowed.identified, body, salt)
        return Planned(allowed, plan, before.level, seen, origin=self._turn)

    def _plain(self) -> Planned:
        """The request as it would be without the tool."""
        self._before, self._said, self._thought = [], "", ""
        return self._plan(wire.parse(without_tool(self._turn.body)), output_used=0)

    async def _ends(self) -> None:
        """Keep what was hidden, before the client has the whole answer."""
        reply = self.reply
        if not (self._before or reply.own):
            return
        own = reply.own if reply.reason in ENDS else []
        beside = own if reply.spoken.calls else []
        calls: list[tuple[int, bytes]] = []
        after: list[bytes] = []
        if beside:
            self._rounds += 1
            texts = await self._results()
            ids = distinct_ids([call.id for call in beside])
            for id_, call, text in zip(ids, beside, texts, strict=True):
                calls.append((call.place, call_json(id_, call.arguments)))
                after.append(result_message(id_, text))
        if reply.reason is None or not (self._before or calls):
            return
        rounds = HiddenRounds(tuple(self._before), self._said, self._thought, tuple(calls), tuple(after))
        identity = identity_of(self._said + reply.spoken.text, reply.spoken.calls)
        await self._services.context.tool.keep(self._turn, identity, rounds)


def _options(body: Body, output_used: int) -> dict[str, bytes]:
    """What is left of the output that was asked for; and this tool, where it had to be called, has been."""
    options: dict[str, bytes] = {}
    asked = asked_output(body)
    if asked is not None and output_used:
        for name in ("max_completion_tokens", "max_tokens"):
            if body.has(name):
                options[name] = b"%d" % max(asked - output_used, 1)
    least = body.value("min_tokens") if output_used and body.kind("min_tokens").isdigit() else None
    if isinstance(least, int) and least > 0:
        options["min_tokens"] = b"%d" % max(least - output_used, 0)
    if output_used and NAME.encode() in bytes(body.get("tool_choice") or b""):
        options["tool_choice"] = b'"none"'
    return options
