"""The call in which a model summarizes its own conversation: an attempt without a client.

It goes to the replica that has just answered, because its cache holds the prompt, and nowhere else: at any
other one the whole history would be read anew. It is metered, priced and booked to the task like any call.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.instruction import refuses_tools, summary_call, warm_share
from ctxgate.compression.plan import PromptPlan
from ctxgate.compression.policy import Level
from ctxgate.compression.window_errors import read_overflow
from ctxgate.gateway.attempt import Attempt
from ctxgate.gateway.edge import Reply
from ctxgate.gateway.errors import Kind, Refused
from ctxgate.gateway.flow import Identified, Inbound, Planned, Surface
from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.own_calls import Listener
from ctxgate.gateway.pipeline import Pipeline
from ctxgate.gateway.services import noted
from ctxgate.inference import wire
from ctxgate.inference.record import Record
from ctxgate.inference.template_facts import Extension

if TYPE_CHECKING:
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.flow import Answered, Held
    from ctxgate.gateway.services import Services
    from ctxgate.inference.wire import Body, Pieces

PATIENCE_S: Final = 300.0  # then the call is ended as if its client had gone
PURPOSE: Final = "summary"
_THINKING: Final = (11, 8)  # output tokens for each token of the summary: what a model thinks first included
_WINDOW_SHARE: Final = 4  # at most this part of a small window
_LEAST_WARM: Final = 0.5  # of a prompt in the cache: with less, a summary costs more than it is worth
_STOPPED: Final = frozenset({"stop", "length"})


class Notes(Record, frozen=True):
    """What a model answered: its text, None with the `fault` that says why there is none.

    `cut`: it reached its output limit.
    """

    text: str | None
    cut: bool = False
    fault: str | None = None


async def notes_of(services: Services, held: Held, sent: Body, budget: int) -> Notes:
    """Ask the replica that answered `held` for notes of about `budget` tokens on the conversation `sent`.

    Raises `Refused` only where the gateway is being stopped.
    """
    if not services.ledger.healthy:  # a call that cannot be booked is not made
        return Notes(None, fault="ledger")
    model = held.routed.planned.allowed.model
    record = services.fleet.known(held.attempt.pool, held.attempt.replica)
    if record is None or _is_cold(record, model.engine_name, sent):  # None: it is gone, and its cache with it
        return Notes(None, fault="cold")
    output = budget * _THINKING[0] // _THINKING[1]
    window = record.windows.get(model.engine_name)
    if window is not None:
        output = max(min(output, window // _WINDOW_SHARE), 1)
    refuse = refuses_tools(sent) or (
        sent.has("tools") and await services.tool_refusal.is_free(services, record, model.engine_name)
    )
    pieces = summary_call(
        sent,
        model=model.engine_name,
        output_tokens=output,
        refuse_tools=refuse,
        cache_salt=Pipeline(services).cache_salt(held.routed.planned.allowed),
    )
    listener = Listener(PATIENCE_S)
    reply = Reply(listener.receive, listener.send)
    attempt = Attempt(services, _held(services, held, pieces, output), reply)
    try:
        answered = await _ran(services, attempt, reply)
    except Refused as refused:
        if refused.kind is Kind.SHUTTING_DOWN:
            raise
        return Notes(None, fault="timeout" if refused.kind is Kind.UPSTREAM_TIMEOUT else "upstream")
    if answered.outcome is Outcome.COMPLETED:
        return _read(bytes(listener.body))
    return Notes(None, fault=_fault(answered, attempt.refusal))


def _is_cold(record: ReplicaRecord, model: str, sent: Body) -> bool:
    """Whether most of the prompt would be read anew, because the template prints it otherwise then."""
    findings = record.findings.get(model)
    if findings is None:
        return False
    tools, reasoning = (
        turns.extension is Extension.NO for turns in (findings.facts.tools, findings.facts.reasoning)
    )
    if not (tools or reasoning):
        return False
    return warm_share(sent, tools_move=tools, reasoning_goes=reasoning) < _LEAST_WARM


async def _ran(services: Services, attempt: Attempt, reply: Reply) -> Answered:
    """The attempt to its end. Once this is cancelled, its call is ended, and settled in the background."""

    async def run() -> Answered:
        reply.watch()
        try:
            return await attempt.run()
        finally:
            reply.unwatch()

    running = asyncio.get_running_loop().create_task(run())
    services.background.add(running)
    running.add_done_callback(services.background.discard)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(noted)  # how it ends is in the ledger
        attempt.call_off()
        raise


def _held(services: Services, held: Held, pieces: Pieces, output_tokens: int) -> Held:
    """The attempt, past every stage that decides something: key, task, model and place are `held`'s own."""
    before = held.routed.planned.allowed
    identified = before.identified
    # What is read of a request's body on the way are its few options, not its prompt.
    body = wire.parse(b'{"max_tokens":%d,"stream":false}' % output_tokens)
    inbound = Inbound(
        request_id=f"req_{services.new_id()}",
        surface=Surface.CHAT,
        headers={},
        body=body,
        messages=(),
        model=identified.inbound.model,
        stream=False,
        received_at_us=services.now_us(),
    )
    allowed = msgspec.structs.replace(
        before,
        identified=Identified(
            inbound, identified.key, identified.task, identified.root, identified.job_class
        ),
    )
    pool, replica = held.routed.pool, held.routed.replica
    planned = Planned(allowed, PromptPlan(pieces), Level.OFF, origin=held.routed.planned.turn)
    opened = Pipeline(services).hold(services.routing.fixed(planned, pool, replica, PURPOSE), 1)
    attempt = msgspec.structs.replace(opened.attempt, purpose=PURPOSE)
    return msgspec.structs.replace(opened, attempt=attempt)


def _read(answer: bytes) -> Notes:
    """The first choice of a whole answer."""
    try:
        choice = msgspec.json.decode(answer)["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        text = message.get("content")
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, AttributeError):
        return Notes(None, fault="upstream")
    if reason == "tool_calls" or message.get("tool_calls") or message.get("function_call"):
        return Notes(None, fault="tool_call")
    if reason not in _STOPPED or message.get("refusal"):
        return Notes(None, fault="refused")
    return Notes(text if isinstance(text, str) else "", cut=reason == "length")


def _fault(answered: Answered, refusal: tuple[int, bytes] | None) -> str:
    """Why there is no answer."""
    if answered.outcome in (Outcome.CLIENT_DISCONNECTED, Outcome.TIMED_OUT):
        return "timeout"
    if answered.outcome is not Outcome.REJECTED or answered.status is None:
        return "upstream"
    told = b"" if refusal is None else refusal[1]
    if answered.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE or read_overflow(_message(told)) is not None:
        return "overflow"
    return "refused"


def _message(body: bytes) -> str:
    """The text of an error, empty where there is none."""
    try:
        value: Any = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return ""
    return value if isinstance(value, str) else ""
