"""Reads what recall probes have found of the models of a configuration."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ctxgate.gateway.recall_probe import decode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.gateway.config import Model

log = logging.getLogger(__name__)


def reliable_lengths(models: Mapping[str, Model]) -> dict[str, int]:
    """By model: the longest prompt, in tokens, that was found reliable. Blocks.

    A file that cannot be used, or that found no length reliable, is said and left out: then the whole
    window counts.
    """
    found: dict[str, int] = {}
    for model in models.values():
        if model.recall_probe is None:
            continue
        try:
            length = decode(model.recall_probe.read_bytes()).reliable_length
        except (OSError, ValueError) as error:
            log.warning("model %s: its recall probe cannot be used: %s", model.name, error)
            continue
        if length is None:
            log.warning("model %s: its recall probe found no length reliable", model.name)
        else:
            found[model.name] = length
    return found
