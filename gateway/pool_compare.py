"""Sends the same cases to two pools: the effects behind `agreement`.

Every call is an attempt like any other, booked to the gateway's own organisation under the task `compare`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.gateway.agreement import Outcome, read_answer
from ctxgate.gateway.attempt import Attempt
from ctxgate.gateway.edge import Reply
from ctxgate.gateway.errors import Refused
from ctxgate.gateway.flow import Task
from ctxgate.gateway.instants import day_of
from ctxgate.gateway.pool_probe import own_call
from ctxgate.gateway.replica_watch import PROBE_TIMEOUT_S
from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import probe
from ctxgate.inference.rates import charge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ctxgate.gateway.agreement import Answer, Case
    from ctxgate.gateway.config import Config, Model
    from ctxgate.gateway.edge import Message
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.services import Services

TASK: Final = Task("compare", "gateway")
PATIENCE_S: Final = 600.0
LOADING_S: Final = 60.0
_ASK_EVERY_S: Final = 0.5


class NotComparable(Exception):
    """The pools cannot be compared; the message says why."""


@dataclass(slots=True)
class Side:
    """One of the two pools: its model, its replicas that answer, and what its calls cost in nano-dollars."""

    pool: str
    model: Model
    records: Sequence[ReplicaRecord]
    calls: int = 0
    tokens: int = 0
    nano: int = 0
    turn: Iterator[ReplicaRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.turn = cycle(self.records)


def models_of(config: Config, pools: Sequence[str], wanted: str | None) -> list[Model]:
    """The model by which each pool is asked: the same where one leads to all. Raises `NotComparable`."""
    for name in pools:
        if name not in config.pools:
            raise NotComparable(f"there is no pool {name}; known are {', '.join(config.pools)}")
    if pools[0] == pools[1]:
        raise NotComparable("name two pools")
    models = [one for one in config.models.values() if wanted in (None, one.name)]
    if not models:
        raise NotComparable(f"there is no model {wanted}; known are {', '.join(config.models)}")
    shared = next((one for one in models if set(pools) <= set(one.pools)), None)
    found = [shared or next((one for one in models if name in one.pools), None) for name in pools]
    for name, model in zip(pools, found, strict=True):
        if model is None:
            raise NotComparable(f"no model leads to the pool {name}")
    return [model for model in found if model is not None]


async def side(services: Services, pool: str, model: Model) -> Side:
    """A pool and those of its replicas that are up. Raises `NotComparable` where there is none."""
    hosted = services.config.pools[pool].provider is not None
    deadline = asyncio.get_running_loop().time() + (LOADING_S if hosted else 0.0)
    while True:
        up: list[ReplicaRecord] = []
        for record in services.fleet.records():
            if record.pool.name == pool:
                headers = services.upstream_headers(record.pool)
                found = await probe(services.client, record.replica.url, headers, PROBE_TIMEOUT_S)
                services.fleet.probed(pool, record.replica.name, found)
                up += [record] if found.finding is Finding.WELL else []
        if up:
            return Side(pool, model, up)
        if asyncio.get_running_loop().time() >= deadline:
            raise NotComparable(f"no replica of the pool {pool} answers")
        await asyncio.sleep(_ASK_EVERY_S)  # the library of providers is still being imported


async def outcomes(
    services: Services,
    sides: tuple[Side, Side],
    cases: Sequence[Case],
    parallel: int,
    step: Callable[[], None],
) -> list[Outcome]:
    """Every case at both pools, `parallel` cases at once; `step` is called after each."""
    gate = asyncio.Semaphore(parallel)

    async def one(case: Case) -> Outcome:
        async with gate:
            first, second = await asyncio.gather(*(_asked(services, each, case) for each in sides))
            step()
            return Outcome(case, first, second)

    return list(await asyncio.gather(*(one(case) for case in cases)))


async def _asked(services: Services, side: Side, case: Case) -> Answer | None:
    """One case at one pool; None where it is not answered."""
    if not services.ledger.healthy:  # a call that cannot be booked is not made
        return None
    record = next(side.turn)
    body = dict(case.body) | {"model": side.model.engine_name}
    try:
        held = own_call(services, record, side.model, msgspec.json.encode(body), TASK)
    except Refused:
        return None
    kept = _Kept()
    reply = Reply(kept.receive, kept.send)
    reply.watch()
    try:
        answered = await Attempt(services, held, reply).run()
    except Refused:
        return None
    finally:
        reply.unwatch()
    if answered.status != 200:
        return None
    usage = answered.usage
    day = day_of(held.attempt.opened_at_us)
    side.calls += 1
    side.tokens += (usage.prompt or 0) + (usage.output.value or 0)
    side.nano += charge(usage, record.pool.rates, day).total or 0
    try:
        document: Any = msgspec.json.decode(bytes(kept.body))
    except msgspec.DecodeError:
        return None
    return read_answer(document)


class _Kept:
    """A client that waits for long and keeps the answer's bytes."""

    def __init__(self) -> None:
        self.body = bytearray()

    async def receive(self) -> Message:
        await asyncio.sleep(PATIENCE_S)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.body += message.get("body", b"")
