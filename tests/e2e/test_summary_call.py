"""The summary call on real engines: it reads its prompt from the cache, and every token of it is booked."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.pool_probe import examine
from ctxgate.gateway.summarizing import FALLBACKS, summarize
from e2e.engine import BLOCK_SIZE, SERVED_NAME
from e2e.gateway_process import booked, settled_counters
from support.gateway import MODEL, Gateway, config
from support.summaries import NOTES, TOOLS, conversation, work_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from ctxgate.gateway.ledger import Attempt
    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

TEMPLATES: Final = Path(__file__).parent / "templates"
ROUNDS: Final = 120  # with their results some 20,000 tokens
POOL: Final = {"cache_isolation": "team"}


@asynccontextmanager
async def serving(engine: Engine, folder: Path) -> AsyncIterator[Gateway]:
    store = folder / f"{engine.name}.db"
    gateway = await Gateway.start(config(store, [engine.url], pool=POOL, served_name=SERVED_NAME))
    try:
        yield gateway
    finally:
        await gateway.stop()


async def summarized(gateway: Gateway, engine: Engine, **more: Any) -> list[Attempt]:
    """One turn of a long conversation, its summary, the next turn; what they used, against the counters."""
    messages = conversation(ROUNDS)
    before = settled_counters(engine)
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, **more}
    assert (await gateway.post(body)).status == 200
    work = await work_of(gateway.services, messages, budget=900, **more)
    found = await summarize(gateway.services, work, "warm_suffix")
    assert found is not None
    assert set(found.fallbacks) <= set(FALLBACKS)
    later = [*messages, {"role": "assistant", "content": NOTES}, {"role": "user", "content": "go on"}]
    assert (await gateway.post(body | {"messages": later})).status == 200
    rows = await gateway.rows()
    assert booked(rows) == settled_counters(engine) - before
    assert [row.opened.purpose for row in rows] == ["answer", "summary", "answer"]
    assert [row.opened.estimated_prompt_tokens is not None for row in rows] == [True] * 3
    assert {row.settled.outcome for row in rows} == {Outcome.COMPLETED}
    return rows


def check_hits(rows: list[Attempt]) -> None:
    """The summary finds all that the turn before it left in the cache; so does the turn after it."""
    turn, summary, later = [row.settled.usage for row in rows]
    assert turn.prompt is not None
    assert summary.prompt is not None
    assert summary.cached.value is not None
    assert later.cached.value is not None
    # The generation prompt is the only part of the first prompt that the second does not begin with.
    shared = (turn.prompt - BLOCK_SIZE) // BLOCK_SIZE * BLOCK_SIZE
    assert summary.cached.value >= shared
    assert summary.cached.value >= 0.95 * summary.prompt
    assert later.cached.value >= shared
    print(f"summary: {summary.cached.value} of {summary.prompt} tokens cached")  # noqa: T201  # figures for the log


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_gateways_n1_it_reads_its_prompt_from_the_cache(
    engines: Mapping[str, Engine], tmp_path: Path, more: dict[str, Any]
) -> None:
    engine = engines["standard"]
    async with serving(engine, tmp_path) as gateway:
        check_hits(await summarized(gateway, engine, **more))
        record = gateway.services.fleet.record("standard", "standard-0")
        assert await gateway.services.tool_refusal.is_free(gateway.services, record, SERVED_NAME)


async def test_tools_are_not_refused_where_that_would_change_the_prompt(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start_engine("excluding", "--exclude-tools-when-tool-choice-none")
    async with serving(engine, tmp_path) as gateway:
        check_hits(await summarized(gateway, engine, tools=TOOLS))
        record = gateway.services.fleet.record("standard", "standard-0")
        assert not await gateway.services.tool_refusal.is_free(gateway.services, record, SERVED_NAME)


async def test_gateways_n1_a_template_that_would_print_the_prompt_anew_is_known(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """Not probed, the call reads most of its prompt anew; once probed it is not made."""
    engine = start_engine("thinking", "--chat-template", str(TEMPLATES / "thinking.jinja"))
    async with serving(engine, tmp_path) as gateway:
        messages = conversation(ROUNDS // 4)[:-2]
        for message in messages:
            if message["role"] == "assistant":
                message["reasoning"] = "I think of this and that before I call the tool."
        body = {"model": MODEL, "messages": messages, "max_tokens": 4}
        assert (await gateway.post(body)).status == 200
        work = await work_of(gateway.services, messages)
        found = await summarize(gateway.services, work, "warm_suffix")
        assert found is not None
        summary = (await gateway.rows())[-1]
        assert summary.opened.purpose == "summary"
        assert summary.settled.usage.prompt is not None
        assert summary.settled.usage.cached.value is not None
        assert summary.settled.usage.cached.value < 0.5 * summary.settled.usage.prompt
        await examine(gateway.services, gateway.services.fleet.record("standard", "standard-0"))
        calls = len(await gateway.rows())
        found = await summarize(gateway.services, work, "warm_suffix")
        assert found is not None
        assert (found.by, found.fallbacks) == ("extractive", ("cold",))
        assert len(await gateway.rows()) == calls
