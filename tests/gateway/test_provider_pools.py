"""Pools at hosted providers, through the whole gateway and the real LiteLLM, against a provider's wire."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Pool, Provider, Replica
from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.provider_wire import provider_url
from ctxgate.inference.usage import Certainty
from support.gateway import HELLO, MODEL, STREAM, Gateway, bearer, config, until
from support.provider import FakeProvider, Plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from ctxgate.gateway.config import Config

pytestmark = [  # looked for, not imported: it would do that without being told to fetch nothing
    pytest.mark.integration,
    pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra `providers`"),
]
READY_S = 120.0  # LiteLLM is imported meanwhile
OPENAI = "openai/gpt-4o-mini"
ANTHROPIC = "anthropic/claude-sonnet-4-5"
GEMINI = "gemini/gemini-2.0-flash"


@pytest.fixture
async def provider() -> AsyncIterator[FakeProvider]:
    async with FakeProvider() as server:
        yield server


def hosted(base: Config, model: str, url: str, *, kept: bool = False) -> Config:
    """The configuration with its pool at a provider; `kept`: behind its servers instead."""
    root = f"{url}/v1" if model == OPENAI else url
    pool = Pool(
        "hosted",
        (Replica("hosted-0", provider_url("hosted")),),
        base.pools["standard"].rates,
        abort=False,
        probe=False,
        load="off",
        provider=Provider(model, "sk-of-the-provider", root, 128_000),
    )
    pools = {**(dict(base.pools) if kept else {}), "hosted": pool}
    return replace(base, pools=pools, models={MODEL: replace(base.models[MODEL], pools=tuple(pools))})


@pytest.fixture
async def start(tmp_path: Path, provider: FakeProvider) -> AsyncIterator[Callable[[str], Awaitable[Gateway]]]:
    started: list[Gateway] = []

    async def begin(model: str) -> Gateway:
        gateway = await Gateway.start(hosted(config(tmp_path / "l.db", []), model, provider.url))
        started.append(gateway)
        (record,) = gateway.services.fleet.records()
        await until(lambda: record.windows, READY_S)
        return gateway

    yield begin
    for gateway in started:
        await gateway.stop()


def events(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_a_whole_answer_is_metered_and_only_known_parameters_go_out(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider
) -> None:
    gateway = await start(OPENAI)
    evil = {
        "api_base": "http://127.0.0.1:9",
        "mock_response": "made up",
        "api_key": "other",
        "extra_headers": {"x": "y"},
        "cache_salt": "s",
        "service_tier": "priority",
        "top_k": 3,
    }
    allowed = {k: v for k, v in evil.items() if k != "cache_salt"}
    message = {"role": "user", "content": "hello", "ctxgate": {"pin": True}}
    answer = await gateway.post(HELLO | allowed | {"messages": [message], "temperature": 0, "max_tokens": 9})
    assert answer.status == 200
    (call,) = provider.calls
    assert call.path == "/v1/chat/completions"
    assert call.headers["authorization"] == "Bearer sk-of-the-provider"
    assert call.body == {
        "model": "gpt-4o-mini",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 9,
    }
    document = json.loads(answer.body)
    assert document["model"] == MODEL
    assert document["choices"][0]["message"]["content"] == "Good day"
    usage = (await gateway.row()).settled.usage
    assert (usage.uncached.value, usage.cached.value, usage.output.value) == (56, 64, 5)
    assert {usage.uncached.certainty, usage.cached.certainty} == {Certainty.MEASURED}
    # 56 x 1000 + 64 x 100 + 5 x 2000 nano-dollars
    assert (await gateway.row()).settled.charge.total == 72_400
    assert gateway.services.fleet.record("hosted", "hosted-0").windows == {MODEL: 128_000}


async def test_a_stream_passes_piece_by_piece_and_its_usage_is_the_providers(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider
) -> None:
    gateway = await start(OPENAI)
    answer = await gateway.post(STREAM)
    *chunks, done = events(answer.body)
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "Good day"
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"
    assert all("usage" not in c for c in chunks)  # the client did not ask for it
    assert provider.calls[0].body["stream_options"] == {"include_usage": True}
    usage = (await gateway.row()).settled.usage
    assert (usage.uncached.value, usage.cached.value, usage.output.value) == (56, 64, 5)


async def test_usage_that_the_library_made_up_is_no_measurement(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider
) -> None:
    gateway = await start(OPENAI)
    provider.plans.append(Plan(usage=None))
    answer = await gateway.post(STREAM)
    assert events(answer.body)[-1] == "[DONE]"
    usage = (await gateway.row()).settled.usage
    assert Certainty.MEASURED not in {usage.uncached.certainty, usage.output.certainty}


@pytest.mark.parametrize("body", [HELLO, STREAM], ids=["whole", "stream"])
async def test_anthropic_usage_has_its_cached_and_written_tokens(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider, body: dict[str, Any]
) -> None:
    gateway = await start(ANTHROPIC)
    answer = await gateway.post(body)
    assert answer.status == 200
    assert b"Good " in answer.body
    assert provider.calls[0].path == "/v1/messages"
    assert provider.calls[0].headers["x-api-key"] == "sk-of-the-provider"
    usage = (await gateway.row()).settled.usage
    # 30 new, 10 written, 80 read
    assert (usage.uncached.value, usage.cached.value, usage.written.value) == (40, 80, 10)
    assert usage.output.value == 5


async def test_no_image_is_fetched_from_the_gateways_host(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider
) -> None:
    gateway = await start(ANTHROPIC)
    image = {"type": "image_url", "image_url": {"url": "http://192.0.2.1/x.png"}}
    answer = await gateway.post(HELLO | {"messages": [{"role": "user", "content": [image]}]})
    assert (answer.status, b"data: URLs only" in answer.body) == (400, True)
    assert not provider.calls


async def test_an_error_that_quotes_the_key_shows_none(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider
) -> None:
    gateway = await start(OPENAI)
    provider.plans += [Plan(status=400, error="wrong: sk-of-the-provider")] * 5
    answer = await gateway.post(HELLO)
    assert answer.status == 400
    assert b"wrong: ***" in answer.body
    assert b"sk-of-the-provider" not in answer.body


@pytest.mark.parametrize(
    ("status", "seen", "outcome"),
    [
        (400, 400, Outcome.REJECTED),
        (401, 502, Outcome.UPSTREAM_ERROR),
        (429, 429, Outcome.OVERLOADED),
        (500, 500, Outcome.UPSTREAM_ERROR),
    ],
)
async def test_errors_are_those_of_a_server_and_name_no_library(
    start: Callable[[str], Awaitable[Gateway]],
    provider: FakeProvider,
    status: int,
    seen: int,
    outcome: Outcome,
) -> None:
    gateway = await start(OPENAI)
    provider.plans += [Plan(status=status, error="the words of the provider")] * 5
    answer = await gateway.post(HELLO)
    assert answer.status == seen
    assert b"itellm" not in answer.body
    assert b"Exception" not in answer.body
    if status == 400:
        assert json.loads(answer.body)["error"]["message"] == "the words of the provider"
    rows = await gateway.rows()
    assert {row.settled.outcome for row in rows} == {outcome}
    assert len(provider.calls) == len(rows)  # the library tries nothing again by itself


@pytest.mark.parametrize("body", [HELLO, STREAM], ids=["whole", "stream"])
async def test_a_refusal_of_the_gateways_key_is_a_502_before_anything_is_streamed(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider, body: dict[str, Any]
) -> None:
    gateway = await start(GEMINI)
    told = "API key not valid. Please pass a valid API key: sk-of-the-provider"
    provider.plans += [Plan(status=400, error=told, reason="API_KEY_INVALID")] * 5
    answer = await gateway.post(body)
    assert answer.status == 502
    error = json.loads(answer.body)["error"]
    assert error["message"] == "The model server refused the gateway's credentials."
    assert error["type"] == "server_error"
    assert b"sk-of" not in answer.body
    assert {row.settled.charge.total for row in await gateway.rows()} == {0}


async def test_a_stream_that_the_provider_refuses_has_its_status(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider
) -> None:
    gateway = await start(GEMINI)
    provider.plans += [Plan(status=429, error="quota")] * 5
    answer = await gateway.post(STREAM)
    assert answer.status == 429
    assert {row.settled.outcome for row in await gateway.rows()} == {Outcome.OVERLOADED}


async def test_a_client_that_leaves_hangs_up_on_the_provider_and_is_estimated(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider
) -> None:
    gateway = await start(OPENAI)
    provider.plans.append(Plan(hold=True))
    async with gateway.wire() as wire:
        wire.request("/v1/chat/completions", STREAM, (bearer(),))
        await until(lambda: provider.calls)
        await wire.head()
    await asyncio.wait_for(provider.calls[0].gone.wait(), 10)
    row = await gateway.row()
    assert row.settled.outcome is Outcome.CLIENT_DISCONNECTED
    assert Certainty.MEASURED not in {
        row.settled.usage.uncached.certainty,
        row.settled.usage.output.certainty,
    }


async def test_a_stream_that_breaks_is_no_whole_answer(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider
) -> None:
    gateway = await start(OPENAI)
    provider.plans.append(Plan(cut=True))
    answer = await gateway.post(STREAM)
    assert b"[DONE]" not in answer.body
    assert (await gateway.row()).settled.outcome is Outcome.TRUNCATED


async def test_a_provider_that_is_not_there_was_not_reached(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider
) -> None:
    gateway = await start(OPENAI)
    await provider.__aexit__()
    answer = await gateway.post(HELLO)
    assert answer.status == 502
    rows = await gateway.rows()
    assert {row.settled.outcome for row in rows} == {Outcome.UNREACHABLE}
    assert {row.settled.charge.total for row in rows} == {0}


async def test_a_pool_at_a_provider_that_a_reload_brings_serves(
    provider: FakeProvider, tmp_path: Path
) -> None:
    plain = config(tmp_path / "l.db", [])
    gateway = await Gateway.start(plain)
    try:
        gateway.application.reconfigure(hosted(plain, OPENAI, provider.url))
        answer = await gateway.post(HELLO)  # waits for the library
        assert (answer.status, len(provider.calls)) == (200, 1)
    finally:
        await gateway.stop()


async def test_other_surfaces_are_refused_in_openais_envelope(
    start: Callable[[str], Awaitable[Gateway]], provider: FakeProvider
) -> None:
    gateway = await start(OPENAI)
    answer = await gateway.post({"model": MODEL, "prompt": "x"}, "/v1/completions")
    assert answer.status == 404
    assert json.loads(answer.body)["error"]["message"] == "This pool serves chat completions only."
    assert provider.calls == []
