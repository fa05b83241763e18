"""Failed attempts: tried again only before the first byte, each a row with its own id."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Limits
from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, Certainty
from support.behaviours import BUSY, RESET, dies_after, plays, refuses, vllm_error
from support.client import CHAT
from support.gateway import HELLO, STREAM, until
from support.upstream import by_hand, ok

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def pair(upstream: Upstream, other_upstream: Upstream, start_gateway: Start) -> Gateway:
    """A gateway with two replicas."""
    return await start_gateway(upstream, other_upstream)


def outcomes(rows: list[Any]) -> list[Outcome]:
    """The outcomes in the order of the attempts."""
    return [row.settled.outcome for row in sorted(rows, key=lambda row: row.opened.attempt_number)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (BUSY, Outcome.OVERLOADED),
        (refuses(500, vllm_error("engine dead", "InternalServerError", 500)), Outcome.UPSTREAM_ERROR),
        (refuses(401, {"error": "Unauthorized"}), Outcome.UPSTREAM_ERROR),
    ],
    ids=["busy", "broken", "wrong key"],
)
async def test_a_refusing_replica_is_left_for_the_other_one(
    pair: Gateway, upstream: Upstream, other_upstream: Upstream, failure: Any, outcome: Outcome, stream: bool
) -> None:
    for server in (upstream, other_upstream):
        server.default = failure
    first = await _first_replica(pair, upstream, other_upstream)
    for server in (upstream, other_upstream):
        server.default = failure if server is first else ok
    answer = await pair.post(HELLO | {"stream": stream})
    assert answer.status == 200
    rows = (await pair.rows())[-2:]
    assert outcomes(rows) == [outcome, Outcome.COMPLETED]
    assert len({row.opened.request_id for row in rows}) == 1
    assert len({row.opened.attempt_id for row in rows}) == 2
    assert len({row.opened.replica for row in rows}) == 2
    ids = [server.calls[-1].request_id for server in (upstream, other_upstream)]
    assert sorted(ids) == sorted(row.opened.attempt_id for row in rows)


def conversation(number: int) -> dict[str, Any]:
    """The first request of a conversation of its own."""
    return HELLO | {"messages": [{"role": "user", "content": f"conversation {number}"}]}


async def _first_replica(pair: Gateway, *servers: Upstream) -> Upstream:
    """The server that the conversation goes to first."""
    await pair.post(HELLO)
    rows = await pair.rows()
    first = min(rows, key=lambda row: row.opened.attempt_number)
    return servers[int(first.opened.replica[-1])]


async def test_api_a14_a_reset_of_a_reused_connection_is_tried_again_at_the_same_replica(
    gateway: Gateway, upstream: Upstream
) -> None:
    await gateway.post(HELLO)
    upstream.reset_on_next_request = True
    answer = await gateway.post(STREAM)
    assert answer.events[-1] == b"[DONE]"
    rows = [row for row in await gateway.rows() if row.opened.stream]
    assert outcomes(rows) == [Outcome.UNREACHABLE, Outcome.COMPLETED]
    assert rows[0].settled.usage == NOTHING_KNOWN
    record = gateway.services.fleet.record("standard", "standard-0")
    assert record.health.failures == 0


async def test_routing_e1_a_call_that_was_dropped_is_aborted_before_it_is_tried_again(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.play(RESET, ok)
    assert (await gateway.post(HELLO)).status == 200
    await gateway.quiet()
    first, second = upstream.calls
    assert [f"chatcmpl-{first.request_id}"] in upstream.abort_calls
    assert [f"chatcmpl-{second.request_id}"] not in upstream.abort_calls


async def test_a_replica_that_keeps_dropping_is_given_up(gateway: Gateway, upstream: Upstream) -> None:
    upstream.default = RESET
    answer = await gateway.post(HELLO)
    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")
    assert answer.header("retry-after") == "2"
    rows = await gateway.rows()
    assert outcomes(rows) == [Outcome.UNREACHABLE] * 2
    assert [row.opened.attempt_number for row in rows] == [1, 2]


async def test_nothing_listening_is_unreachable_and_costs_nothing(
    gateway: Gateway, upstream: Upstream
) -> None:
    await upstream.stop()
    answer = await gateway.post(HELLO)
    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")
    row = await gateway.row()
    assert (row.settled.outcome, row.settled.usage) == (Outcome.UNREACHABLE, NOTHING_USED)
    assert row.settled.charge.total == 0
    await upstream.start()


async def test_after_the_first_byte_nothing_is_tried_again(
    pair: Gateway, upstream: Upstream, other_upstream: Upstream
) -> None:
    for server in (upstream, other_upstream):
        server.default = dies_after(1, "reset")
    answer = await pair.post(STREAM)
    assert answer.documents[-1]["error"]["code"] == "upstream_truncated"
    assert len(upstream.calls) + len(other_upstream.calls) == 1
    assert outcomes(await pair.rows()) == [Outcome.TRUNCATED]


async def test_routing_e7_busy_everywhere_is_told_with_retry_after_and_opens_no_breaker(
    pair: Gateway, upstream: Upstream, other_upstream: Upstream
) -> None:
    for server in (upstream, other_upstream):
        server.default = BUSY
    answers = [await pair.post(HELLO) for _ in range(4)]
    assert {answer.status for answer in answers} == {429}
    assert {answer.header("retry-after") for answer in answers} == {"2"}
    assert {answer.error["code"] for answer in answers} == {"server_is_overloaded"}
    rows = await pair.rows()
    assert len(rows) == 8
    assert {row.settled.outcome for row in rows} == {Outcome.OVERLOADED}
    assert {row.settled.charge.total for row in rows} == {0}
    assert all(record.health.failures == 0 for record in pair.services.fleet.records())


async def test_routing_e3_a_replica_that_fails_is_set_aside_for_later_requests(
    pair: Gateway, upstream: Upstream, other_upstream: Upstream
) -> None:
    first = await _first_replica(pair, upstream, other_upstream)
    first.default = refuses(500, vllm_error("dead", "InternalServerError", 500))
    before = len(first.calls)
    for number in range(40):  # a conversation goes to the failing replica first by an even chance
        assert (await pair.post(conversation(number))).status == 200
    assert len(first.calls) == before + 3


async def test_attempts_end_at_the_limit(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, other_upstream, limits=Limits(max_attempts=1))
    for server in (upstream, other_upstream):
        server.default = BUSY
    assert (await gateway.post(HELLO)).status == 429
    assert len(await gateway.rows()) == 1


async def test_a_silent_upstream_is_a_timeout_that_is_not_tried_again(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(
        upstream, other_upstream, limits=Limits(first_byte_timeout_s=0.05, abort_drain_s=0.05)
    )
    for server in (upstream, other_upstream):
        server.default = by_hand
    answer = await gateway.post(HELLO)
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    row = await gateway.row()
    assert row.settled.outcome is Outcome.TIMED_OUT
    assert row.settled.usage.uncached.certainty is Certainty.ESTIMATED  # it may have read the prompt
    assert row.settled.usage.output.value is None
    (call,) = upstream.calls + other_upstream.calls
    await until(call.aborted.is_set)  # what the engine may still be doing ends
    await gateway.quiet()


async def test_an_upstream_that_falls_silent_inside_a_stream_is_cut_off(
    upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, limits=Limits(idle_timeout_s=0.05, abort_drain_s=0.05))

    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.text("a")

    upstream.play(plays(write))
    answer = await gateway.post(STREAM)
    assert answer.documents[-1]["error"]["code"] == "upstream_timeout"
    assert (await gateway.row()).settled.outcome is Outcome.TIMED_OUT
    await until(upstream.calls[0].aborted.is_set)


@pytest.mark.parametrize(
    ("status", "raw", "kind", "message", "code", "param"),
    [
        (400, vllm_error("bad", "BadRequestError", 400), "BadRequestError", "bad", 400, None),
        (404, vllm_error("no", "NotFoundError", 404, "model"), "NotFoundError", "no", 404, "model"),
        (404, {"detail": "Not Found"}, "invalid_request_error", "Not Found", None, None),
        (
            422,
            b"<html>x</html>",
            "invalid_request_error",
            "The model server gave no readable error.",
            None,
            None,
        ),
        (400, {"error": "plain words"}, "invalid_request_error", "plain words", None, None),
        (
            400,
            vllm_error(
                "This model's maximum context length is 9 tokens.", "BadRequestError", 400, "input_tokens"
            ),
            "invalid_request_error",
            "This model's maximum context length is 9 tokens.",
            "context_length_exceeded",
            "input_tokens",
        ),
    ],
)
async def test_the_engines_refusals_pass_in_one_envelope_and_cost_nothing(
    pair: Gateway,
    upstream: Upstream,
    other_upstream: Upstream,
    status: int,
    raw: Any,
    kind: str,
    message: str,
    code: Any,
    param: str | None,
) -> None:
    for server in (upstream, other_upstream):
        server.default = refuses(status, raw)
    answer = await pair.post(STREAM)
    assert answer.status == status
    assert answer.error == {"message": message, "type": kind, "param": param, "code": code}
    row = await pair.row()  # one attempt: the client's own mistake is not tried elsewhere
    assert (row.settled.outcome, row.settled.status) == (Outcome.REJECTED, status)
    assert row.settled.usage == NOTHING_USED


@pytest.mark.parametrize("status", [401, 403])
async def test_gateways_p2_a_refused_pool_key_is_the_operators_fault_and_is_not_shown(
    upstream: Upstream, start_gateway: Start, status: int
) -> None:
    gateway = await start_gateway(upstream, pool={"api_key": "engine-secret-key"})
    upstream.default = refuses(status, {"error": "Unauthorized: engine-secret-key"})
    answer = await gateway.post(HELLO)
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    assert b"engine-secret-key" not in answer.body
    assert (await gateway.row()).settled.outcome is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize("status", [204, 302])
async def test_an_answer_that_is_none_is_a_fault_of_the_upstream(
    gateway: Gateway, upstream: Upstream, status: int
) -> None:
    def write(exchange: Exchange) -> None:
        head = f"HTTP/1.1 {status} X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
        exchange.write(head.encode())
        exchange.finish()

    upstream.default = plays(write)
    answer = await gateway.post(HELLO)
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    assert answer.header("location") == ""


async def test_an_error_in_a_whole_answer_is_no_success(gateway: Gateway, upstream: Upstream) -> None:
    document = vllm_error("late", "InternalServerError", 500)
    upstream.default = plays(lambda exchange: exchange.respond(200, json.dumps(document).encode()))
    answer = await gateway.post(HELLO)
    assert answer.document == document
    assert (await gateway.row()).settled.outcome is Outcome.UPSTREAM_ERROR


async def test_a_whole_answer_that_is_cut_is_tried_elsewhere(
    pair: Gateway, upstream: Upstream, other_upstream: Upstream
) -> None:
    first = await _first_replica(pair, upstream, other_upstream)

    def cut(exchange: Exchange) -> None:
        exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
        exchange.hang_up()

    first.default = plays(cut)
    assert (await pair.post(HELLO)).status == 200
    assert outcomes((await pair.rows())[-2:]) == [Outcome.UNREACHABLE, Outcome.COMPLETED]


async def test_a_stream_that_was_asked_for_and_refused_is_no_stream(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.default = BUSY
    answer = await gateway.post(STREAM)
    assert answer.status == 429
    assert answer.error["type"] == "rate_limit_error"
    assert upstream.calls[0].path == CHAT
