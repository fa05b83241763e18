"""A conversation is compacted because it is too long for its latency budget, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway import speeds
from ctxgate.gateway.config import Context
from ctxgate.routing.snapshot import Speed
from support import twin
from support.gateway import MODEL, Gateway, bearer, config, until
from support.long_chats import long_chat, requests_of
from support.recorder import recording

if TYPE_CHECKING:
    from pathlib import Path

    from ctxgate.routing.latency import Sample

pytestmark = pytest.mark.integration

CONTEXT = Context(summarizer="extractive", tail_tokens=800, summary_tokens=300, recall=False)
# 100 tokens behind 8,000 take 0.8 s, behind 1,500 they take 0.15 s.
SPEED = Speed(1e-9, 1e-6, 1e-3, 0.0, 0.0)


class Fixed:
    """A predictor that learns nothing."""

    def __init__(self, prior: Speed | None) -> None:
        self._prior = prior

    def observe(self, sample: Sample) -> None:
        """Leave the speed as it is."""

    def speed(self) -> Speed | None:
        return self._prior


async def compactions(folder: Path, *headers: tuple[str, str]) -> set[str]:
    """The reasons of the compactions of a conversation far from its window."""
    async with twin.serving(max_model_len=65_536) as engine, recording(engine.url) as recorder:
        gateway = await Gateway.start(
            config(
                folder / "l.db", [recorder.url], served_name="tiny", context=CONTEXT, pool={"speed": SPEED}
            )
        )
        try:
            await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
            for history in requests_of(long_chat(30)):
                body = {"model": MODEL, "messages": history, "max_tokens": 2}
                assert (await gateway.post(body, headers=[bearer(), *headers])).status == 200
                await until(lambda: not gateway.services.context.compactor.busy)
            metrics = await gateway.metrics()
        finally:
            await gateway.stop()
    return {name for name, value in metrics.items() if "ctxgate_compactions_total" in name and value}


async def test_a_prompt_too_long_for_its_budget_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "Predictor", Fixed)
    found = await compactions(tmp_path, ("x-ctxgate-ttft-ms", "400"))
    assert found
    assert all('reason="latency"' in name for name in found)


async def test_the_same_conversation_without_a_budget_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "Predictor", Fixed)
    assert not [name for name in await compactions(tmp_path) if 'reason="latency"' in name]
