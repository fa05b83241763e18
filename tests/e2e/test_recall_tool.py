"""A look-up on a real engine: its parser finds the call, the answer goes on from the cache, all is booked.

A model of random weights calls nothing by itself, so its output is held to the text of one call.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.compression.recall_tool import NAME
from ctxgate.gateway.ledger import Outcome
from e2e.engine import BLOCK_SIZE, SERVED_NAME
from e2e.gateway_process import booked, settled_counters
from support.gateway import Gateway, config
from support.looking_up import CONTEXT, NEEDLE, READ, RESULT, Agent, extends
from support.recorder import recording
from support.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

POOL: Final = {"cache_isolation": "team"}
CALL: Final = {"name": NAME, "arguments": {"query": "the deploy key of the mirror"}}
HELD: Final = {"choice": [f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_goes_on_from_the_cache_and_the_ledger_is_the_engines_count(
    engines: Mapping[str, Engine], tmp_path: Path, stream: bool
) -> None:
    engine = engines["standard"]
    before = settled_counters(engine)
    task = {"role": "user", "content": f"Find the key of the mirror. Stream: {stream}. " + "Look well. " * 60}
    async with recording(engine.url) as recorder:
        gateway = await Gateway.start(
            config(tmp_path / "l.db", [recorder.url], pool=POOL, served_name=SERVED_NAME, context=CONTEXT)
        )
        try:
            one = Agent(gateway, Upstream(), stream, [task], {"max_tokens": 8})
            assert (await one.ask()).status == 200
            one.messages = [task, READ, RESULT]
            one.options = {"structured_outputs": HELD, "max_tokens": 2000}
            answer = await one.ask()
            assert answer.status == 200, answer.body
            assert NAME.encode() not in answer.body
            one.options = {"max_tokens": 8}
            assert (await one.ask({"role": "user", "content": "Go on."})).status == 200
            rows = sorted(await gateway.rows(), key=lambda row: row.opened.opened_at_us)
        finally:
            await gateway.stop()
    prompts: list[list[dict[str, Any]]] = recorder.answered()
    assert extends(prompts[1:])
    assert NEEDLE in json.dumps(prompts[2])
    assert NEEDLE not in json.dumps(prompts[1])
    assert [row.opened.purpose for row in rows] == ["answer", "answer", *["recall"] * 5, "answer"]
    assert {row.settled.outcome for row in rows} == {Outcome.COMPLETED}
    assert booked(rows) == settled_counters(engine) - before
    told = answer.documents[-1]["usage"] if stream else answer.document["usage"]
    assert told["prompt_tokens"] == sum(row.settled.usage.prompt or 0 for row in rows[1:7])
    assert [each["prompt_tokens"] for each in told["iterations"]] == [
        row.settled.usage.prompt for row in rows[1:7]
    ]
    usages = [row.settled.usage for row in rows[1:]]
    # The last of them goes out without the tool, as the model heeds no refusal; what follows has it again.
    for first, second in ((0, 1), (1, 2), (2, 3), (3, 4), (4, 6)):
        prompt, cached = usages[first].prompt, usages[second].cached.value
        assert prompt is not None
        assert cached is not None
        assert cached >= (prompt - BLOCK_SIZE) // BLOCK_SIZE * BLOCK_SIZE
