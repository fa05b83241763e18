"""Which servers a configuration's pools are made of, and how each is started."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ctxgate.inference.pools import Events, Launch, launch

if TYPE_CHECKING:
    from ctxgate.gateway.config import Config, Pool, Replica


class NotLaunchable(Exception):
    """A pool cannot be started from here; the message says why, and the cure."""


@dataclass(frozen=True, slots=True)
class Server:
    """One server of a pool and its start. `names`: the models that it has to serve in the end."""

    pool: str
    replica: str
    url: str
    launch: Launch
    names: tuple[str, ...]
    api_key: str | None

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        return place_of(self.url)


def servers(config: Config, only: str | None = None) -> list[Server]:
    """The servers of the pools that say how they are started, or of one. Raises `NotLaunchable`."""
    if only is not None and only not in config.pools:
        raise NotLaunchable(f"there is no pool {only}; known are {', '.join(config.pools)}")
    pools = [pool for name, pool in config.pools.items() if only in (None, name)]
    chosen = [pool for pool in pools if pool.engine is not None]
    if not chosen:
        which = f"pool {only}" if only is not None else "no pool"
        said = "says nothing of how its servers are" if only is not None else "says how its servers are"
        raise NotLaunchable(f"{which} {said} started: give it an engine section with a model")
    return [
        _server(config, pool, replica, index)
        for pool in chosen
        for index, replica in enumerate(pool.replicas)
    ]


def _server(config: Config, pool: Pool, replica: Replica, index: int) -> Server:
    spec = pool.engine
    assert spec is not None  # noqa: S101 - `servers` leaves other pools out
    asked = tuple(dict.fromkeys(m.engine_name for m in config.models.values() if pool.name in m.pools))
    spec = replace(spec, served_names=spec.served_names or asked)
    told = replica.kv_events
    events = None if told is None else Events(told.endpoint, told.replay_endpoint, told.topic)
    if urlsplit(replica.url).scheme != "http":
        raise NotLaunchable(
            f"replica {replica.name} of pool {pool.name}: only http:// servers can be started"
        )
    start = launch(spec, pool.profile, place_of(replica.url), index, events, sys.executable)
    return Server(pool.name, replica.name, replica.url, start, spec.served_names, pool.api_key)


def place_of(url: str) -> tuple[str, int]:
    """The host and port of a server's root."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or {"http": 80, "https": 443}[parts.scheme]
