"""A changed configuration taken over while requests run: checked as a whole, then swapped at once.

A file with a mistake changes nothing. What was begun under the old configuration ends under it: a request
keeps its pools and its prices, and a replica that is gone from the file answers what it has been sent.
Where the gateway listens and what it stores stays as it is until the next start.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.config_load import read
from ctxgate.gateway.config_yaml import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from ctxgate.gateway.app import Application
    from ctxgate.gateway.config import Config

log = logging.getLogger(__name__)
AT_START: Final = (
    "listen",
    "store",
    "docs",
    "forms_days",
    "archive_days",
    "recall_model",
    "cache_salt_secret",
)
"""The fields that are read at start only."""


class Reloader:
    """Takes over what a file says when it is told to. One reload at a time; the last one wins."""

    def __init__(self, application: Application, path: Path) -> None:
        self._application = application
        self._path = path
        self._asked = False
        self._running: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Read the file again; for a signal's handler, on the event loop."""
        self._asked = True
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        while self._asked:
            self._asked = False
            await self.reload()

    async def reload(self) -> bool:
        """Read the file and take it over; whether it could be."""
        try:
            loaded = await asyncio.to_thread(read, self._path)
        except ConfigError as error:
            log.error("the configuration stays as it was; the file has mistakes:\n%s", error)
            self._counted("refused")
            return False
        except Exception:  # whatever the defect, the gateway goes on with what it has
            log.exception("the configuration stays as it was")
            self._counted("refused")
            return False
        for warning in loaded.warnings:
            log.warning("%s", warning)
        waiting = take_over(self._application, loaded.config)
        if waiting:
            log.warning("changes of %s take effect at the next start", ", ".join(waiting))
        self._counted("taken")
        return True

    def _counted(self, outcome: str) -> None:
        services = self._application.services
        if services is not None:
            services.telemetry.reloads.labels(outcome).inc()


def take_over(application: Application, config: Config) -> tuple[str, ...]:
    """Swap an application's configuration; the changed fields that wait for the next start."""
    old = application.config
    waiting = tuple(name for name in AT_START if getattr(config, name) != getattr(old, name))
    application.reconfigure(replace(config, **{name: getattr(old, name) for name in AT_START}))
    log.info("took over the configuration: generation %d", application.generation)
    return waiting
