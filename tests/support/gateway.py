"""The real application behind uvicorn's own HTTP protocol, on a random port in the test's event loop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from datetime import date
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from uvicorn.lifespan.on import LifespanOn
from uvicorn.server import ServerState

from ctxgate.gateway.app import Application
from ctxgate.gateway.commands.serve import listen, make_server
from ctxgate.gateway.config import Config, Context, Key, Limits, Listen, Model, Pool, Replica, Team
from ctxgate.gateway.keys import digest
from ctxgate.inference.rates import RateCard, Rates
from ctxgate.routing.tiers import TEAMLESS
from support.client import CHAT, Answer, Wire, connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ctxgate.compression.volatile import VolatileKind
    from ctxgate.gateway.ledger import Attempt
    from ctxgate.gateway.services import Services
    from ctxgate.routing.tiers import Classes

ALPHA: Final = "cg-alpha-0123456789-0123456789-0123456789"
BETA: Final = "cg-beta-0123456789-0123456789-01234567890"
FORGED: Final = "cg-forged-0123456789-0123456789-012345678"
RATES_DAY: Final = date(2026, 1, 1)
# 1000, 100 and 2000 nano-dollars per uncached, cached and output token.
RATES: Final = Rates(uncached=10**9, cached=10**8, output=2 * 10**9, written=10**9, effective=RATES_DAY)
MODEL: Final = "m"
FAST_RATES: Final = Rates(
    uncached=2 * 10**9, cached=2 * 10**8, output=4 * 10**9, written=2 * 10**9, effective=RATES_DAY
)
PLAIN: Final[Mapping[str, Any]] = {"cache_isolation": "none", "probe": False, "load": "off"}
"""Fields of a pool: what clients send arrives byte for byte, and nothing else does."""

HELLO: Final = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
STREAM: Final = HELLO | {"stream": True}


def bearer(secret: str = ALPHA) -> tuple[str, str]:
    """The header that carries a key."""
    return ("authorization", f"Bearer {secret}")


def config(
    store: Path,
    replicas: Sequence[str],
    *,
    limits: Limits | None = None,
    pool: Mapping[str, Any] = MappingProxyType({}),
    served_name: str | None = None,
    granted: frozenset[str] = frozenset(),
    docs: bool = True,
    layout: str = "off",
    volatile: frozenset[VolatileKind] = frozenset(),
    context: Context | None = None,
    model: Mapping[str, Any] = MappingProxyType({}),
    fast: Sequence[str] = (),
    fast_pool: Mapping[str, Any] = MappingProxyType({}),
    classes: Classes = TEAMLESS,
) -> Config:
    """One pool over the given servers, one model, two teams of one organisation with a key each.

    `fast`: the servers of a second pool of the same model, of twice the price.
    """
    servers = tuple(Replica(f"standard-{index}", url) for index, url in enumerate(replicas))
    key = Key("alpha-ci", digest(ALPHA), "alpha", "acme", granted)
    other = Key("beta-ci", digest(BETA), "beta", "acme")
    fields = {"rates": RateCard(((RATES,),)), **PLAIN, **pool}
    pools = {"standard": Pool("standard", servers, **fields)}
    if fast:
        servers = tuple(Replica(f"fast-{index}", url) for index, url in enumerate(fast))
        card = RateCard(((FAST_RATES,),))
        pools["fast"] = Pool("fast", servers, **{**fields, "rates": card, "profile": "fast", **fast_pool})
        pools["standard"] = replace(pools["standard"], profile="standard")
    return Config(
        listen=Listen(),
        store=store,
        limits=limits or Limits(),
        pools=pools,
        models={MODEL: Model(MODEL, tuple(pools), served_name, **model)},
        keys=(key, other),
        docs=docs,
        teams={
            name: Team(name, "acme", layout, volatile, context=context or Context("off"), classes=classes)
            for name in ("alpha", "beta")
        },
    )


@dataclass(slots=True)
class Gateway:
    """A running gateway."""

    application: Application
    port: int
    state: ServerState
    _server: asyncio.Server
    _lifespan: LifespanOn
    _stopped: bool = field(default=False)

    @classmethod
    async def start(cls, configuration: Config) -> Self:
        """Start the application and listen."""
        application = Application(configuration)
        settings = make_server(application, "warning").config
        settings.load()
        lifespan = LifespanOn(settings)
        await lifespan.startup()
        assert not lifespan.should_exit
        loop, state = asyncio.get_running_loop(), ServerState()
        protocol: Any = settings.http_protocol_class
        listener = listen("127.0.0.1", 0)
        server = await loop.create_server(
            lambda: protocol(config=settings, server_state=state, app_state={}, _loop=loop), sock=listener
        )
        return cls(application, listener.getsockname()[1], state, server, lifespan)

    async def stop(self) -> None:
        """What uvicorn does on a signal; idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._server.close()
        for connection in list(self.state.connections):
            connection.shutdown()
        if self.state.tasks:
            await asyncio.wait(self.state.tasks, timeout=10)
        await self._lifespan.shutdown()

    @property
    def services(self) -> Services:
        """The working parts."""
        assert self.application.services is not None
        return self.application.services

    def wire(self, receive_buffer: int | None = None) -> AbstractAsyncContextManager[Wire]:
        """A connection to the gateway."""
        return connected(self.port, receive_buffer)

    async def post(
        self,
        body: bytes | dict[str, Any],
        path: str = CHAT,
        headers: Iterable[tuple[str, str]] = (bearer(),),
    ) -> Answer:
        """One POST on a connection of its own."""
        async with self.wire() as wire:
            wire.request(path, body, headers)
            return await wire.answer()

    async def get(
        self, path: str, headers: Iterable[tuple[str, str]] = (bearer(),), method: str = "GET"
    ) -> Answer:
        """One request without a body on a connection of its own."""
        async with self.wire() as wire:
            wire.request(path, None, headers, method)
            return await wire.answer(head_only=method == "HEAD")

    async def rows(self) -> list[Attempt]:
        """All settled rows, once everything that was queued is durable."""
        await until(lambda: not self.services.ledger.pending)
        return list((await self.services.ledger.rows(limit=100_000)).attempts)

    async def row(self) -> Attempt:
        """The only settled row."""
        (row,) = await self.rows()
        return row

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels as in the exposition."""
        answer = await self.get("/metrics", ())
        assert answer.status == 200
        lines = [line for line in answer.body.decode().splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def quiet(self) -> None:
        """Wait until no request is open: connections' tasks ended, gauges at zero, nothing pending."""

        def nothing_open() -> bool:
            services = self.services
            return (
                not self.state.tasks
                and not services.background
                and not services.ledger.pending
                and all(record.in_flight == 0 for record in services.fleet.records())
            )

        await until(nothing_open)


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Let the event loop run until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not come true")
        await asyncio.sleep(0.001)
