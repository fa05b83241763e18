"""What was dropped comes back where it is asked for, through the whole gateway in front of the twin."""

from __future__ import annotations

import json
import sqlite3
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.recall_snippet import HEADING
from ctxgate.gateway.config import Context
from support import twin
from support.gateway import MODEL, Gateway, bearer, config, until
from support.long_chats import long_chat
from support.recorder import Recorder, recording

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.integration

WINDOW = 16_384
CONTEXT = Context(tail_tokens=1_500, summary_tokens=300, summarizer="off", recall_tokens=300)
NEEDLE = "The mirror's deploy key is kx-77421-zulu; it stands in infra/keys/mirror.yaml."
QUESTION = {"role": "user", "content": "Which key does infra/keys/mirror.yaml hold?"}
HISTORY = [
    *long_chat(0),
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {
                "id": "needle",
                "type": "function",
                "function": {"name": "read", "arguments": '{"path": "notes"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "needle", "content": NEEDLE + " lorem ipsum" * 40},
    *long_chat(90)[2:],
]


@asynccontextmanager
async def gateway_of(folder: Path, recorder: Recorder) -> AsyncIterator[Gateway]:
    found = await Gateway.start(
        config(folder / "ledger.db", [recorder.url], served_name="tiny", context=CONTEXT)
    )
    try:
        await until(lambda: all(record.windows for record in found.services.fleet.records()))
        yield found
    finally:
        await found.stop()


async def sent(gateway: Gateway, recorder: Recorder, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that one request went out with."""
    at = len(recorder.asked)
    answer = await gateway.post({"model": MODEL, "messages": messages, "max_tokens": 2}, headers=(bearer(),))
    assert answer.status == 200
    await until(lambda: not gateway.services.background)
    await gateway.services.recall.settled()
    found: list[dict[str, Any]] = recorder.asked[at][0]["messages"]
    return found


async def indexed(gateway: Gateway) -> None:
    """Wait until what was dropped is found."""
    recall = gateway.services.recall
    with closing(sqlite3.connect(gateway.services.config.store)) as connection:
        [(root,)] = connection.execute(
            "SELECT DISTINCT conversation FROM archive_uses WHERE conversation <> x''"
        ).fetchall()
    while True:
        found = await recall.query("acme/alpha", root, QUESTION["content"], 5, 1_000, 60.0)
        if found is not None and NEEDLE in found.text:
            return


async def test_a_dropped_fact_comes_back_where_it_is_asked_for_and_stays(tmp_path: Path) -> None:
    async with twin.serving(max_model_len=WINDOW) as engine, recording(engine.url) as recorder:
        async with gateway_of(tmp_path, recorder) as gateway:
            first = await sent(gateway, recorder, HISTORY)
            assert NEEDLE not in json.dumps(first)
            await indexed(gateway)
            asked = [*HISTORY, {"role": "assistant", "content": "Done."}, QUESTION]
            second = await sent(gateway, recorder, asked)
            assert second[: len(first)] == first
            question = second[-1]["content"]
            assert question.startswith(QUESTION["content"])
            assert HEADING in question
            assert NEEDLE in question
            metrics = await gateway.metrics()
            assert metrics['ctxgate_recalls_total{outcome="recalled"}'] >= 1
            more = [
                *asked,
                {"role": "assistant", "content": "It is that."},
                {"role": "user", "content": "On."},
            ]
            third = await sent(gateway, recorder, more)
            assert third[: len(second)] == second
        async with gateway_of(tmp_path, recorder) as restarted:
            assert await sent(restarted, recorder, more) == third
            reference = question[question.index(HEADING) :].split("]\n[tool ")[1][:24]
            original = (await restarted.get(f"/v1/context/{reference}")).document["original"]
            assert original == HISTORY[3]
