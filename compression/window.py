"""When to compact a conversation: its state, how it changes, and the decision.

The soft trigger is money. Carrying more than the base costs its re-read on every request; once the
re-reads paid since the last base reach the price of a compaction, compacting would have been worth it
(ski-rental: at most twice the best schedule in hindsight). The growth seen so far sharpens the moment:
between half and one and a half times that point, the conversation is compacted as soon as it has grown
by X*, the optimum for its mean growth. However wrong the estimate is, what is paid above the base stays
within 3.5 times the best schedule in hindsight. Two more reasons are not money: the task's latency budget,
and the hard trigger before the window's end or a price tier's edge.

Amounts are exact: rate times tokens, as in `economics`. Nothing here is a float.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from ctxgate.compression.economics import optimal_growth, overhead

if TYPE_CHECKING:
    from ctxgate.compression.economics import Shape
    from ctxgate.compression.serving_cost import Latency
    from ctxgate.inference.rates import Rates

# In halves of a compaction's price: what must have been paid in re-reads before the growth estimate is
# listened to, and from where on it is no longer waited for. Each bounds what a wrong estimate can cost.
EARLIEST: Final = 1
LATEST: Final = 3
# In tenths of the trigger: a pass that leaves more was shallow, and the next would be as well.
DEEP_ENOUGH: Final = 6
ONE: Final = Fraction(1)


class Reason(StrEnum):
    """Why a conversation is compacted."""

    MONEY = "money"
    LATENCY = "latency"
    WINDOW = "window"
    TIER = "tier"
    LADDER = "ladder"  # money, at the price that the budget's ladder sets


@dataclass(frozen=True, slots=True)
class Keep:
    """The conversation goes on as it is."""


@dataclass(frozen=True, slots=True)
class Compact:
    """The conversation is to be compacted, to at most `target` tokens.

    `trigger` is the length in tokens that the pass will be measured by (see `compacted`): the hard trigger
    where there is one, the present length where that is too slow, None where money alone decides.
    """

    reason: Reason
    target: int
    trigger: int | None


Decision = Keep | Compact
KEEP: Final = Keep()


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a prompt from above, in tokens.

    `window` and `tier_edge` (the longest prompt of the tier below) are None where there is none. The
    reserve before the window is the largest output, one worst batch of tool results and the summary call;
    `margin` is kept before the edge. Raises ValueError for a window or an edge below 1, or a negative part.
    """

    window: int | None = None
    largest_output: int = 0
    worst_batch: int = 0
    summary_call: int = 0
    tier_edge: int | None = None
    margin: int = 0

    def __post_init__(self) -> None:
        if any(edge is not None and edge < 1 for edge in (self.window, self.tier_edge)):
            raise ValueError("a window and a tier's edge have at least one token")
        if min(self.largest_output, self.worst_batch, self.summary_call, self.margin) < 0:
            raise ValueError("a part of the reserve is negative")

    def window_trigger(self) -> int | None:
        """The length from which the window is too near; at least half of the window is used."""
        if self.window is None:
            return None
        reserve = self.largest_output + self.worst_batch + self.summary_call
        return max(self.window - reserve, self.window // 2)

    def brink(self) -> int | None:
        """The length from which even a conversation that yields little must be compacted.

        The summary call still fits behind it; an engine cuts the output to the room that is left.
        """
        trigger = self.window_trigger()
        if self.window is None or trigger is None:
            return None
        return max(self.window - self.summary_call - 1, trigger)

    def tier_trigger(self) -> int | None:
        """The length from which a price tier's edge is too near."""
        return None if self.tier_edge is None else max(self.tier_edge - self.margin, 1)

    def hard_trigger(self) -> int | None:
        """The smaller of the window's trigger and the tier's; None where nothing bounds the prompt."""
        triggers = [each for each in (self.window_trigger(), self.tier_trigger()) if each is not None]
        return min(triggers, default=None)


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Terms:
    """What a decision depends on besides the conversation.

    `harder` scales the price of a compaction and the tail that is kept, by the budget's ladder: 1 is as
    usual, 1/2 compacts when half of the price has been paid. Raises ValueError outside of (0, 1].
    """

    rates: Rates
    shape: Shape
    limits: Limits = NO_LIMITS
    latency: Latency | None = None
    harder: Fraction = ONE

    def __post_init__(self) -> None:
        if not 0 < self.harder <= 1:
            raise ValueError("the ladder's factor lies above 0 and is at most 1")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The state of one conversation. Lengths are prompt tokens.

    `base` is the length after the last compaction (before the first: that one would leave), `tokens` the
    length now, `spent` the amount paid for re-reading what exceeds the base, `since_base` the requests
    since. `grown` tokens over `requests` requests are the evidence of the growth estimate. Until the
    length is `exhausted_until`, another pass would find too little; 0 where none was shallow.
    """

    base: int
    tokens: int
    grown: int = 0
    requests: int = 0
    spent: int = 0
    since_base: int = 0
    passes: int = 0
    exhausted_until: int = 0

    def growth(self) -> Fraction | None:
        """g: the mean growth per request in tokens; None before the first request."""
        return Fraction(self.grown, self.requests) if self.requests else None


def fitted(shape: Shape, limits: Limits) -> Shape:
    """The shape with a tail so short that the base is deep enough below the hard trigger."""
    hard = limits.hard_trigger()
    if hard is None:
        return shape
    room = DEEP_ENOUGH * hard // 10 - shape.prefix - shape.summary
    return replace(shape, tail=min(shape.tail, max(0, room)))


def begin(shape: Shape) -> Conversation:
    """A conversation before its first request: its prompt is the stable prefix."""
    return Conversation(base=shape.base, tokens=shape.prefix)


def observed(state: Conversation, terms: Terms, prompt: int, cached: int | None = None) -> Conversation:
    """The state after a request of `prompt` tokens, `cached` of them read from the cache.

    Where `cached` is None, everything that was sent before counts as cached. A prompt shorter than the
    one before is a history that the client edited.
    """
    if prompt < state.tokens:
        state = edited(state, terms.shape, prompt)
    return replace(
        reread(state, terms, prompt, cached),
        tokens=prompt,
        grown=state.grown + prompt - state.tokens,
        requests=state.requests + 1,
        since_base=state.since_base + 1,
    )


def reread(state: Conversation, terms: Terms, prompt: int, cached: int | None = None) -> Conversation:
    """The state after a prompt was paid for that is no request of the client's own.

    A request that looks something up sends its history once more for each answer, and does not grow by it.
    """
    rates = terms.rates
    carried = max(0, state.tokens - state.base)  # sent before, and what a compaction would have removed
    missed = 0 if cached is None else min(carried, max(0, state.tokens - cached))
    read = rates.cached * max(0, prompt - state.base)
    return replace(state, spent=state.spent + read + max(0, rates.written - rates.cached) * missed)


def compacted(state: Conversation, terms: Terms, length: int, trigger: int | None = None) -> Conversation:
    """The state after a compaction that left `length` tokens; `trigger` is the decision's, if it had one.

    A length above 0.6 of the trigger exhausts the conversation until it has grown by X*, or by a tenth of
    the trigger where cached tokens are free.
    """
    shallow = trigger is not None and 10 * length > DEEP_ENOUGH * trigger
    exhausted = length + _pause(state, terms, trigger or 0) if shallow else 0
    return replace(
        state,
        base=length,
        tokens=length,
        spent=0,
        since_base=0,
        passes=state.passes + 1,
        exhausted_until=exhausted,
    )


def failed(state: Conversation, terms: Terms) -> Conversation:
    """The state after a compaction that came to nothing: the next try waits as after a shallow one."""
    trigger = terms.limits.hard_trigger() or state.tokens
    return replace(state, exhausted_until=state.tokens + _pause(state, terms, trigger))


def postponed(state: Conversation, terms: Terms, growth: int) -> Conversation:
    """The state after a compaction that found too little behind the tail.

    The next try waits until the conversation has grown by `growth` tokens, with which the tail has moved on:
    X* is no shorter wait where much came at once.
    """
    late = failed(state, terms)
    return replace(late, exhausted_until=min(late.exhausted_until, state.tokens + max(1, growth)))


def _pause(state: Conversation, terms: Terms, trigger: int) -> int:
    """The growth that an exhausted conversation waits for, in tokens."""
    growth = optimal_growth(terms.rates, terms.shape, state.growth() or ONE)
    return max(1, trigger // 10 if growth is None else growth)


def edited(state: Conversation, shape: Shape, tokens: int) -> Conversation:
    """The state after the client cut its own history down to `tokens`.

    What was paid for tokens that are gone says nothing about those that are left: the amount spent
    shrinks with the excess over the base. What no pass could remove may be gone, too.
    """
    before, after = (max(0, length - state.base) for length in (state.tokens, tokens))
    return replace(
        state,
        base=min(state.base, max(tokens, shape.base)),
        tokens=tokens,
        spent=state.spent * after // before if after < before else state.spent,
        exhausted_until=0,
    )


def decide(state: Conversation, terms: Terms, arriving: int | None = None) -> Decision:
    """Whether to compact now.

    `arriving` is the growth of a request that has come and was not sent yet; None between requests. Right
    after a compaction the answer is `Keep` until the conversation has grown.
    """
    length = state.tokens + (arriving or 0)
    if state.passes and length <= state.base:
        return KEEP
    exhausted = length < state.exhausted_until
    hard = _hard(state, terms, length, exhausted=exhausted)
    if hard is not None:
        return hard
    if exhausted or length <= state.base:
        return KEEP
    if _too_slow(state, terms, length, arriving):
        return Compact(Reason.LATENCY, min(target(terms), length - 1), length)
    if pays(state, terms, arriving, terms.harder):
        usual = terms.harder == ONE or pays(state, terms, arriving)
        reason = Reason.MONEY if usual else Reason.LADDER
        return Compact(reason, min(target(terms), length - 1), terms.limits.hard_trigger())
    return KEEP


def target(terms: Terms) -> int:
    """The length a compaction aims at, in tokens: the base, and at most 0.6 of the hard trigger."""
    shape, hard = terms.shape, terms.limits.hard_trigger()
    base = shape.prefix + shape.summary + int(terms.harder * shape.tail)
    return base if hard is None else min(base, DEEP_ENOUGH * hard // 10)


def _hard(state: Conversation, terms: Terms, length: int, *, exhausted: bool) -> Compact | None:
    limits, shape = terms.limits, terms.shape
    trigger, tier = limits.hard_trigger(), limits.tier_trigger()
    window = limits.brink() if exhausted else limits.window_trigger()
    if window is not None and length >= window:
        return Compact(Reason.WINDOW, target(terms), trigger)
    if tier is None or exhausted or length < tier:
        return None
    # A prompt that cannot be brought below the edge pays the dearer tier whatever is done.
    if length <= state.base or shape.prefix + shape.summary >= tier:
        return None
    return Compact(Reason.TIER, target(terms), trigger)


def _too_slow(state: Conversation, terms: Terms, length: int, arriving: int | None) -> bool:
    """Whether a request of this length breaks the latency budget and one of the target's keeps it.

    Where even the target is too slow, the length is not what is wrong.
    """
    if terms.latency is None:
        return False
    mean = state.growth() or Fraction(0)
    new = -(-mean.numerator // mean.denominator) if arriving is None else arriving
    return not terms.latency.fits(new, length) and terms.latency.fits(new, target(terms))


def pays(state: Conversation, terms: Terms, arriving: int | None, harder: Fraction = ONE) -> bool:
    """The soft trigger: whether a compaction now is worth its price, `harder` times.

    Of the price F0, what arrives and stays in the tail would have to be written anyway. The price must
    have been paid in re-reads to `EARLIEST`; from there on the excess over the base decides, which is
    compared with X* for this price and the mean growth; at `LATEST` nothing more is waited for.
    """
    # The bound, as long as no request grows by more than the tail: let R be the re-reads paid since the
    # base when this compacts at price p <= F0. A schedule without a cut since that base pays R >= p/2 as
    # well, so p more is at most 3 times as much. One with a cut pays at least F0 and what was written and
    # first read; this one pays at most 3/2 F0 more in re-reads, and less than F0 more where the other
    # compacted just when much arrived: 3.5 times in all. With w = c there is no such moment: 3 times.
    rates, shape = terms.rates, terms.shape
    if state.spent <= 0:
        return False
    anyway = max(0, rates.written - rates.cached) * min(arriving or 0, shape.tail)
    # Both sides are multiplied by the denominator, so that everything stays an integer.
    price = (overhead(rates, shape) - anyway) * harder.numerator
    spent = state.spent * harder.denominator
    if 2 * spent < EARLIEST * price:
        return False
    if 2 * spent >= LATEST * price:
        return True
    requests = state.requests + (arriving is not None)
    grown = state.grown + (arriving or 0)
    excess = state.tokens + (arriving or 0) - state.base
    # excess >= sqrt(2 price g / c), without the root and the divisions
    return excess * excess * rates.cached * harder.denominator * requests >= 2 * price * grown
