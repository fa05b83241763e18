"""Replays against a scripted server: what is sent, what is measured, how failures are told."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from ctxgate.gateway.demo_servers import ctxgate_command
from ctxgate.gateway.perturb import Perturbation
from ctxgate.gateway.replay import Total, summarize
from ctxgate.gateway.replay_client import (
    AnswerFailed,
    Backend,
    BackendError,
    ServedModel,
    StreamReader,
    TaskCost,
    nano,
)
from ctxgate.gateway.replay_run import Plan, Player
from ctxgate.gateway.sessions import Message, Session, Tool
from ctxgate.inference.oracle import PrefixOracle
from support.chat_server import answer, chunk, events, plain, running, usage

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

TOOL: Tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


def session(name: str = "s", turns: int = 3) -> Session:
    messages: list[Message] = [{"role": "system", "content": "sys"}]
    for number in range(turns):
        messages += [
            {"role": "user", "content": f"u{number}"},
            {"role": "assistant", "content": f"a{number}"},
        ]
    return Session(name, (TOOL,), tuple(messages))


def count(messages: Any, tools: Any) -> list[int]:
    """A tokenizer that sees 10 tokens in each message and none in the tools."""
    return [hash((str(message), at)) % 2**32 for message in messages for at in range(10)]


async def test_one_request_per_assistant_message_with_all_that_came_before() -> None:
    async with running() as (server, backend):
        (played,) = await Player(backend, Plan("m", task_prefix="run1/")).play([session()])
    assert [len(body["messages"]) for body, _ in server.asked] == [2, 4, 6]
    body, headers = server.asked[1]
    assert body == {
        "model": "m",
        "messages": list(session().messages[:4]),
        "tools": [TOOL],
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert headers["x-ctxgate-task"] == "run1/s"
    assert headers["Authorization"] == "Bearer sk-1"
    assert played.task == "run1/s"
    assert [measure.usage.cached.value for measure in played.measures] == [10, 30, 50]


async def test_sums_of_a_streamed_run() -> None:
    async with running() as (_, backend):
        player = Player(backend, Plan("m"), oracle=PrefixOracle(8), tokenize=count)
        sums = summarize(await player.play([session()]))
    # Prompts of 20, 40, 60 tokens; earlier prompts leave 0, 16 and 40 tokens in whole blocks of 8.
    assert (sums.prompt, sums.cached, sums.output) == (Total(120), Total(90), Total(6))
    assert sums.oracle == Total(56)
    assert not sums.drifted
    assert sums.ttft_p50_s is not None
    assert sums.cost_nano == Total(None, missing=3)


async def test_without_streaming_there_is_no_ttft_and_the_same_usage() -> None:
    async with running() as (server, backend):
        sums = summarize(await Player(backend, Plan("m", stream=False)).play([session()]))
    assert (sums.prompt, sums.cached, sums.output) == (Total(120), Total(90), Total(6))
    assert sums.ttft_p50_s is None
    assert "stream_options" not in server.asked[0][0]


async def test_no_tools_means_no_tools_field() -> None:
    async with running() as (server, backend):
        await Player(backend, Plan("m")).play([Session("s", (), session().messages)])
    assert "tools" not in server.asked[0][0]


async def test_the_first_token_is_not_the_role_chunk() -> None:
    reader = StreamReader()
    assert not reader.add(json.dumps(chunk({"role": "assistant"})).encode())
    assert not reader.add(json.dumps(chunk({"role": "assistant", "content": ""})).encode())
    assert reader.add(json.dumps(chunk({"reasoning": "hm"})).encode())
    assert reader.add(json.dumps(chunk({"tool_calls": [{"index": 0}]})).encode())
    assert reader.add(json.dumps(chunk({}, "stop")).encode())
    assert not reader.done
    assert not reader.add(b"[DONE]")
    assert reader.done


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (events(chunk({"content": "x"}), done=False), "the stream ended without [DONE]"),
        (
            events(chunk({"content": "x"}), {"error": {"message": "engine died", "code": 500}}),
            "error inside the stream: engine died",
        ),
        (b"data: {oops\n\n", "the stream carries an event that is not JSON"),
        (b"data: 3\n\n", "the stream carries an event that is no object"),
    ],
)
async def test_a_stream_that_ends_badly_is_a_failure(raw: bytes, error: str) -> None:
    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return await answer(request, raw)

    async with running(handler) as (_, backend):
        (played,) = await Player(backend, Plan("m")).play([session(turns=1)])
    assert [measure.error for measure in played.measures] == [error]
    assert played.measures[0].usage.prompt is None


async def test_a_cut_connection_is_a_failure() -> None:
    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = await answer(request, events(chunk({"content": "x"}), done=False))
        assert request.transport is not None
        request.transport.abort()
        return response

    async with running(handler) as (_, backend):
        (played,) = await Player(backend, Plan("m")).play([session(turns=1)])
    assert played.measures[0].error is not None


async def test_a_refusal_names_status_and_message_and_the_session_goes_on() -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(body["messages"]) == 4:
            return web.json_response({"error": {"message": "busy", "type": "x"}}, status=503)
        return await plain(request, body)

    async with running(handler) as (_, backend):
        (played,) = await Player(backend, Plan("m")).play([session()])
    assert [measure.error for measure in played.measures] == [None, "HTTP 503: busy", None]
    assert summarize([played]).failed == 1


async def test_a_session_is_given_up_after_three_failures_in_a_row() -> None:
    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        raise web.HTTPInternalServerError

    async with running(handler) as (server, backend):
        played = await Player(backend, Plan("m")).play([session("a", 9), session("b", 2)])
    assert [len(each.measures) for each in played] == [3, 2]
    assert played[0].stopped == "given up after 3 failures in a row"
    assert played[0].measures[0].error == "HTTP 500"
    assert len(server.asked) == 5


async def test_a_prompt_that_no_longer_fits_is_not_sent() -> None:
    async with running() as (server, backend):
        player = Player(backend, Plan("m", max_context=40), tokenize=count)
        (played,) = await player.play([session()])
    # 40 tokens leave no room for one token of output.
    assert len(server.asked) == 1
    assert played.stopped == "the next prompt no longer fits 40 tokens"


async def test_the_local_count_follows_the_servers() -> None:
    """The server counts 10 per message, the local tokenizer 6: 24 local tokens are 40 on the server."""

    def low(messages: Any, _: Any) -> list[int]:
        return [0] * 6 * len(messages)

    async with running() as (server, backend):
        player = Player(backend, Plan("m", max_context=39), tokenize=low)
        (played,) = await player.play([session()])
    assert len(server.asked) == 1
    assert summarize([played]).drifted


@pytest.mark.parametrize(
    "error",
    [
        {"message": "This model's maximum context length is 2048 tokens. However, your prompt contains 3000"},
        {
            "message": "The decoder prompt (length 2048) plus the number of requested output tokens "
            "(at least 1) is longer than the maximum model length of 2048."
        },
        {"message": "Zu lang.", "code": "context_length_exceeded"},
    ],
)
async def test_the_servers_own_limit_ends_a_session_without_failure(error: dict[str, str]) -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(body["messages"]) > 3:
            return web.json_response({"error": error}, status=400)
        return await plain(request, body)

    async with running(handler) as (_, backend):
        (played,) = await Player(backend, Plan("m")).play([session()])
    assert (len(played.measures), summarize([played]).failed) == (1, 0)
    assert played.stopped is not None
    assert played.stopped.startswith("the server says that the next prompt no longer fits: HTTP 400: ")


async def test_max_requests_bounds_each_session() -> None:
    async with running() as (server, backend):
        played = await Player(backend, Plan("m", max_requests=2)).play([session("a"), session("b", 1)])
    assert [len(each.measures) for each in played] == [2, 1]
    assert played[0].stopped == "stopped after --max-requests 2"
    assert played[1].stopped is None
    assert len(server.asked) == 3


async def test_sessions_run_side_by_side_up_to_the_given_number() -> None:
    at_once, most, together = 0, 0, asyncio.Barrier(2)

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await together.wait()
        at_once -= 1
        return await plain(request, body)

    async with running(handler) as (_, backend):
        names = [f"s{number}" for number in range(4)]
        played = await Player(backend, Plan("m", concurrency=2)).play([session(name) for name in names])
    assert most == 2
    assert [each.session for each in played] == names
    assert [len(each.measures) for each in played] == [3] * 4


async def test_perturbations_reach_the_wire() -> None:
    async with running() as (server, backend):
        plan = Plan("m", perturbations=frozenset({Perturbation.CLOCK, Perturbation.LATE_TOOL}))
        await Player(backend, plan).play([session(turns=2)])
    heads = [body["messages"][0]["content"] for body, _ in server.asked]
    assert heads == ["sys\nCurrent time: 2026-01-05T09:00:00Z", "sys\nCurrent time: 2026-01-05T09:00:47Z"]
    assert [len(body["tools"]) for body, _ in server.asked] == [1, 2]


async def test_cost_comes_with_the_usage_or_in_the_header() -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["stream"]:
            return await answer(request, events({"choices": [], "usage": usage(10, 0, 2, cost=0.000001234)}))
        headers = {"x-ctxgate-cost": "0.5"}
        return web.json_response({"choices": [], "usage": usage(10, 0, 2)}, headers=headers)

    async with running(handler) as (_, backend):
        streamed = await Player(backend, Plan("m")).play([session(turns=2)])
        whole = await Player(backend, Plan("m", stream=False)).play([session(turns=2)])
    assert summarize(streamed).cost_nano == Total(2468)
    assert summarize(whole).cost_nano == Total(1_000_000_000)


def row(group: str, requests: int, cost: int) -> dict[str, Any]:
    return {"group": group, "requests": requests, "cost_nano": cost, "unknown_cost": 0}


async def test_cost_is_what_the_ledger_gained_once_all_requests_are_settled() -> None:
    async with running() as (server, backend):
        server.ledger = [[row("s", 4, 100)], [row("s", 6, 170)], [row("s", 7, 190), row("else", 1, 5)]]
        played = await Player(backend, Plan("m")).play([session()])
    assert summarize(played).cost_nano == Total(90)


def test_amounts_become_nano_dollars() -> None:
    assert [nano(each) for each in ("0.011684", 0, "x", None, True, "NaN")] == [
        11_684_000,
        0,
        None,
        None,
        None,
        None,
    ]


async def test_the_backend_tells_models_and_block_size() -> None:
    async with running() as (server, backend):
        server.metrics = (
            "# TYPE vllm:cache_config_info gauge\n"
            'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",hash_block_size="8"} 1.0\n'
        )
        assert await backend.models() == [ServedModel("m", 2048), ServedModel("n", None)]
        assert await backend.block_size() == 32
        server.metrics = "ctxgate_requests_total 3\n"
        assert await backend.block_size() is None
        assert await backend.costs_by_task() is None


async def test_costs_by_task_come_from_all_pages_and_add_up_over_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ctxgate.gateway.replay_client._PAGE", 2)
    async with running() as (server, backend):
        server.ledger = [
            [
                {"group": "t1", "key_id": "ci", "requests": 1, "cost_nano": 5, "unknown_cost": 0},
                {"group": "t2", "key_id": "ci", "requests": 2, "cost_nano": 4, "unknown_cost": 0},
                {"group": "t1", "key_id": "dev", "requests": 3, "cost_nano": 2, "unknown_cost": 1},
            ]
        ]
        assert await backend.costs_by_task() == {"t1": TaskCost(4, 7, False), "t2": TaskCost(2, 4, True)}


async def test_a_server_that_is_no_server() -> None:
    async with Backend("http://127.0.0.1:9", "k") as backend:
        with pytest.raises(BackendError, match=r"no answer from http://127\.0\.0\.1:9/v1/models"):
            await backend.models()
        with pytest.raises(AnswerFailed):
            await backend.chat(b"{}", stream=False, headers={})
    async with running() as (server, backend):
        server.models = {"models": []}
        with pytest.raises(BackendError, match="not a list of models"):
            await backend.models()


async def test_an_interrupted_replay_shows_what_it_has_measured(tmp_path: Path) -> None:
    asked_again = asyncio.Event()

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(body["messages"]) == 2:
            return await plain(request, body)
        asked_again.set()
        return await answer(request, events(chunk({"content": "x"}), done=False))

    async def never_ending(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await handler(request, body)
        if asked_again.is_set():
            await asyncio.Event().wait()
        return response

    lines = [{"session": "s", "tools": []}, *session().messages]
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with running(never_ending) as (_, backend):
        child = await asyncio.create_subprocess_exec(
            *ctxgate_command(["replay", str(path), "--to", backend.root]),
            stdout=asyncio.subprocess.PIPE,
            # A shell starts its background jobs with SIGINT ignored, and so are their children's.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        await asked_again.wait()
        child.send_signal(signal.SIGINT)
        out, _ = await child.communicate()
    assert child.returncode == 130
    assert out.decode().splitlines()[2].split()[:4] == ["s", "1", "20", "10"]
