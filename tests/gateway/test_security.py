"""Secrets stay where they are, and no client changes another's bill, whatever fails on the way."""

from __future__ import annotations

import asyncio
import gzip
import logging
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Limits
from support.behaviours import BUSY, RESET, dies_after, plays, refuses, streams_until_aborted, vllm_error
from support.client import CHAT
from support.gateway import ALPHA, BETA, FORGED, HELLO, MODEL, bearer, until
from support.upstream import by_hand, ok

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]

CANARY = "canary-7f3a"
POOL_KEY = "engine-canary-7f3a-key"
PROMPT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": CANARY}]}


def garbled(exchange: Exchange) -> None:
    """An answer that is no HTTP, with a secret in it."""
    exchange.write(f"HTTP/1.1 {CANARY}\r\n\r\n".encode())
    exchange.finish()


FAILURES = [
    ok,
    BUSY,
    RESET,
    dies_after(2, "reset"),
    dies_after(2, "end"),
    plays(garbled),
    refuses(500, vllm_error(f"Traceback: {CANARY}", "InternalServerError", 500)),
    refuses(401, {"error": f"Unauthorized {CANARY}"}),
    refuses(400, vllm_error(f"bad value {CANARY}", "BadRequestError", 400)),
    refuses(404, {"detail": CANARY}),
    refuses(502, f"<html>{CANARY}</html>".encode(), "text/html"),
    plays(lambda exchange: exchange.respond(200, CANARY.encode())),
]


SECRETS = [
    ("authorization", f"Bearer {CANARY}"),
    ("x-api-key", CANARY),
    ("cookie", CANARY),
    ("x-request-id", CANARY),
    ("user-agent", CANARY),
]


async def failing_upstreams(gateway: Gateway, upstream: Upstream) -> None:
    """A prompt that meets every failure of an upstream."""
    for failure in FAILURES:
        for stream in (False, True):
            upstream.default = failure
            await gateway.post(PROMPT | {"stream": stream}, headers=[bearer(), *SECRETS[2:]])


async def failing_requests(gateway: Gateway) -> None:
    """Requests that are refused, each with a secret in another place."""
    bodies: list[bytes | dict[str, Any]] = [
        f'{{"model":"m","x":"{CANARY}'.encode(),
        PROMPT | {"n": CANARY},
        PROMPT | {"model": CANARY},
        PROMPT | {"cache_salt": CANARY},
        PROMPT | {"x": "y" * 5000},
        gzip.compress(CANARY.encode())[:-4],
    ]
    for body in bodies:
        encoding = [("content-encoding", "gzip")] if isinstance(body, bytes) and body[:1] == b"\x1f" else []
        await gateway.post(body, headers=[bearer(), *encoding, *SECRETS[2:]])
    for headers in ([SECRETS[0]], [SECRETS[1]], [bearer(), SECRETS[1]], [bearer(), bearer(CANARY)], SECRETS):
        await gateway.post(PROMPT, headers=headers)
    for path in (
        f"/{CANARY}",
        f"/v1/models/{CANARY}",
        f"/v1/usage?by={CANARY}&since={CANARY}",
        f"/?{CANARY}",
    ):
        await gateway.get(path, [bearer(), *SECRETS[2:]])
    async with gateway.wire() as wire:
        wire.send(f"{CANARY}\r\n\r\n".encode())
        await wire.answer()


async def test_gateways_p1_no_secret_and_no_prompt_reaches_a_log_a_metric_or_the_ledger(
    upstream: Upstream,
    start_gateway: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    store = tmp_path / "canary.db"
    limits = Limits(max_body_bytes=4000, first_byte_timeout_s=5)
    gateway = await start_gateway(upstream, store=store, limits=limits, pool={"api_key": POOL_KEY})
    await failing_upstreams(gateway, upstream)
    await failing_requests(gateway)
    upstream.default = ok
    with monkeypatch.context() as patched:
        patched.setattr("ctxgate.gateway.metering.usage_of_answer", _fails)
        assert (await gateway.post(PROMPT)).status == 500
    upstream.default = streams_until_aborted(CANARY)
    async with gateway.wire() as wire:
        wire.request(body=PROMPT | {"stream": True}, headers=[bearer(), *SECRETS[2:]])
        await wire.head()
    await gateway.quiet()
    metrics = await gateway.get("/metrics", ())
    assert CANARY.encode() not in metrics.body
    await gateway.stop()
    assert caplog.records
    for record in caplog.records:
        text = record.getMessage() + (record.exc_text or "") + repr(record.args)
        assert CANARY not in text, record.name
        assert ALPHA not in text, record.name
    assert_clean(tmp_path)


def assert_clean(folder: Path) -> None:
    """No file of a ledger holds the canary or a key."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    for file in files:
        raw = file.read_bytes()
        assert CANARY.encode() not in raw, file
        assert ALPHA.encode() not in raw, file


def _fails(*_: object) -> None:
    raise KeyError("a defect")


async def test_a_defect_is_500_in_the_envelope_and_the_row_is_closed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.metering.usage_of_answer", _fails)
    answer = await gateway.post(PROMPT)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "defect" not in answer.body.decode()
    row = await gateway.row()
    assert row.settled.outcome == "failed"
    await gateway.quiet()


async def test_a_defect_inside_a_stream_ends_it_with_an_error_event_and_closes_the_row(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.metering.usage_of_stream", _fails)
    answer = await gateway.post(PROMPT | {"stream": True})
    assert answer.status == 200
    assert answer.documents[-1]["error"]["code"] == "internal_error"
    assert b"[DONE]" not in answer.body
    row = await gateway.row()
    assert (row.settled.outcome, row.settled.charge.total) == ("failed", None)
    await gateway.quiet()


@pytest.mark.parametrize(
    "header",
    ["x-ctxgate-team", "x-team", "openai-organization", "x-ctxgate-key", "x-ctxgate-organisation", "user"],
)
async def test_gateways_p4_no_header_changes_who_is_billed(gateway: Gateway, header: str) -> None:
    await gateway.post(HELLO | {"user": "beta", "team": "beta"}, headers=[bearer(), (header, "beta")])
    opened = (await gateway.row()).opened
    assert (opened.organisation, opened.team, opened.key_id) == ("acme", "alpha", "alpha-ci")


async def test_gateways_p4_a_team_sees_only_its_own_usage(gateway: Gateway) -> None:
    for secret, task in ((ALPHA, "secret-task-of-alpha"), (BETA, "task-of-beta")):
        await gateway.post(HELLO, headers=[bearer(secret), ("x-ctxgate-task", task)])
    await gateway.rows()
    for path in ("/v1/usage", "/v1/usage?by=task", "/v1/usage?by=task&team=alpha&where=alpha"):
        answer = await gateway.get(path, [bearer(BETA), ("x-ctxgate-team", "alpha")])
        assert answer.status == 200
        assert b"task-of-beta" in answer.body
        assert b"alpha" not in answer.body
    assert (await gateway.get("/v1/usage", [bearer(FORGED)])).status == 401


@pytest.mark.parametrize("count", [2, 3])
async def test_two_credentials_that_differ_are_refused(gateway: Gateway, count: int) -> None:
    given = [bearer(ALPHA), ("x-api-key", BETA), ("api-key", FORGED)][:count]
    answer = await gateway.post(HELLO, headers=given)
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")


async def test_the_host_header_and_a_doubled_path_change_no_decision(
    gateway: Gateway, upstream: Upstream
) -> None:
    async with gateway.wire() as wire:
        wire.send(f"POST {CHAT} HTTP/1.1\r\nhost: localhost/health\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        assert (await wire.answer()).status == 401
    for path in ("/health/../v1/models", "/v1/models/../usage", "//v1/usage", "/v1/usage%00", "/v1/models;x"):
        answer = await gateway.get(path, ())
        assert answer.status in (401, 404), path
    for path in ("/inference/v1/abort_requests", "/tokenize", "/invocations", "/v1/chat/completions/batch"):
        answer = await gateway.post({"request_ids": ["x"]}, path)
        assert (answer.status, answer.error["code"]) == (404, "unknown_url")
    assert (upstream.calls, upstream.abort_calls) == ([], [])


async def test_a_header_value_never_splits_the_reply(gateway: Gateway) -> None:
    body = HELLO | {"metadata": {"task_id": "a\r\nx-evil: 1"}}
    answer = await gateway.post(body)
    assert answer.header("x-evil") == ""
    assert answer.header("x-ctxgate-task").startswith("root-")
    shown = await gateway.post(HELLO | {"metadata": {"task_id": "äöü 任务"}})
    assert shown.header("x-ctxgate-task") == "%C3%A4%C3%B6%C3%BC %E4%BB%BB%E5%8A%A1"


async def test_ids_are_long_random_and_never_the_clients(gateway: Gateway, upstream: Upstream) -> None:
    for _ in range(5):
        await gateway.post(HELLO, headers=[bearer(), ("x-request-id", "known-to-the-client")])
    ids = {call.request_id for call in upstream.calls}
    assert len(ids) == 5
    assert all(len(one) == 32 for one in ids)
    rows = await gateway.rows()
    assert not ids & {row.opened.request_id.removeprefix("req_") for row in rows}


async def test_a_client_that_never_reads_holds_nothing_for_ever(
    upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.commands.serve.STALLED_MS", 300)
    gateway = await start_gateway(upstream)
    upstream.default = by_hand
    async with gateway.wire(receive_buffer=4096) as wire:
        wire.request(body=PROMPT | {"stream": True}, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's transport can

        async def flood() -> None:
            while not exchange.aborted.is_set():
                exchange.text("x" * 50_000)
                await asyncio.sleep(0.002)

        await flood()
        exchange.end_aborted(completion=77)
        await gateway.quiet()
    row = await gateway.row()
    assert row.settled.outcome == "client_disconnected"
    assert row.settled.usage.output.value == 77
    record = gateway.services.fleet.record("standard", "standard-0")
    assert record.health.failures == 0


async def test_a_stall_that_outlasts_the_idle_time_is_the_clients_fault(
    upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, limits=Limits(idle_timeout_s=0.3))
    upstream.default = by_hand
    async with gateway.wire(receive_buffer=4096) as wire:
        wire.request(body=PROMPT | {"stream": True}, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's transport can
        while not exchange.closed.is_set() and not exchange.aborted.is_set():
            exchange.text("x" * 50_000)
            await asyncio.sleep(0.002)
        await until(lambda: gateway.services.fleet.record("standard", "standard-0").in_flight == 0)
    row = await gateway.row()
    assert row.settled.outcome == "client_disconnected"
    assert gateway.services.fleet.record("standard", "standard-0").health.failures == 0
    await gateway.quiet()


async def test_a_slow_reader_gets_everything(gateway: Gateway, upstream: Upstream) -> None:
    texts = [f"{number}-" + "x" * 5000 for number in range(200)]

    def write(exchange: Exchange) -> None:
        exchange.head()
        for text in texts:
            exchange.text(text)
        exchange.chunk({}, "stop")
        exchange.usage_chunk()
        exchange.done()

    upstream.play(plays(write))
    async with gateway.wire(receive_buffer=2048) as wire:
        wire.request(body=PROMPT | {"stream": True}, headers=[bearer()])
        answer = await wire.answer()
    contents = [d["choices"][0]["delta"].get("content") for d in answer.documents]
    assert contents[:-1] == texts
    assert answer.events[-1] == b"[DONE]"
