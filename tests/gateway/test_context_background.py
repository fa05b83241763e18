"""Compactions in the background of a conversation that goes on."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.config import Context
from ctxgate.gateway.summarizing import summarize
from support import twin
from support.gateway import MODEL, Gateway, config, until
from support.long_chats import SYSTEM, TASK, long_chat, requests_of
from support.recorder import recording

if TYPE_CHECKING:
    from pathlib import Path

    from ctxgate.gateway.services import Services
    from ctxgate.gateway.summarizing import Summarized
    from ctxgate.gateway.summary_work import SummaryWork

pytestmark = pytest.mark.integration

CONTEXT = Context(compaction="window", tail_tokens=800, summary_tokens=300, recall=False)


async def test_context_o2_o3_one_pass_at_a_time_and_what_is_said_meanwhile_stays(tmp_path: Path) -> None:
    """A second request comes above the trigger while the first one's pass is still under way."""
    begun: list[SummaryWork] = []
    go_on = asyncio.Event()

    async def slow(services: Services, work: SummaryWork, _: str) -> Summarized | None:
        begun.append(work)
        await go_on.wait()
        return await summarize(services, work, "extractive")

    async with twin.serving(max_model_len=8192) as engine, recording(engine.url) as recorder:
        gateway = await Gateway.start(
            config(tmp_path / "l.db", [recorder.url], served_name="tiny", context=CONTEXT)
        )
        try:
            await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
            compactor = gateway.services.context.compactor
            compactor._summarize = slow
            histories = iter(requests_of(long_chat(60)))
            meanwhile = next(histories)
            over = 0  # requests that were answered while a pass was under way
            while over < 2:
                over += compactor.busy
                meanwhile = next(histories)
                answer = await gateway.post({"model": MODEL, "messages": meanwhile, "max_tokens": 2})
                assert answer.status == 200
                assert recorder.answered()[-1] == meanwhile
            go_on.set()
            await until(lambda: not compactor.busy)
            assert len(begun) == 1
            after = next(histories)
            await gateway.post({"model": MODEL, "messages": after, "max_tokens": 2})
            metrics = await gateway.metrics()
        finally:
            await gateway.stop()
    sent = recorder.answered()[-1]
    assert sent[:2] == [SYSTEM, TASK]
    assert sent[2]["content"].startswith("[Record")
    dropped = len(begun[0].dropped)
    assert sent[3:] == after[2 + dropped :], "all that the pass did not see or did not drop"
    assert "You must always keep file 4 unchanged." in json.dumps(sent)
    made = {name: value for name, value in metrics.items() if "ctxgate_compactions_total" in name}
    assert list(made.values()) == [1]
