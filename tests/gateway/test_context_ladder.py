"""A step of a budget's ladder makes compactions cheaper to decide on: they come earlier, and go deeper."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from ctxgate.gateway.config import Context
from ctxgate.gateway.pipeline import Pipeline
from support import twin
from support.gateway import MODEL, Gateway, config, until
from support.long_chats import long_chat, requests_of
from support.recorder import recording

if TYPE_CHECKING:
    from pathlib import Path

    from ctxgate.gateway.flow import Allowed, Identified

pytestmark = pytest.mark.integration

CONTEXT = Context(summarizer="extractive", tail_tokens=800, summary_tokens=300, recall=False)


async def turns_until_a_compaction(
    folder: Path, harder: Fraction | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> int:
    """How many requests of a conversation far from its window pass before one is compacted for a reason."""
    allow = Pipeline.allow

    def allowed(pipeline: Pipeline, identified: Identified) -> Allowed:
        found = allow(pipeline, identified)
        return found if harder is None else replace(found, harder=harder)

    monkeypatch.setattr(Pipeline, "allow", allowed)
    async with twin.serving(max_model_len=65_536) as engine, recording(engine.url) as recorder:
        gateway = await Gateway.start(
            config(folder / "l.db", [recorder.url], served_name="tiny", context=CONTEXT)
        )
        try:
            await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
            for number, history in enumerate(requests_of(long_chat(60))):
                body = {"model": MODEL, "messages": history, "max_tokens": 2}
                assert (await gateway.post(body)).status == 200
                await until(lambda: not gateway.services.context.compactor.busy)
                metrics = await gateway.metrics()
                if any(f'reason="{reason}"' in name and value for name, value in metrics.items()):
                    return number
        finally:
            await gateway.stop()
    raise AssertionError("never compacted")


async def test_the_ladder_brings_a_compaction_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, harder, reason in (
        ("usual", None, "money"),
        ("one", Fraction(1), "money"),
        ("harder", Fraction(1, 4), "ladder"),
    ):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            found.append(await turns_until_a_compaction(tmp_path / name, harder, reason, patch))
    usual, one, harder_one = found
    assert usual == one
    assert harder_one < usual
