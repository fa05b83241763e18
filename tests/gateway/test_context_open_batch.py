"""A turn whose many tool results are all of one message: none may be left out, all may be shortened."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.gateway.archive import reference_of
from ctxgate.gateway.config import Context
from ctxgate.gateway.ledger import Outcome
from support import twin
from support.gateway import MODEL, Gateway, bearer, config, until
from support.long_chats import SYSTEM, TASK
from support.recorder import recording

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.client import Answer
    from support.recorder import Recorder

pytestmark = pytest.mark.integration
WINDOW: Final = 4096


def open_batch(results: int, lines: int) -> list[dict[str, Any]]:
    calls, answers = [], []
    for number in range(results):
        function = {"name": "read", "arguments": json.dumps({"path": f"src/part_{number}.py"})}
        calls.append({"id": f"c{number}", "type": "function", "function": function})
        text = "\n".join(f"row {number}.{line} holds lorem ipsum dolor" for line in range(lines))
        answers.append({"role": "tool", "tool_call_id": f"c{number}", "content": text})
    return [SYSTEM, TASK, {"role": "assistant", "content": None, "tool_calls": calls}, *answers]


@asynccontextmanager
async def gateway_of(folder: Path, recorder: Recorder, mode: str) -> AsyncIterator[Gateway]:
    context = Context(
        tail_tokens=800, summary_tokens=300, summarizer="extractive", recall=False, compaction=mode
    )
    found = await Gateway.start(
        config(folder / "ledger.db", [recorder.url], served_name="tiny", context=context)
    )
    try:
        await until(lambda: all(record.windows for record in found.services.fleet.records()))
        yield found
    finally:
        await found.stop()


async def send(gateway: Gateway, messages: list[dict[str, Any]], **more: Any) -> Answer:
    body = {"model": MODEL, "messages": messages, "max_tokens": 2} | more
    answer = await gateway.post(body, headers=(bearer(),))
    compactor = gateway.services.context.compactor
    await until(lambda: not compactor.busy and not gateway.services.background)
    return answer


def originals(gateway: Gateway, messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results by the id under which the archive must have them."""
    raws = [json.dumps(message).encode() for message in messages]
    facts = gateway.services.layout.memory.views.messages("acme/alpha", raws)
    return {reference_of("acme/alpha", facts[at].lasting): messages[at] for at in range(3, len(messages))}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["window", "auto"])
async def test_150_open_results_beyond_the_window_are_refused_and_nothing_is_lost(
    tmp_path: Path, mode: str, stream: bool
) -> None:
    """The references alone are longer than the window, whatever the results are cut to."""
    messages = open_batch(150, 20)
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder, mode) as gateway,
    ):
        answer = await send(gateway, messages, stream=stream)
        assert answer.status == 400
        error = json.loads(answer.body)["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "invalid_request_error"
        assert "maximum context length is 4096 tokens" in error["message"]
        left = "left out 0 messages and shortened 150; the 153 that must stay, 150 of them results of tools"
        assert left in error["message"]
        assert [status for _, status in recorder.asked] == [400]
        sent = recorder.asked[0][0]["messages"]
        assert [one.get("tool_call_id") for one in sent] == [one.get("tool_call_id") for one in messages]
        rows = await gateway.rows()
        assert [row.settled.outcome for row in rows] == [Outcome.REJECTED]
        assert [(row.settled.usage.prompt, row.settled.charge.total) for row in rows] == [(0, 0)]
        assert not gateway.services.attempts
        # No engine took a prompt with references: none may need an original, and the client has them all.
        archive = gateway.services.archive
        ids = originals(gateway, messages)
        assert len(ids) == 150
        assert [id_ for id_ in ids if await archive.get("acme/alpha", id_) is not None] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["window", "auto"])
async def test_open_results_that_fit_once_they_are_shortened_go_out(
    tmp_path: Path, mode: str, stream: bool
) -> None:
    """Each keeps its place, its head and its tail or a reference, and its original."""
    messages = open_batch(50, 60)
    async with (
        twin.serving(max_model_len=WINDOW) as engine,
        recording(engine.url) as recorder,
        gateway_of(tmp_path, recorder, mode) as gateway,
    ):
        assert (await send(gateway, messages, stream=stream)).status == 200
        sent = recorder.answered()[-1]
        assert sent[:3] == messages[:3]
        for id_, message in originals(gateway, messages).items():
            shown = next(one for one in sent if one.get("tool_call_id") == message["tool_call_id"])
            assert id_ in shown["content"]
            found = await gateway.services.archive.get("acme/alpha", id_)
            assert found is not None
            assert json.loads(found) == message
        last = sent[-1]["content"]
        assert last.startswith("row 49.0 holds")
        assert last.endswith("row 49.59 holds lorem ipsum dolor")
        assert [row.settled.outcome for row in await gateway.rows()][-1] is Outcome.COMPLETED
        assert not gateway.services.attempts
