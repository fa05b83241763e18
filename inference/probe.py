"""Asks a replica how it is: alive, and which models it serves with which window."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctxgate.inference.client import ConnectTimedOut, Unreachable, UpstreamFailed
from ctxgate.inference.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.inference.client import UpstreamClient


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe's result.

    `windows`: model name -> max_model_len in tokens (None where not reported); empty where the replica
    did not tell its models.
    """

    finding: Finding
    windows: Mapping[str, int | None] = field(default_factory=dict)


async def probe(client: UpstreamClient, url: str, headers: Mapping[str, str], timeout_s: float) -> Probe:
    """GET /health, which alone decides, then /v1/models; each within `timeout_s`."""
    try:
        status, _ = await client.get_json(f"{url}/health", headers, timeout_s)
    except UpstreamFailed as error:
        refused = isinstance(error, Unreachable) and not isinstance(error, ConnectTimedOut)
        return Probe(Finding.REFUSED if refused else Finding.SILENT)
    if status != 200:
        return Probe(Finding.UNWELL)
    try:
        status, models = await client.get_json(f"{url}/v1/models", headers, timeout_s)
    except UpstreamFailed:
        return Probe(Finding.WELL)
    return Probe(Finding.WELL, windows_of(models) if status == 200 else {})


def windows_of(models: Any) -> dict[str, int | None]:
    """Model names and windows from a `/v1/models` document; entries of another shape are left out."""
    entries = models.get("data") if isinstance(models, dict) else None
    windows: dict[str, int | None] = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(name := entry.get("id"), str):
            window = entry.get("max_model_len")
            windows[name] = window if isinstance(window, int) else None
    return windows
