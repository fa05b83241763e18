"""What the stages of a request work with: made once by the composition root, shared by all requests."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ctxgate.gateway.apart import Apart
from ctxgate.gateway.context_savings import Savings
from ctxgate.gateway.deadlines import Deadlines
from ctxgate.gateway.fleet import steady_us
from ctxgate.gateway.identity import Roots
from ctxgate.gateway.kv_stage import KvStage
from ctxgate.gateway.misses import Misses
from ctxgate.gateway.patience import Patience
from ctxgate.gateway.routing import RoutingStage
from ctxgate.gateway.scaling import Scaling
from ctxgate.gateway.speeds import Speeds
from ctxgate.gateway.tool_refusal import ToolRefusal
from ctxgate.inference.estimate import TokenRatio

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ctxgate.compression.expressions import Expression
    from ctxgate.gateway.archive import Archive
    from ctxgate.gateway.attempt import Attempt
    from ctxgate.gateway.cache_salt import Salts
    from ctxgate.gateway.config import Config, Pool
    from ctxgate.gateway.context import ContextStage
    from ctxgate.gateway.fleet import Fleet
    from ctxgate.gateway.forms import Forms
    from ctxgate.gateway.keys import KeyRing
    from ctxgate.gateway.layout import LayoutStage
    from ctxgate.gateway.ledger import Ledger
    from ctxgate.gateway.recall import Recall
    from ctxgate.gateway.telemetry import Telemetry
    from ctxgate.inference.client import UpstreamClient

_UNMEASURED: Final = TokenRatio()
DURABLE_WITHIN_S: Final = (
    2.0  # an answer does not wait longer for its row; the ledger keeps what it could not write
)


def unix_us() -> int:
    """Now, in Unix microseconds."""
    return time.time_ns() // 1000


def noted(step: asyncio.Future[Any]) -> None:
    """A ledger step's failure is known: the ledger logs it, and not every attempt waits to hear of it."""
    if not step.cancelled():
        step.exception()


_ID_BYTES: Final = 16
_IDS_DRAWN: Final = 256
_ids: list[str] = []
os.register_at_fork(after_in_child=_ids.clear)


def random_id() -> str:
    """An id nobody can guess: whoever knows an attempt's id could abort it at the engine.

    Random bytes are drawn for many ids at once, since each draw is a system call.
    """
    while True:
        try:
            return _ids.pop()
        except IndexError:
            drawn = secrets.token_hex(_ID_BYTES * _IDS_DRAWN)
            _ids.extend(drawn[at : at + 2 * _ID_BYTES] for at in range(0, len(drawn), 2 * _ID_BYTES))


class Ratios:
    """Bytes per token of each model, as measured so far."""

    def __init__(self) -> None:
        self._by_model: dict[str, TokenRatio] = {}  # keyed by configured names, so it is bounded

    def of(self, model: str) -> TokenRatio:
        """The ratio to estimate with."""
        return self._by_model.get(model, _UNMEASURED)

    def learn(self, model: str, size: int, tokens: int) -> None:
        """Note a text of `size` bytes that measured `tokens`."""
        self._by_model[model] = self.of(model).updated(size, tokens)


def _patterns(config: Config) -> dict[str, tuple[Expression, ...]]:
    """By team, the expressions that find volatile text."""
    return {name: team.patterns for name, team in config.teams.items()}


@dataclass(slots=True)
class Services:
    """The gateway's working parts.

    `background` holds tasks that outlive the step that began them, `attempts` the open attempts. Once
    `called_off`, these are ended, and no further ones are made for requests.
    """

    config: Config
    keys: KeyRing
    ledger: Ledger
    client: UpstreamClient
    fleet: Fleet
    telemetry: Telemetry
    layout: LayoutStage
    salts: Salts
    forms: Forms
    archive: Archive
    recall: Recall
    now_us: Callable[[], int] = unix_us
    steady_us: Callable[[], int] = steady_us
    new_id: Callable[[], str] = random_id
    background: set[asyncio.Task[object]] = field(default_factory=set)
    attempts: set[Attempt] = field(default_factory=set)
    called_off: bool = False
    prompt_ratios: Ratios = field(default_factory=Ratios)
    output_ratios: Ratios = field(default_factory=Ratios)
    patience: Patience = field(default_factory=lambda: Patience(DURABLE_WITHIN_S))
    deadlines: Deadlines = field(default_factory=Deadlines)
    apart: Apart = field(default_factory=Apart)
    tool_refusal: ToolRefusal = field(default_factory=ToolRefusal)
    misses: Misses = field(init=False)
    context: ContextStage = field(init=False)  # made of these services
    savings: Savings = field(init=False)
    routing: RoutingStage = field(init=False)
    scaling: Scaling = field(init=False)
    kv: KvStage = field(init=False)
    speeds: Speeds = field(init=False)
    roots: Roots = field(init=False)

    def __post_init__(self) -> None:
        self.misses = Misses(self.telemetry.unexplained.inc)
        self.savings = Savings(self)
        self.speeds = Speeds()
        self.speeds.update(self.config.pools.values())
        self.routing = RoutingStage(self)
        self.scaling = Scaling(self)
        self.kv = KvStage(self)
        self.roots = Roots(_patterns(self.config), secrets.randbits(64), self.layout.sections)

    def reconfigure(self, config: Config, keys: KeyRing) -> None:
        """Work by another configuration from now on."""
        self.config, self.keys = config, keys
        self.roots.use(_patterns(config))
        self.speeds.update(config.pools.values())
        gone = self.fleet.update(config.pools)
        self.kv.update()
        for place in gone:
            self.misses.index.drop(place)
            self.telemetry.forget(place)

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run something beside the request that needs it; waited for at shutdown."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def upstream_headers(self, pool: Pool) -> dict[str, str]:
        """The headers every call to a pool carries; nothing of the client's is among them."""
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if pool.api_key is not None:
            headers["authorization"] = f"Bearer {pool.api_key}"
        return headers
