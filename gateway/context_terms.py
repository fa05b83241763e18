"""What a decision on a conversation's context depends on: rates, sizes, limits, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.economics import Shape
from ctxgate.compression.serving_cost import Latency
from ctxgate.compression.serving_cost import Speed as ServingSpeed
from ctxgate.compression.window import Limits, Terms, begin, compacted, fitted
from ctxgate.gateway.context_level import Summarizer
from ctxgate.gateway.instants import day_of
from ctxgate.inference.lengths import NOTHING
from ctxgate.inference.rates import rates_at
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from datetime import date

    from ctxgate.compression.compaction import Compaction
    from ctxgate.compression.window import Conversation
    from ctxgate.gateway.config import Context, Pool
    from ctxgate.inference.lengths import Measure
    from ctxgate.inference.wire import Body
    from ctxgate.routing.snapshot import LatencyBudget, Speed

ONE: Final = Fraction(1)
INSTRUCTION_TOKENS: Final = 400
OUTPUT_TOKENS: Final = 4096
"""Room for an answer whose length a client does not limit, where the window is large enough."""

_OUTPUT_SHARE: Final = 8  # of the window, at most
_THINKING: Final = (11, 8)  # output of a summary call for each token of the summary
_MARGIN_SHARE: Final = 50  # of a price tier's edge


class Known(Record, frozen=True):
    """What is known of a conversation after its request with the first `length` messages was answered.

    `tokens` is its prompt as measured, `said` the size of that prompt's messages and tools, `tools` of its
    tools alone, `record` the compaction it went out under, `largest` the longest answer and `batch` the
    largest growth in tokens. `estimated`: of a longer request's, only the first messages.
    """

    length: int
    tokens: int
    said: Measure
    record: Compaction | None
    state: Conversation
    largest: int = 0
    batch: int = 0
    tools: Measure = NOTHING
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """What one request needs beside its prompt: tokens of its head and tools, and of its answer (or None)."""

    prefix: int
    output: int | None
    window: int | None


def asked_output(body: Body) -> int | None:
    """The longest answer that a request asks for, in tokens; None where it does not say."""
    for name in ("max_completion_tokens", "max_tokens"):
        value: Any = None
        if body.size(name) <= 20 and body.has(name):
            try:
                value = body.value(name)
            except msgspec.DecodeError:
                continue  # the engine will say what is wrong with it
        if isinstance(value, int) and value > 0:
            return value
    return None


def terms_of(
    context: Context,
    pool: Pool,
    needs: Needs,
    known: Known | None,
    *,
    now_us: int,
    background: bool,
    harder: Fraction = ONE,
) -> Terms:
    """The terms of a decision: in line, before a request goes out, or in the background after one.

    In the background the reserve also covers the next batch of results and the summary call, so that a
    summary is made before masking must step in.
    """
    length = 0 if known is None else known.tokens
    day = day_of(now_us)
    warm = context.summarizer == Summarizer.WARM_SUFFIX
    summary = context.summary_tokens * _THINKING[0] // _THINKING[1] if warm else 0
    edge = _tier_edge(pool, day)
    call = summary + INSTRUCTION_TOKENS if warm else 0
    limits = _limits(edge, needs, known, call, background=background)
    shape = Shape(
        prefix=needs.prefix,
        summary=context.summary_tokens,
        tail=context.tail_tokens,
        summary_output=summary,
        instruction=INSTRUCTION_TOKENS if warm else 0,
    )
    rates = rates_at(pool.rates, day, length)
    return Terms(rates, fitted(shape, limits), limits, None, harder)


def latency_of(budget: LatencyBudget, speed: Speed | None, output: int) -> Latency | None:
    """The latency term of a decision: a request's budget and what predicts its times; None without either.

    `output`: tokens to expect of its answer. The request is taken alone: a queue passes, a long prompt does
    not. Both margins of the prediction count.
    """
    if speed is None or not budget.bounds:
        return None
    more = max(1.0 + speed.rho_share, 0.0)
    return Latency(
        ServingSpeed.from_seconds(
            speed.linear_s * more,
            speed.attention_s * more,
            max(speed.step_s + speed.sequence_s + speed.itl_rho_s, 0.0),
            speed.context_s,
        ),
        first_ms=None if budget.ttft_us is None else budget.ttft_us // 1000,
        whole_ms=None if budget.total_us is None else budget.total_us // 1000,
        output=max(output - 1, 0),
        waiting_ms=ceil(max(speed.base_s * more + speed.rho_s, 0.0) * 1000),
    )


def _tier_edge(pool: Pool, day: date) -> int | None:
    """The longest prompt of the lowest price tier; None where all prompts have one price."""
    base = rates_at(pool.rates, day, 0)
    version = next(each for each in pool.rates.versions if each[0] == base)
    return version[1].above_prompt_tokens if len(version) > 1 else None


def _limits(edge: int | None, needs: Needs, known: Known | None, call: int, *, background: bool) -> Limits:
    window = needs.window
    room = OUTPUT_TOKENS if window is None else max(1, window // _OUTPUT_SHARE)
    output = needs.output
    if output is None:
        output = min(max(OUTPUT_TOKENS, 0 if known is None else known.largest), room)
    batch = min(known.batch, room) if known is not None and background else 0
    margin = edge // _MARGIN_SHARE + batch if edge is not None and background else 0
    return Limits(
        window=window,
        largest_output=output,
        worst_batch=batch,
        summary_call=call if background else 0,
        tier_edge=edge,
        margin=margin,
    )


def state_before(known: Known | None, terms: Terms, record: Compaction | None, length: int) -> Conversation:
    """The state of a conversation before a request that goes out under `record`.

    `length`: what the record leaves of the messages that were sent before, in tokens. A record that is not
    the one the last request went out under, of whatever process, is a compaction in between.
    """
    state = begin(terms.shape) if known is None else known.state
    if record is None or (known is not None and known.record == record):
        return state
    return compacted(state, terms, length, terms.limits.hard_trigger())
