"""A fleet of engines behind one gateway, on a virtual clock: how a routing policy does. Pure.

The engines are those of `engine_model`. The gateway of `simulated_gateway` knows nothing of them but what it
sent, what came back, and when.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from ctxgate.inference.record import Record
from ctxgate.routing.candidates import price
from ctxgate.routing.engine_cache import Prompt
from ctxgate.routing.engine_model import EngineModel, Sequence
from ctxgate.routing.simulated_gateway import Gateway

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ctxgate.routing.simulated_gateway import Attempt, PoolSetup
    from ctxgate.routing.simulated_load import Task

_CALL, _STEP = 0, 1  # a call that comes as a step ends is looked at in the next one
_SAME_TURN: Final = 2**62


class Fleet(Record, frozen=True):
    """The engines: pools, tokens of a block, and the queue at which an engine refuses what comes."""

    pools: tuple[PoolSetup, ...]
    block: int = 16
    most_waiting: int = 64
    attempts: int = 3


class Served(Record, frozen=True):
    """What became of one request. Times are seconds; a refused one has no pool and nothing behind it.

    `oracle` are the tokens that one cache without end, for all, would have held. `within`: inside its budget,
    None where it has none.
    """

    task: int
    label: str
    at_s: float
    prompt: int
    oracle: int
    within: bool | None
    pool: str | None = None
    cached: int = 0
    expected: int = 0
    ttft_s: float | None = None
    total_s: float | None = None
    predicted_s: float | None = None
    cost_nano: int = 0


class _Open:
    """A request in an engine."""

    __slots__ = ("attempt", "call", "sequence", "task")

    def __init__(self, task: Task, call: int, sequence: Sequence, attempt: Attempt) -> None:
        self.task = task
        self.call = call
        self.sequence = sequence
        self.attempt = attempt


class Simulation:
    """One run of a policy over some tasks, to the end of the last."""

    def __init__(self, fleet: Fleet, policy: str) -> None:
        self.fleet = fleet
        self.gateway = Gateway(fleet.pools, policy, fleet.block)
        self.engines = [
            EngineModel(pool.profile, blocks=pool.kv_tokens // fleet.block + 1, block_size=fleet.block)
            for pool in fleet.pools
            for _ in range(pool.replicas)
        ]
        self.served: list[Served] = []
        self._events: list[tuple[float, int, int, int]] = []
        self._due: list[float | None] = [None] * len(self.engines)
        self._tasks: dict[int, Task] = {}
        self._open: dict[str, _Open] = {}
        self._heads: set[str] = set()

    def run(self, tasks: Iterable[Task]) -> list[Served]:
        """Every request of the tasks, in the order of their ends."""
        for task in tasks:
            self._tasks[task.number] = task
            heapq.heappush(self._events, (task.at_s, _CALL, task.number, 0))
        while self._events:
            now, kind, number, call = heapq.heappop(self._events)
            if kind == _CALL:
                self._call(self._tasks[number], call, now)
            elif self._due[number] == now:
                self._step(number, now)
        return self.served

    def _call(self, task: Task, call: int, now: float) -> None:
        tried: list[str] = []
        for _ in range(self.fleet.attempts):
            attempt = self.gateway.choose(task, call, now, tried)
            if attempt is None:
                break
            if len(self.engines[attempt.place].waiting) < self.fleet.most_waiting:
                self._send(task, call, attempt, now)
                return
            tried.append(attempt.decision.replica)
        self._count(task, call, now)

    def _send(self, task: Task, call: int, attempt: Attempt, now: float) -> None:
        shape = task.shape
        asked = shape.calls[call]

        def common(turn: int) -> int:
            return _SAME_TURN if turn == call else shape.calls[turn].prompt_tokens

        head_blocks = 0 if shape.head is None else shape.head_tokens // self.fleet.block
        prompt = Prompt(str(task.number), call, shape.head, head_blocks, common)
        id_ = f"{task.number}-{call}"
        sequence = Sequence(id_, prompt, asked.prompt_tokens, asked.output_tokens, now)
        self._open[id_] = _Open(task, call, sequence, attempt)
        self.gateway.sent(attempt, task)
        self.engines[attempt.place].submit(sequence, now)
        self._plan(attempt.place)

    def _plan(self, number: int) -> None:
        due = self.engines[number].ends
        if due is not None and due != self._due[number]:
            heapq.heappush(self._events, (due, _STEP, number, 0))
        self._due[number] = due

    def _step(self, number: int, now: float) -> None:
        begun, finished = self.engines[number].complete()
        for sequence in begun:
            self.gateway.began(self._open[sequence.id].attempt, now)
        for sequence in finished:
            done = self._open.pop(sequence.id)
            task, call = done.task, done.call
            self.gateway.ended(done.attempt, task, sequence.output, now)
            self._count(task, call, sequence.arrived, done)
            if call + 1 < len(task.shape.calls):
                at = now + task.shape.calls[call + 1].think_s
                heapq.heappush(self._events, (at, _CALL, task.number, call + 1))
        self._plan(number)

    def _count(self, task: Task, call: int, at: float, done: _Open | None = None) -> None:
        asked, budget = task.shape.calls[call], task.budget
        bounded = budget.ttft_us is not None or budget.total_us is not None
        oracle = self._oracle(task, call)
        if done is None:
            within = False if bounded else None
            self.served.append(Served(task.number, task.label, at, asked.prompt_tokens, oracle, within))
            return
        sequence = done.sequence
        ttft, total = (sequence.first_token or at) - at, (sequence.finished or at) - at
        within = None
        if bounded:
            within = (budget.ttft_us is None or ttft * 1e6 <= budget.ttft_us) and (
                budget.total_us is None or total * 1e6 <= budget.total_us
            )
        candidate, pool = done.attempt.decision.candidates[0], done.attempt.decision.pool
        rates = next(each.rates for each in self.fleet.pools if each.name == pool)
        cached = sequence.cached or 0
        self.served.append(
            Served(
                task.number,
                task.label,
                at,
                asked.prompt_tokens,
                oracle,
                within,
                pool,
                cached,
                candidate.hit_tokens,
                ttft,
                total,
                candidate.ttft_s,
                price(asked.prompt_tokens - cached, cached, asked.output_tokens, rates),
            )
        )

    def _oracle(self, task: Task, call: int) -> int:
        shape, block = task.shape, self.fleet.block
        most = shape.calls[call].prompt_tokens - 1
        if call:
            return min(shape.calls[call - 1].prompt_tokens, most) // block * block
        if shape.head is None or shape.head in self._heads:
            return min(shape.head_tokens, most) // block * block
        self._heads.add(shape.head)
        return 0
