"""Hears the cache events of every replica that has a stream, for as long as the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.per_replica import for_each
from ctxgate.inference.kv_subscriber import Endpoints, Subscriber

if TYPE_CHECKING:
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.kv_stage import KvStage
    from ctxgate.gateway.services import Services
    from ctxgate.inference.kv_events import Batch
    from ctxgate.routing.kv_sessions import Place

log = logging.getLogger(__name__)
_AGAIN_S: Final = 5.0


async def watch_events(services: Services) -> None:
    """Follow all streams, for ever; none holds another back."""
    await for_each(services.fleet, partial(_followed, services.kv))


async def _followed(kv: KvStage, record: ReplicaRecord) -> None:
    place = (record.pool.name, record.replica.name)
    while (events := kv.streams.get(place)) is not None:
        endpoints = Endpoints(events.endpoint, events.replay_endpoint, events.topic)
        subscriber = Subscriber(endpoints, Follower(kv, place))
        kv.catching_up[place] = subscriber.catch_up
        try:
            await subscriber.run()
        except Exception:  # an address that cannot be used, or a defect: requests go on without
            log.exception("following the events of replica %s/%s failed", *place)
            kv.problem(place, "failed")
            kv.down(place)
        finally:
            kv.catching_up.pop(place, None)
        await asyncio.sleep(_AGAIN_S)


class Follower:
    """Takes one replica's events to what is known of it."""

    def __init__(self, kv: KvStage, place: Place) -> None:
        self._kv = kv
        self._place = place
        self._began = False

    def begin(self, first: int) -> None:
        """What was known is void."""
        self._kv.sessions.place(self._place).begin(complete=first == 0)
        if self._began:
            self._kv.problem(self._place, "begun_anew")
            log.warning("the events of replica %s/%s begin anew at message %d", *self._place, first)
        self._began = True

    def apply(self, batch: Batch) -> None:
        """Take the events of one step."""
        self._kv.heard(self._place)
        self._kv.sessions.apply(self._place, batch)
        if batch.unknown:
            self._kv.problem(self._place, "unknown_event")

    def lost(self, problem: str) -> None:
        """Something was not understood or could not be fetched."""
        self._kv.problem(self._place, "lost")
        log.warning("events of replica %s/%s: %s", *self._place, problem)

    def quiet(self) -> None:
        """Nothing came for a while; there may have been nothing to tell."""
        if self._kv.check_silence(self._place):
            self._kv.problem(self._place, "silent")
            log.warning(
                "event stream silent: replica %s/%s stores blocks and tells nothing of it. It must listen on "
                "its endpoint (vLLM: tcp://*:PORT): where that names a host it connects, and nobody hears it",
                *self._place,
            )
