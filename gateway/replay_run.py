"""Plays sessions against a backend: each session in order, several sessions side by side."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.gateway.perturb import perturb
from ctxgate.gateway.replay import Measure, Played
from ctxgate.gateway.replay_client import Answer, AnswerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.gateway.perturb import Perturbation
    from ctxgate.gateway.replay_client import Backend, TaskCost
    from ctxgate.gateway.sessions import Message, Session, Tool, Turn
    from ctxgate.inference.oracle import PrefixOracle

    Tokenize = Callable[[Sequence[Message], Sequence[Tool]], Sequence[int] | None]
    """Renders a chat and returns the token ids of its prompt; None where it cannot."""

TASK_HEADER: Final = "x-ctxgate-task"
_GIVE_UP_AFTER: Final = 3  # failures in a row
_SETTLE_TRIES: Final = 50
_SETTLE_WAIT_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """How to play. `max_requests` bounds each session; `extra` joins every request body."""

    model: str
    stream: bool = True
    max_tokens: int = 16
    task_prefix: str = ""
    perturbations: frozenset[Perturbation] = frozenset()
    max_requests: int | None = None
    max_context: int | None = None
    concurrency: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)


def request_body(turn: Turn, plan: Plan) -> bytes:
    """The chat request of one turn, in the key order of its session."""
    body: dict[str, Any] = {"model": plan.model, "messages": turn.messages}
    if turn.tools:
        body["tools"] = turn.tools
    body |= {"max_tokens": plan.max_tokens, "stream": plan.stream}
    if plan.stream:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body | dict(plan.extra))


class Player:
    """Plays sessions and fills `played`, which is readable at any time, in the order given."""

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        *,
        oracle: PrefixOracle | None = None,
        tokenize: Tokenize | None = None,
        progress: Callable[[str, int], None] = lambda _label, _requests: None,
    ) -> None:
        self._backend = backend
        self._plan = plan
        self._oracle = oracle
        self._tokenize = tokenize
        self._progress = progress
        self.played: list[Played] = []

    async def play(self, sessions: Sequence[Session]) -> list[Played]:
        """Play all sessions; failures of single requests are recorded, not raised."""
        booked = await self._backend.costs_by_task()
        self.played = [Played(s.name, self._plan.task_prefix + s.name, s.requests) for s in sessions]
        waiting = list(zip(sessions, self.played, strict=True))
        waiting.reverse()

        async def worker() -> None:
            while waiting:
                await self._session(*waiting.pop())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._plan.concurrency, len(sessions))):
                group.create_task(worker())
        if booked is not None and any(_uncosted(each) for each in self.played):
            await self._take_booked(booked)
        return self.played

    async def _session(self, session: Session, played: Played) -> None:
        plan, in_a_row, drift = self._plan, 0, 1.0
        for recorded in session.turns():
            if plan.max_requests is not None and recorded.number >= plan.max_requests:
                played.stopped = f"stopped after --max-requests {plan.max_requests}"
                break
            turn = perturb(recorded, plan.perturbations)
            counted, oracle = await self._count(turn)
            if _too_long(counted, drift, plan.max_context):
                played.stopped = f"the next prompt no longer fits {plan.max_context} tokens"
                break
            try:
                measure = await self._request(turn, played.task, counted, oracle)
            except _WindowFull as full:
                played.stopped = f"the server says that the next prompt no longer fits: {full}"
                break
            played.measures.append(measure)
            drift = _drift(measure) or drift
            in_a_row = in_a_row + 1 if measure.error else 0
            self._progress(session.name, 1)
            if in_a_row == _GIVE_UP_AFTER:
                played.stopped = f"given up after {in_a_row} failures in a row"
                break
        self._progress(session.name, session.requests - len(played.measures))

    async def _count(self, turn: Turn) -> tuple[int | None, int | None]:
        """The prompt's length by the local tokenizer, and the oracle's bound for it."""
        if self._tokenize is None:
            return None, None
        ids = await asyncio.to_thread(self._tokenize, turn.messages, turn.tools)
        if ids is None:
            return None, None
        return len(ids), None if self._oracle is None else self._oracle.observe(ids)

    async def _request(self, turn: Turn, task: str, counted: int | None, oracle: int | None) -> Measure:
        body = request_body(turn, self._plan)
        try:
            answer = await self._backend.chat(body, stream=self._plan.stream, headers={TASK_HEADER: task})
        except AnswerFailed as failed:
            if failed.too_long and turn.number > 0:
                raise _WindowFull(str(failed)) from failed
            return Measure(turn.number, error=str(failed), counted=counted)
        return _measure(turn.number, answer, counted, oracle)

    async def _take_booked(self, before: Mapping[str, TaskCost]) -> None:
        """Costs from the gateway's ledger, once it has settled every request of this replay."""
        for _ in range(_SETTLE_TRIES):
            after = await self._backend.costs_by_task() or {}
            for each in self.played:
                each.ledger_cost_nano = _booked(each, before, after)
            if all(each.ledger_cost_nano is not None for each in self.played):
                return
            await asyncio.sleep(_SETTLE_WAIT_S)


class _WindowFull(Exception):
    """The server refused a prompt for its length: the session's natural end."""


def _measure(turn: int, answer: Answer, counted: int | None, oracle: int | None) -> Measure:
    return Measure(
        turn=turn,
        usage=answer.usage,
        cost_nano=answer.cost_nano,
        ttft_s=answer.ttft_s,
        total_s=answer.total_s,
        counted=counted,
        oracle=oracle,
    )


def _drift(measure: Measure) -> float | None:
    """How much longer the server counts this prompt than the local tokenizer does."""
    if measure.usage.prompt is None or not measure.counted:
        return None
    return measure.usage.prompt / measure.counted


def _too_long(counted: int | None, drift: float, max_context: int | None) -> bool:
    """Whether prompt and one output token exceed the window; engines refuse exactly that."""
    return counted is not None and max_context is not None and counted * drift >= max_context


def _uncosted(played: Played) -> bool:
    return any(measure.cost_nano is None for measure in played.measures if measure.error is None)


def _booked(played: Played, before: Mapping[str, TaskCost], after: Mapping[str, TaskCost]) -> int | None:
    """What the ledger gained for a task, or None while it lacks requests or prices."""
    row, old = after.get(played.task), before.get(played.task)
    if row is None or not row.complete:
        return None
    answered = sum(measure.error is None for measure in played.measures)
    if row.requests - (old.requests if old else 0) < answered:
        return None
    return row.cost_nano - (old.cost_nano if old else 0)
