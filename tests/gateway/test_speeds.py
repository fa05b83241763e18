"""What settled attempts teach of speeds and lengths: the engine's own times where told, else the measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.serving_cost import Latency
from ctxgate.compression.serving_cost import Speed as ServingSpeed
from ctxgate.gateway import speeds
from ctxgate.gateway.context_terms import latency_of
from ctxgate.gateway.speeds import UNTOLD, EngineTimes, engine_times
from ctxgate.routing.output_length import ENOUGH
from ctxgate.routing.snapshot import LatencyBudget, Speed
from support.behaviours import plays
from support.gateway import HELLO, MODEL, STREAM, Gateway, bearer
from support.upstream import usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ctxgate.routing.latency import Sample
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]

METRICS = {
    "time_to_first_token_ms": 120.0,
    "queue_time_ms": 30.5,
    "generation_time_ms": 8.0,
    "mean_itl_ms": 4.0,
    "tokens_per_second": 250.0,
}


class Recorder:
    """In a predictor's place: keeps what it is told."""

    def __init__(self, prior: Speed | None) -> None:
        self.prior = prior
        self.samples: list[Sample] = []
        made.append(self)

    def observe(self, sample: Sample) -> None:
        self.samples.append(sample)

    def speed(self) -> Speed | None:
        return self.prior


made: list[Recorder] = []


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    made.clear()
    monkeypatch.setattr(speeds, "Predictor", Recorder)
    return made


def streams(metrics: dict[str, Any] | None, texts: int = 3) -> Callable[[Exchange], None]:
    """A stream whose usage chunk carries the engine's metrics, where it was asked for usage."""

    def write(exchange: Exchange) -> None:
        exchange.head()
        for _ in range(texts):
            exchange.text("a ")
        exchange.chunk({}, "stop")
        more = {} if metrics is None else {"metrics": metrics}
        exchange.event(exchange.shell([]) | {"usage": usage(completion=texts)} | more)
        exchange.done()

    return write


async def test_a_stream_teaches_by_the_engines_own_times(
    upstream: Upstream, start_gateway: Start, recorders: list[Recorder]
) -> None:
    upstream.play(plays(streams(METRICS)))
    gateway = await start_gateway(upstream)
    answer = await gateway.post(STREAM)
    assert b"metrics" not in answer.body  # its client asked for no usage
    row = await gateway.row()
    (sample,) = recorders[0].samples
    assert (sample.new, sample.length, sample.output) == (8, 40, 3)
    assert (sample.queue_s, sample.itl_s) == (0.0305, 0.004)
    assert row.settled.ttft_us is not None
    assert sample.ttft_s == row.settled.ttft_us / 1e6  # as its client saw it
    assert (sample.work.decoding, sample.work.prefill_tokens, sample.in_flight) == (0, 0, 0)
    assert sample.estimated_length == row.opened.estimated_prompt_tokens


async def test_metrics_pass_untouched_where_the_client_asked_for_usage(
    upstream: Upstream, start_gateway: Start, recorders: list[Recorder]
) -> None:
    upstream.play(plays(streams(METRICS)))
    gateway = await start_gateway(upstream)
    answer = await gateway.post({**STREAM, "stream_options": {"include_usage": True}})
    assert b'"queue_time_ms":30.5' in answer.body.replace(b" ", b"")
    await gateway.row()
    assert recorders[0].samples[0].queue_s == 0.0305


async def test_without_metrics_a_stream_is_timed_here(
    upstream: Upstream, start_gateway: Start, recorders: list[Recorder]
) -> None:
    upstream.play(plays(streams(None)))
    gateway = await start_gateway(upstream)
    await gateway.post(STREAM)
    settled = (await gateway.row()).settled
    (sample,) = recorders[0].samples
    assert sample.queue_s is None
    assert settled.ttft_us is not None
    assert sample.itl_s == pytest.approx((settled.total_us - settled.ttft_us) / 1e6 / 2)


async def test_an_answer_in_one_piece_shows_its_first_token_only_by_the_engines_word(
    upstream: Upstream, start_gateway: Start, recorders: list[Recorder]
) -> None:
    def answers(more: dict[str, Any]) -> Callable[[Exchange], None]:
        def write(exchange: Exchange) -> None:
            exchange.respond(200, json.dumps(exchange.answer_document() | more).encode())

        return write

    upstream.play(plays(answers({})), plays(answers({"metrics": {**METRICS, "generation_time_ms": 0.0}})))
    gateway = await start_gateway(upstream)
    await gateway.post(HELLO)
    await gateway.post(HELLO)
    rows = await gateway.rows()
    silent, told = recorders[0].samples
    assert silent.ttft_s is None
    assert silent.itl_s is None
    assert told.ttft_s == pytest.approx(rows[1].settled.total_us / 1e6)


async def test_an_estimated_prompt_teaches_nothing(
    upstream: Upstream, start_gateway: Start, recorders: list[Recorder]
) -> None:
    def uncounted(exchange: Exchange) -> None:
        exchange.answer(cached=None)

    upstream.play(plays(uncounted))
    gateway = await start_gateway(upstream)
    await gateway.post(HELLO)
    await gateway.rows()
    assert recorders[0].samples == []


async def test_routing_f9_each_pool_learns_from_its_own_attempts(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start, recorders: list[Recorder]
) -> None:
    upstream.play(plays(streams(METRICS)))
    gateway = await start_gateway(upstream, fast=[other_upstream.url])
    await gateway.post(STREAM, headers=[bearer(), ("x-ctxgate-class", "batch")])
    row = await gateway.row()
    by_pool = dict(zip(gateway.services.config.pools, recorders, strict=True))
    other = "fast" if row.opened.pool == "standard" else "standard"
    assert len(by_pool[row.opened.pool].samples) == 1
    assert by_pool[other].samples == []


async def test_lengths_are_learned_by_team_and_class_and_bounded_by_the_request(
    upstream: Upstream, start_gateway: Start
) -> None:
    upstream.play(*(plays(streams(None, texts=40)) for _ in range(ENOUGH)))
    gateway = await start_gateway(upstream)
    for _ in range(ENOUGH):
        await gateway.post(STREAM)
    await gateway.rows()
    lengths = gateway.services.speeds.lengths
    assert lengths.expected("alpha", MODEL, "agent") == 40
    assert lengths.expected("alpha", MODEL, "agent", 16) == 16


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        b"",
        b"null",
        b"[]",
        b'{"queue_time_ms":-1}',
        b'{"queue_time_ms":"soon"}',
        b'{"queue',
        b"[" * 10_000,
    ],
)
def test_metrics_that_are_not_as_expected_are_not_told(metrics: bytes | None) -> None:
    assert engine_times(metrics) == UNTOLD


def test_metrics_leave_out_what_they_do_not_know() -> None:
    """vLLM's metrics of a call that was never scheduled are all null."""
    assert engine_times(b'{"time_to_first_token_ms":null,"queue_time_ms":2}') == EngineTimes(None, 2.0)


def test_a_budget_bounds_a_prompt_by_what_its_pool_takes() -> None:
    """100 us a token and 5 ms around it: 9,950 tokens take 1 s, with one more it is too late."""
    speed = Speed(100e-6, 0.0, 9e-3, 0.5e-3, 0.0, base_s=3e-3, rho_s=2e-3, itl_rho_s=0.5e-3)
    latency = latency_of(LatencyBudget(ttft_us=1_000_000), speed, 100)
    assert latency is not None
    assert latency.fits(9950, 9950)
    assert not latency.fits(9951, 9951)
    whole = latency_of(LatencyBudget(total_us=1_995_000), speed, 100)
    assert whole is not None  # 99 more tokens of 10 ms each
    assert whole.fits(10_000, 10_000)
    assert not whole.fits(10_001, 10_001)


def test_without_a_bound_or_a_known_speed_length_costs_no_time() -> None:
    speed = Speed(1e-4, 0.0, 1e-2, 0.0, 0.0)
    assert latency_of(LatencyBudget(prefer="fast"), speed, 10) is None
    assert latency_of(LatencyBudget(ttft_us=1000), None, 10) is None


def test_the_latency_term_is_exact() -> None:
    speed = Speed(80e-6, 8e-10, 18e-3, 0.0, 10e-9)
    expected = Latency(ServingSpeed(80_000_000_000, 800_000, 18 * 10**12, 10_000_000), 250, None, None, 9, 0)
    assert latency_of(LatencyBudget(ttft_us=250_000), speed, 10) == expected
