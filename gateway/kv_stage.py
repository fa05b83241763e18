"""What the replicas' cache events mean for requests: whose blocks they are, and what the next one will find.

Each attempt to a pool with event streams carries `X-Session-ID`: a keyed hash of the tenant, the task and
the conversation's root, the same in every turn and in every gateway with the same secret. Nothing of the
client's goes out, and no client can name another one's session.

Nothing here fails a request; a defect is counted, and the replica's cache is taken for unknown.
"""

from __future__ import annotations

import hmac
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import Counter, Gauge

from ctxgate.inference.record import Record
from ctxgate.inference.usage import Certainty
from ctxgate.routing.kv_sessions import KvSessions, Outcome
from ctxgate.routing.snapshot import Knowledge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ctxgate.gateway.config import KvEvents, Pool
    from ctxgate.gateway.flow import Held, Identified
    from ctxgate.gateway.seen import Seen
    from ctxgate.gateway.services import Services
    from ctxgate.inference.usage import Count, Usage
    from ctxgate.routing.kv_sessions import Dispatched, Place

log = logging.getLogger(__name__)
SESSION_HEADER: Final = "x-session-id"
SILENT_US: Final = 5_000_000
"""How long after an answer that must have stored blocks a stream may say nothing of them."""

_CAUGHT_UP: Final = 16  # streams: to look at each costs microseconds
_SESSION_CHARACTERS: Final = 32
_LEVELS: Final = {Knowledge.COLD: 0, Knowledge.DEGRADED: 1, Knowledge.EXACT: 2}


class _Open(Record, frozen=True):
    """An open attempt: how it went out, and the last batch of its replica by then."""

    dispatched: Dispatched | None
    tick: int


class KvStage:
    """The event streams of all replicas that have one. Belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.streams: dict[Place, KvEvents] = {}
        self._pools: frozenset[str] = frozenset()
        self.sessions = KvSessions()
        self.catching_up: dict[Place, Callable[[], None]] = {}  # reads what a stream has brought by now
        self._open: dict[str, _Open] = {}  # by attempt: each one settles
        self._owed: dict[Place, int] = {}  # since when events are waited for
        self._knowledge: Gauge | None = None  # with the other metrics, once there is a stream
        self.update()

    def update(self) -> None:
        """Have the streams of the configuration from now on; one that has another address begins anew."""
        old = self.streams
        self.streams = {
            (pool.name, replica.name): replica.kv_events
            for pool in self._services.config.pools.values()
            for replica in pool.replicas
            if replica.kv_events is not None
        }
        self._pools = frozenset(pool for pool, _ in self.streams)
        if self.streams and self._knowledge is None:
            self._knowledge = self._add_metrics()
        for one in self.streams:
            if self._knowledge is not None and one not in old:
                self._knowledge.labels(*one).set_function(partial(self._level, one))
        for one, events in old.items():
            if self.streams.get(one) != events:
                self.sessions.place(one).forget()

    def _level(self, place: Place) -> float:
        return _LEVELS[self.sessions.knowledge(place)]

    def _add_metrics(self) -> Gauge:
        registry, place = self._services.telemetry.registry, ["pool", "replica"]
        self._problems = Counter(
            "ctxgate_kv_event_problems",
            "What went wrong with event streams.",
            [*place, "problem"],
            registry=registry,
        )
        self._predictions = Counter(
            "ctxgate_kv_predictions",
            "Predictions of cached tokens by events, by whether the engine reported the same.",
            [*place, "outcome"],
            registry=registry,
        )
        knowledge = Gauge(
            "ctxgate_kv_knowledge",
            "How well a replica's cache is known: 2 exactly, 1 in part, 0 not at all.",
            place,
            registry=registry,
        )
        size = Gauge(
            "ctxgate_kv_index_bytes", "Memory of what is known by events, estimated.", registry=registry
        )
        size.set_function(lambda: self.sessions.size)
        return knowledge

    # ---- for the router ------------------------------------------------------------------------------

    def hits(self, seen: Seen | None, pools: Sequence[Pool]) -> dict[Place, int]:
        """The tokens that each replica holds of a prompt, for those whose cache is known exactly."""
        if seen is None or not self.streams:
            return {}
        found: dict[Place, int] = {}
        try:
            for pool in pools if not self._pools.isdisjoint(pool.name for pool in pools) else ():
                for replica in pool.replicas:
                    place = (pool.name, replica.name)
                    if place in self.streams:
                        if len(self.catching_up) <= _CAUGHT_UP and (read := self.catching_up.get(place)):
                            read()
                        tokens = self.sessions.expected(place, seen.sent.chain)
                        if tokens is not None:
                            found[place] = tokens
        except Exception as error:  # noqa: BLE001 - no defect here may fail a request
            self._defect("predict a hit", error)
        return found

    # ---- for attempts --------------------------------------------------------------------------------

    def opened(self, held: Held) -> dict[str, str]:
        """Note that an attempt goes out now; the headers that it carries."""
        if held.attempt.pool not in self._pools:
            return {}
        identified, seen = held.routed.planned.allowed.identified, held.routed.planned.seen
        session = self.session_of(identified)
        place = (held.attempt.pool, held.attempt.replica)
        if place in self.streams:
            try:
                dispatched = None if seen is None else self.sessions.sent(place, session, seen.sent.chain)
                tick = self.sessions.place(place).tick
                self._open[held.attempt.attempt_id] = _Open(dispatched, tick)
            except Exception as error:  # noqa: BLE001 - as above
                self._defect("follow an attempt", error)
        return {SESSION_HEADER: session}

    def settled(self, held: Held, usage: Usage, ending: str | None) -> None:
        """Learn from how an attempt ended; `ending` is its finish reason. Called once per attempt."""
        opened = self._open.pop(held.attempt.attempt_id, None)
        if opened is None:
            return
        try:
            self._settled((held.attempt.pool, held.attempt.replica), opened, usage, ending or "")
        except Exception as error:  # noqa: BLE001 - nor may it leave an attempt unbooked
            self._defect("learn from an attempt", error)

    def _settled(self, place: Place, opened: _Open, usage: Usage, ending: str) -> None:
        prompt, cached, sent = usage.prompt, _measured(usage.cached), opened.dispatched
        if not prompt or _measured(usage.uncached) is None or cached is None:
            if sent is not None:
                self.sessions.settled(sent, None)
            return
        known = self.sessions.place(place)
        least = 2 * known.block if known.block else self._services.misses.index.least_shortfall(place)
        if prompt - cached >= least and known.tick == opened.tick:
            self._owed.setdefault(place, self._services.steady_us())
        if sent is None:
            return
        if sent.foreseen is not None:
            outcome = "right" if sent.foreseen.tokens == cached else "wrong"
            self._predictions.labels(*place, outcome).inc()
        self.sessions.settled(sent, Outcome(prompt, cached, _measured(usage.output), ending))

    def session_of(self, identified: Identified) -> str:
        """The session id of a conversation."""
        key = identified.key
        named = [key.organisation, key.team, key.key_id, identified.task.name, identified.root]
        secret = self._services.salts.secret
        digest = hmac.digest(secret, b"session" + msgspec.json.encode(named), "sha256")
        return digest.hex()[:_SESSION_CHARACTERS]

    # ---- for the watch -------------------------------------------------------------------------------

    def heard(self, place: Place) -> None:
        """A replica's events came: what was waited for has come with them, or will."""
        self._owed.pop(place, None)

    def check_silence(self, place: Place) -> bool:
        """Whether a stream has just been found to say nothing, though blocks must have been stored."""
        since, known = self._owed.get(place), self.sessions.place(place)
        if since is None or self._services.steady_us() - since < SILENT_US:
            return False
        was_alive, known.alive = known.alive, False
        return was_alive

    def problem(self, place: Place, problem: str) -> None:
        """Count a problem of a stream, by a word for its kind."""
        self._problems.labels(*place, problem).inc()

    def down(self, place: Place) -> None:
        """A replica does not answer: what it is when it does may be another engine."""
        if place in self.streams:
            self.sessions.place(place).forget()

    def _defect(self, what: str, error: BaseException) -> None:
        log.error("cannot %s by cache events: %s", what, type(error).__name__)
        self._services.telemetry.unexplained.inc()


def _measured(count: Count) -> int | None:
    return count.value if count.certainty is Certainty.MEASURED else None
