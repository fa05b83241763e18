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
from ctxgate.gateway.errors import Refused
from ctxgate.gateway.flow import Task
from ctxgate.gateway.own_calls import Cost, heard, own_call
from ctxgate.gateway.recall_probe_run import records_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ctxgate.gateway.agreement import Answer, Case
    from ctxgate.gateway.config import Config, Model
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
    """One of the two pools: its model, its replicas that answer, and what its calls cost."""

    pool: str
    model: Model
    records: Sequence[ReplicaRecord]
    cost: Cost = field(default_factory=Cost)
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
        if up := await records_up(services, pool):
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
    found = await heard(services, held, PATIENCE_S)
    if found is None:
        return None
    answered, answer = found
    side.cost.count(answered)
    try:
        document: Any = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return None
    return read_answer(document)
