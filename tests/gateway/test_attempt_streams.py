"""Streams through the gateway: what passes, what is withheld, and how each end is told and booked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.usage import UNKNOWN, Certainty, estimated, measured
from support.behaviours import dies_after, plays
from support.gateway import STREAM, bearer
from support.upstream import by_hand, event_bytes, usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

USAGE_ASKED = STREAM | {"stream_options": {"include_usage": True}}


def texts(documents: list[Any]) -> list[str]:
    """The texts of a stream's chunks, empty ones left out."""
    deltas = [choice["delta"] for document in documents for choice in document.get("choices", ())]
    return [delta["content"] for delta in deltas if delta.get("content")]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (None, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
        ({"include_usage": True, "continuous_usage_stats": False}, True),
    ],
)
async def test_api_a9_the_usage_chunk_is_shown_only_to_a_client_that_asked(
    gateway: Gateway, upstream: Upstream, options: dict[str, bool] | None, shown: bool
) -> None:
    answer = await gateway.post(STREAM if options is None else STREAM | {"stream_options": options})
    with_usage = [document for document in answer.documents if document.get("usage")]
    assert len(with_usage) == shown
    assert all(document["choices"] or shown for document in answer.documents)
    if shown:
        assert with_usage[0]["choices"] == []
        # 8 uncached, 32 cached and 3 output tokens at 1000, 100 and 2000 nano-dollars.
        assert with_usage[0]["usage"]["cost"] == 0.0000172
        assert {k: v for k, v in with_usage[0]["usage"].items() if k != "cost"} == usage()
    assert answer.events[-1] == b"[DONE]"
    assert upstream.calls[0].document["stream_options"]["include_usage"] is True
    row = await gateway.row()
    assert (row.settled.usage.uncached, row.settled.usage.cached) == (measured(8), measured(32))
    assert (row.settled.usage.output, row.settled.charge.total) == (measured(3), 17_200)


@pytest.mark.parametrize(
    "closing",
    [
        {"usage": usage(), "choices": []},
        {"usage": usage()},
        {"usage": usage(), "choices": None},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": None}], "usage": usage()},
    ],
)
@pytest.mark.parametrize("asked", [False, True])
async def test_api_a9_every_shape_of_usage_chunk_leaves_choices_that_can_be_indexed(
    gateway: Gateway, upstream: Upstream, closing: dict[str, Any], asked: bool
) -> None:
    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.text("hi")
        exchange.chunk({}, "stop")
        exchange.event(closing)
        exchange.done()

    upstream.play(plays(write))
    answer = await gateway.post(USAGE_ASKED if asked else STREAM)
    shown = [document for document in answer.documents if "usage" in document]
    assert len(shown) == asked
    if asked and closing.get("choices", []) is not None:
        assert isinstance(shown[0]["choices"], list)
    if not asked:
        assert all(document["choices"] for document in answer.documents)
    row = await gateway.row()
    assert row.settled.usage.prompt == 40
    assert row.settled.usage.output == measured(3)


async def test_gateways_k2_fake_streaming_each_chunk_arrives_before_the_next_is_made(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        head = await wire.head()  # before there is any event
        assert head.header("content-type") == "text/event-stream; charset=utf-8"
        assert head.header("content-encoding") == ""
        assert head.header("x-accel-buffering") == "no"
        for number in range(20):
            exchange.text(f"t{number}")
            assert texts([json.loads((await wire.chunk())[6:])]) == [f"t{number}"]
        exchange.chunk({}, "stop")
        await wire.chunk()
        exchange.usage_chunk()
        exchange.done()
        assert await wire.chunk() == b"data: [DONE]\n\n"
        assert await wire.chunk() == b""


async def test_two_events_in_one_write_and_one_event_in_many_arrive_whole(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        await wire.head()
        one, two, three = (
            event_bytes(exchange.shell([{"index": 0, "delta": {"content": text}, "finish_reason": None}]))
            for text in ("één", "two", "三")
        )
        exchange.piece(one + two)
        received = await wire.chunk()
        while len(received) < len(one + two):
            received += await wire.chunk()
        assert received == one + two
        for at in range(len(three)):
            exchange.piece(three[at : at + 1])
        received = await wire.chunk()
        assert received == three
        exchange.chunk({}, "stop")
        exchange.done()


async def test_gateways_q1_chunks_of_reasoning_and_unknown_fields_pass_as_they_are(
    gateway: Gateway, upstream: Upstream
) -> None:
    sent: list[bytes] = []

    def write(exchange: Exchange) -> None:
        exchange.head()
        for delta in (
            {"reasoning_content": "hm "},
            {"reasoning": "so "},
            {"role": "assistant", "audio": {"id": "x"}, "novel": [1, {"a": None}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        ):
            choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": None}
            sent.append(event_bytes(exchange.shell([choice]) | {"x_new": 1e-7}))
            exchange.piece(sent[-1])
        exchange.piece(b": keep-alive\n\n")
        exchange.chunk({}, "stop")
        exchange.usage_chunk()
        exchange.done()

    upstream.play(plays(write))
    answer = await gateway.post(STREAM)
    assert answer.body.startswith(b"".join(sent) + b": keep-alive\n\n")
    row = await gateway.row()
    assert row.settled.ttft_us is not None
    assert row.settled.outcome is Outcome.COMPLETED


@pytest.mark.parametrize("how", ["reset", "hang_up", "end"])
async def test_gateways_j1_an_upstream_that_dies_leaves_an_error_event_and_never_done(
    gateway: Gateway, upstream: Upstream, how: str
) -> None:
    upstream.play(dies_after(5, how))
    answer = await gateway.post(STREAM)
    assert answer.status == 200
    assert answer.clean
    assert b"[DONE]" not in answer.body
    assert texts(answer.documents[:-1]) == [f"t{number} " for number in range(5)]
    last = answer.documents[-1]
    assert last["error"]["code"] == "upstream_truncated"
    assert last["error"]["type"] == "server_error"
    row = await gateway.row()
    assert (row.settled.outcome, row.settled.finish_reason) == (Outcome.TRUNCATED, None)
    metrics = await gateway.metrics()
    assert metrics['ctxgate_stream_truncated_total{pool="standard"}'] == 1


async def test_gateways_c8_what_a_dead_upstream_produced_is_charged(
    gateway: Gateway, upstream: Upstream
) -> None:
    upstream.play(dies_after(200, "hang_up"))
    await gateway.post(STREAM)
    settled = (await gateway.row()).settled
    assert settled.outcome is Outcome.TRUNCATED
    # 200 chunks of 3 to 5 bytes: at 4 bytes per token fewer than one token each, so the events count.
    size = sum(len(f"t{number} ") for number in range(200))
    assert size / 4 > 200
    assert settled.usage.output == estimated(-(-size // 4))
    assert settled.usage.uncached.certainty is Certainty.ESTIMATED
    assert settled.charge.total is not None
    assert settled.charge.total >= 200 * 2000
    assert not settled.charge.exact


async def test_gateways_c6_the_last_running_usage_of_a_cut_stream_is_kept(
    upstream: Upstream, start_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    gateway = await start_gateway(upstream, pool={"abort": False, "continuous_usage": True})

    def write(exchange: Exchange) -> None:
        exchange.head()
        for number in range(1, 8):
            running = {"prompt_tokens": 40, "total_tokens": 40 + number, "completion_tokens": number}
            exchange.chunk({"content": "x"}, usage=running)
        exchange.hang_up()

    upstream.play(plays(write))
    answer = await gateway.post(STREAM)
    assert upstream.calls[0].document["stream_options"] == {
        "include_usage": True,
        "continuous_usage_stats": True,
    }
    assert not any("usage" in document for document in answer.documents)
    settled = (await gateway.row()).settled
    assert settled.usage.prompt == 40
    assert settled.usage.output == estimated(7)  # a lower bound: the stream was cut


@pytest.mark.parametrize("marker", [True, False])
async def test_gateways_j3_an_error_event_inside_a_stream_is_no_success(
    gateway: Gateway, upstream: Upstream, marker: bool
) -> None:
    error = {"error": {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}}

    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.text("a")
        exchange.event(error)
        if marker:
            exchange.done()
        else:
            exchange.hang_up()

    upstream.play(plays(write))
    answer = await gateway.post(STREAM)
    assert error in answer.documents
    assert b"[DONE]" not in answer.body
    assert (await gateway.row()).settled.outcome is Outcome.UPSTREAM_ERROR


async def test_gateways_j4_a_stream_that_opens_and_dies_counts_as_a_failure_of_its_replica(
    gateway: Gateway, upstream: Upstream
) -> None:
    record = gateway.services.fleet.record("standard", "standard-0")
    for count in (1, 2, 3):
        upstream.play(dies_after(2, "reset"))
        # A conversation of its own: one that fails again and again says less of the replica.
        await gateway.post(STREAM | {"messages": [{"role": "user", "content": f"conversation {count}"}]})
        assert record.health.failures == count
    assert not gateway.services.fleet.healthy(record)
    upstream.play(by_hand)
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        exchange.text("a")
        await wire.head()
        await wire.chunk()
        assert record.health.failures == 3  # an open stream is no success yet
        exchange.chunk({}, "stop")
        exchange.done()
        while await wire.chunk():
            pass
    assert record.health.failures == 0


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ([], (Certainty.ESTIMATED, Certainty.UNKNOWN, Certainty.ESTIMATED)),
        ([None], (Certainty.ESTIMATED, Certainty.UNKNOWN, Certainty.ESTIMATED)),
        ([usage(0, 0, 0)], (measured(0), measured(0), measured(0))),
        ([usage(40, 32, 2), usage(40, 16, 3)], (measured(24), measured(16), measured(3))),
        ([usage(40, None, 3)], (estimated(40), UNKNOWN, measured(3))),
    ],
    ids=["missing", "null", "zero", "twice", "no cached"],
)
async def test_missing_null_zero_and_repeated_usage_are_four_different_things(
    gateway: Gateway, upstream: Upstream, figures: list[Any], expected: tuple[Any, Any, Any]
) -> None:
    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.text("abc")
        exchange.chunk({}, "stop")
        for one in figures:
            exchange.event(exchange.shell([]) | {"usage": one})
        exchange.done()

    upstream.play(plays(write))
    await gateway.post(USAGE_ASKED)
    found = (await gateway.row()).settled.usage
    for count, wanted in zip((found.uncached, found.cached, found.output), expected, strict=True):
        assert (count.certainty if isinstance(wanted, Certainty) else count) == wanted


async def test_done_is_sent_only_when_the_row_is_durable(gateway: Gateway, upstream: Upstream) -> None:
    upstream.play(by_hand)
    ledger = gateway.services.ledger
    async with gateway.wire() as wire:
        wire.request(body=STREAM, headers=[bearer()])
        exchange = await upstream.next_call()
        exchange.head()
        exchange.chunk({}, "stop")
        exchange.usage_chunk()
        exchange.done()
        await wire.head()
        await wire.chunk()
        assert await wire.chunk() == b"data: [DONE]\n\n"
        page = await ledger.rows()  # read by a connection of its own: what it sees is committed
        assert [row.settled.outcome for row in page.attempts] == [Outcome.COMPLETED]


async def test_an_upstream_that_says_done_and_keeps_the_connection_is_a_whole_answer(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.attempt._AFTER_DONE_S", 0.02)

    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.chunk({"content": "x"}, "stop")
        exchange.usage_chunk()
        exchange.piece(b"data: [DONE]\n\n")  # and no last chunk

    upstream.play(plays(write))
    answer = await gateway.post(STREAM)
    assert answer.events[-1] == b"[DONE]"
    assert (await gateway.row()).settled.outcome is Outcome.COMPLETED


async def test_an_event_that_never_ends_is_cut_off(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.inference.sse.MAX_EVENT_BYTES", 2**16)
    monkeypatch.setattr("ctxgate.inference.sse.SseSplitter.__init__.__defaults__", (2**16,))

    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.piece(b"data: " + b"x" * 2**17)
        exchange.piece(b"x" * 10)

    upstream.play(plays(write))
    answer = await gateway.post(STREAM)
    assert answer.documents[-1]["error"]["code"] == "upstream_truncated"
    assert (await gateway.row()).settled.outcome is Outcome.TRUNCATED


async def test_a_chunk_that_is_no_json_passes_and_the_rest_is_metered(
    gateway: Gateway, upstream: Upstream
) -> None:
    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.piece(b"data: {broken\n\n")
        exchange.piece(b"data: " + b"[" * 100_000 + b"\n\n")
        exchange.chunk({"content": "x"}, "stop")
        exchange.usage_chunk()
        exchange.done()

    upstream.play(plays(write))
    answer = await gateway.post(STREAM)
    assert answer.events[0] == b"{broken"
    assert answer.events[-1] == b"[DONE]"
    assert (await gateway.row()).settled.usage.output == measured(3)
