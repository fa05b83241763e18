"""Plays a session through the whole gateway under one compaction policy after another, against a twin.

Each policy gets a twin with an empty cache and a gateway with an empty store. What it costs is what the
ledger says, the gateway's own calls included. A compaction that is decided on after an answer takes effect
with the next request, as it does where an agent's tools take longer than a summary.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import uvicorn

from ctxgate.gateway.assembly import assembled
from ctxgate.gateway.config import Config, Context, Key, Limits, Listen, Model, Pool, Replica, Team
from ctxgate.gateway.context import ContextStage
from ctxgate.gateway.edge import Reply
from ctxgate.gateway.errors import Refused
from ctxgate.gateway.flow import Surface
from ctxgate.gateway.inbound import read_inbound
from ctxgate.gateway.keys import KeyRing
from ctxgate.gateway.pipeline import Pipeline
from ctxgate.gateway.replay_run import TASK_HEADER, Plan, request_body
from ctxgate.inference.rates import RateCard
from ctxgate.inference.twin_profile import PROFILES
from ctxgate.inference.twin_server import TwinServer, TwinSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ctxgate.compression.window import Conversation, Decision, Terms
    from ctxgate.gateway.edge import Message
    from ctxgate.gateway.ledger import Attempt
    from ctxgate.gateway.services import Services
    from ctxgate.gateway.sessions import Session, Turn
    from ctxgate.inference.prompts import PromptRenderer
    from ctxgate.inference.rates import Rates

    # Whether a conversation is to be compacted between two requests.
    Decide = Callable[[Conversation, Terms], Decision]

NAME: Final = "replay"  # of the pool, the model, the team and the key
WINDOW: Final = 2**20
_PAGE: Final = 1000
_FOREVER_S: Final = 3600.0


class PlayFailed(Exception):
    """A request was not answered, with the reason."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A session as it was played under one policy: its settled attempts in order, summaries among them."""

    policy: str
    attempts: tuple[Attempt, ...]

    @property
    def cost_nano(self) -> int:
        """What all attempts cost."""
        return sum(each.settled.charge.total or 0 for each in self.attempts)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all policies share. `most`: requests that are played; `step` is called after each."""

    rates: Rates
    context: Context
    renderer: PromptRenderer
    most: int | None = None
    step: Callable[[], None] = lambda: None


async def play(session: Session, policy: str, decide: Decide, setting: Setting) -> Ran:
    """Play a session. Raises `PlayFailed` where a request is not answered."""
    with TemporaryDirectory(prefix="ctxgate-policies-") as folder:
        async with _twin(setting.renderer) as url:
            config = _config(Path(folder) / "ledger.db", url, setting)
            async with assembled(config, KeyRing(config.keys)) as services:
                services.context = ContextStage(services, decided_by=decide)
                for number, turn in enumerate(session.turns()):
                    if number == setting.most:
                        break
                    await _request(services, config.keys[0], session, turn)
                    await services.context.compactor.idle()
                    services.context.compactor.forget_failures()  # when to try again is the policy's part
                    setting.step()
                return Ran(policy, await _attempts(services))


async def _request(services: Services, key: Key, session: Session, turn: Turn) -> None:
    output = session.outputs[turn.number] if turn.number < len(session.outputs) else None
    plan = Plan(NAME, stream=False, max_tokens=max(1, output or 1), extra={"ignore_eos": True})
    raw = request_body(turn, plan)
    headers = {TASK_HEADER: session.name}
    inbound = read_inbound(services.new_id(), Surface.CHAT, headers, raw, services.now_us())
    reply = Reply(_waits, _taken)
    reply.watch()
    try:
        await Pipeline(services).serve(inbound, key, reply)
    except Refused as refused:
        raise PlayFailed(f"request {turn.number + 1}: {refused.message}") from refused
    finally:
        reply.unwatch()
    if reply.status != 200:
        raise PlayFailed(f"request {turn.number + 1}: answered with status {reply.status}")


async def _attempts(services: Services) -> tuple[Attempt, ...]:
    """Every settled attempt, in the order of opening."""
    found: list[Attempt] = []
    cursor: str | None = None
    while True:
        page = await services.ledger.rows(limit=_PAGE, cursor=cursor)
        found += page.attempts
        if (cursor := page.cursor) is None:
            return tuple(found)


def _config(store: Path, url: str, setting: Setting) -> Config:
    pool = Pool(
        NAME,
        (Replica(NAME, url),),
        RateCard(((setting.rates,),)),
        cache_isolation="none",
        probe=False,
    )
    return Config(
        listen=Listen(),
        store=store,
        limits=Limits(),
        pools={NAME: pool},
        models={NAME: Model(NAME, (NAME,), "tiny", window=WINDOW)},
        keys=(Key(NAME, b"", NAME, NAME, frozenset({"ignore_eos"})),),
        teams={NAME: Team(NAME, NAME, "off", context=setting.context)},
    )


@asynccontextmanager
async def _twin(renderer: PromptRenderer) -> AsyncIterator[str]:
    """A twin that takes no time and whose cache holds the longest prompt there is."""
    settings = TwinSettings(
        profile=PROFILES["fast"].scaled(0), max_model_len=WINDOW, blocks=2 * WINDOW // 16 + 1
    )
    twin = TwinServer(settings, renderer)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(twin.app(), log_level="error", lifespan="on")
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await server.shutdown([listener])


async def _waits() -> Message:
    """A client that stays."""
    await asyncio.sleep(_FOREVER_S)
    return {"type": "http.disconnect"}


async def _taken(_: Message) -> None:
    """What the twin says is made up."""
