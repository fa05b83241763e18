"""What ends a request early on the twin: aborts by id, clients that leave, a full queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.twin import CHAT, STUCK, TEXT, USAGE, Client, chat, event, rest, serving, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.integration


@pytest.fixture
async def stuck() -> AsyncIterator[Client]:
    """One sequence at a time, and the one that runs makes one token only."""
    async with serving(profile=replace(STUCK, max_num_seqs=1)) as client:
        yield client


async def test_a_running_stream_is_aborted_by_its_id(stuck: Client) -> None:
    async with stuck.open(CHAT, chat() | USAGE, "mine") as answer:
        assert (await event(answer))["choices"][0]["delta"]["role"] == "assistant"
        assert (await event(answer))["choices"][0]["delta"]["content"]
        await stuck.ok("/inference/v1/abort_requests", {"request_ids": ["nobody", "chatcmpl-mine"]})
        finish, usage = await rest(answer)
    assert finish["choices"][0]["finish_reason"] == "abort"
    assert usage["usage"]["completion_tokens"] == await stuck.metric("generation_tokens_total") == 1
    assert usage["usage"]["prompt_tokens"] == await stuck.metric("prompt_tokens_total")
    assert usage["metrics"]["queue_time_ms"] >= 0
    assert await stuck.metric("request_success_total") == 0


async def test_a_queued_stream_aborted_was_never_computed(stuck: Client) -> None:
    async with stuck.open(CHAT, chat(stream=True)) as running:
        await event(running)
        prompt = await stuck.metric("prompt_tokens_total")
        async with stuck.open(CHAT, chat() | USAGE, "queued") as answer:
            await stuck.until(running=1, waiting=1)
            await stuck.ok("/inference/v1/abort_requests", {"request_ids": ["chatcmpl-queued"]})
            role, usage = await rest(answer)
        assert role["choices"][0] == {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        assert usage["usage"]["completion_tokens"] == 0
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "created_cache_tokens": 0}
        assert usage["metrics"] == {}
        assert await stuck.metric("prompt_tokens_total") == prompt


async def test_a_queued_whole_answer_aborted(stuck: Client) -> None:
    async with stuck.open(CHAT, chat(stream=True)) as running:
        await event(running)
        asked = asyncio.create_task(stuck.ok(CHAT, chat(), "queued"))
        await stuck.until(running=1, waiting=1)
        await stuck.ok("/inference/v1/abort_requests", {"request_ids": ["chatcmpl-queued"]})
        answer = await asked
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 0
    assert set(answer["metrics"].values()) == {None}


async def test_a_completion_is_aborted_with_the_prompts_number(stuck: Client) -> None:
    async with stuck.open(TEXT, text() | USAGE, "mine") as answer:
        await event(answer)
        await stuck.ok("/inference/v1/abort_requests", {"request_ids": ["cmpl-mine"]})
        await stuck.ok("/tokenize", {"prompt": "x"})  # the loop has turned since
        assert await stuck.metric("num_requests_running") == 1
        await stuck.ok("/inference/v1/abort_requests", {"request_ids": ["cmpl-mine-0"]})
        finish, usage = await rest(answer)
    assert finish["choices"][0]["finish_reason"] == "abort"
    assert usage["usage"]["completion_tokens"] == 1


async def test_a_client_that_leaves_a_stream_frees_its_sequence(stuck: Client) -> None:
    async with stuck.open(CHAT, chat(stream=True)) as answer:
        await event(answer)
        await event(answer)
        assert await stuck.metric("num_requests_running") == 1
        answer.close()
    await stuck.until(running=0, waiting=0)
    assert await stuck.metric("generation_tokens_total") == 1
    assert await stuck.metric("request_success_total") == 0
    assert stuck.server.in_flight == 0


async def test_a_client_that_leaves_a_whole_answer_frees_its_sequence(stuck: Client) -> None:
    asked = asyncio.create_task(stuck.post(CHAT, chat()))
    await stuck.until(running=1, waiting=0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await stuck.until(running=0, waiting=0)
    assert stuck.server.in_flight == 0


async def test_the_queue_limit_refuses_before_the_stream_begins() -> None:
    settings = {"profile": replace(STUCK, max_num_seqs=1), "max_num_queued_reqs": 2}
    async with serving(**settings) as client, client.open(CHAT, chat(stream=True)) as running:
        await event(running)
        status, answer = await client.post(CHAT, chat(stream=True, n=2))
        assert status == 503
        assert answer["error"]["type"] == "Service Unavailable"
        assert answer["error"]["message"].startswith("The engine is currently busy")
        async with client.open(CHAT, chat(stream=True)):
            await client.until(running=1, waiting=1)
