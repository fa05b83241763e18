"""Watches every replica for as long as the gateway runs: its health, and once it is up, what it can do."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from ctxgate.gateway import pool_probe
from ctxgate.gateway.per_replica import for_each
from ctxgate.inference import engine_load
from ctxgate.inference.client import UpstreamFailed
from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import probe

if TYPE_CHECKING:
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.services import Services

log = logging.getLogger(__name__)
PROBE_EVERY_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 5.0
SETTLE_US: Final = 5_000_000  # how long the gateway may call itself not ready because of a probe
EXAMINE_EVERY_US: Final = 600_000_000  # at most so often is a replica that comes and goes examined


async def watch(services: Services) -> None:
    """Ask every replica how it is, for ever; a slow one holds no other back."""
    await for_each(services.fleet, lambda record: _Watch(services, record).run())


class _Watch:
    """One replica's watch."""

    def __init__(self, services: Services, record: ReplicaRecord) -> None:
        self._services = services
        self._record = record
        self._examination: asyncio.Task[None] | None = None
        self._examined_us: int | None = None
        self._fingerprint = record.fingerprint
        self._life = engine_load.Life()
        self._due = record.pool.probe
        if self._due:
            record.settling_until_us = services.fleet.clock() + SETTLE_US

    async def run(self) -> None:
        """Probe for ever; an examination that runs ends with this."""
        try:
            while True:
                try:
                    await self._probe()
                except Exception:  # an answer nobody thought of must not end the probing
                    log.exception("probing replica %s failed", self._name)
                await asyncio.sleep(PROBE_EVERY_S)
        finally:
            if self._examination is not None:
                self._examination.cancel()
                with suppress(asyncio.CancelledError):
                    await self._examination

    @property
    def _name(self) -> str:
        return f"{self._record.pool.name}/{self._record.replica.name}"

    async def _probe(self) -> None:
        record, fleet = self._record, self._services.fleet
        headers = self._services.upstream_headers(record.pool)
        result = await probe(self._services.client, record.replica.url, headers, PROBE_TIMEOUT_S)
        was_up = record.health.probe_ok
        fleet.probed(record.pool.name, record.replica.name, result)
        if record.health.probe_ok and not was_up:
            log.info("replica %s is up", self._name)
        elif was_up and not record.health.probe_ok:
            log.warning("replica %s is down (%s)", self._name, result.finding.name.lower())
            self._due = record.pool.probe  # it may come back as another engine
            self._services.kv.down((record.pool.name, record.replica.name))
            for attempt in tuple(self._services.attempts):
                attempt.give_way(record)
        if (
            result.finding is Finding.REFUSED
        ):  # the engine is gone, and its cache with it; a slow one keeps it
            self._services.misses.index.forget((record.pool.name, record.replica.name))
        if not record.health.probe_ok:
            record.settling_until_us = 0  # a replica that is down is not waited for
            return
        if record.fingerprint != self._fingerprint:  # another engine answers there, or was set up anew
            self._due |= self._fingerprint is not None and record.pool.probe
            self._fingerprint = record.fingerprint
        if self._due:
            self._examine()
        if record.pool.load == "metrics":
            await self._read_load(headers)

    async def _read_load(self, headers: dict[str, str]) -> None:
        """How much the replica has to do for all its clients; what it does not tell stays unknown."""
        record = self._record
        try:
            status, text = await self._services.client.get(
                f"{record.replica.url}/metrics", headers, PROBE_TIMEOUT_S
            )
        except UpstreamFailed:
            return
        if status == HTTPStatus.OK:
            load, life = engine_load.of_metrics(text), engine_load.life(text)
            self._services.fleet.told_load(record.pool.name, record.replica.name, load)
            place = (record.pool.name, record.replica.name)
            if life.follows(self._life):  # it began anew between two probes
                self._services.misses.index.forget(place)
            self._life = life
            if load.kv_tokens is not None:
                self._services.misses.index.tell_size(place, load.kv_tokens)

    def _examine(self) -> None:
        """Begin to find out what the replica can do, unless that is being done or was done just now."""
        now_us = self._services.fleet.clock()
        running = self._examination is not None and not self._examination.done()
        if running or (self._examined_us is not None and now_us - self._examined_us < EXAMINE_EVERY_US):
            return
        self._due, self._examined_us = False, now_us
        self._examination = asyncio.get_running_loop().create_task(self._examined())

    async def _examined(self) -> None:
        try:
            for examined in await pool_probe.examine(self._services, self._record):
                for problem in examined.problems:
                    log.warning("replica %s, model %s: %s", self._name, examined.model, problem)
        except Exception:  # what a probe cannot find out stays unknown; requests go on
            log.exception("examining replica %s failed", self._name)
        finally:
            self._record.settling_until_us = 0
