"""What one compaction of a conversation costs and gains, in exact amounts.

Rates are nano-dollars per million tokens, so an amount here is rate times tokens: millionths of a
nano-dollar, an integer, never rounded. `to_nano` rounds once, at the end. Ratios are `Fraction`s.

Letters of the formulas: P stable prefix, H history that a compaction replaces, K recent tail kept
verbatim, S summary in the prompt, B = P + S + K base afterwards, So output of the summary call, q its
instruction, D damage; u, c, w, o the rates of uncached, cached, written and output tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import TYPE_CHECKING

from ctxgate.inference.rates import TOKENS_PER_RATE

if TYPE_CHECKING:
    from ctxgate.inference.rates import Rates


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a conversation around one compaction, in tokens.

    `damage_nano`: what one compaction harms by itself (reading again, lost facts), in nano-dollars.
    Raises ValueError for a negative part.
    """

    prefix: int  # P: system and tools
    summary: int  # S: the summary as it stands in the prompt
    tail: int  # K
    summary_output: int  # So: the summary call's output, reasoning included
    instruction: int = 0  # q
    damage_nano: int = 0  # D

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is negative")

    @property
    def base(self) -> int:
        """B: the prompt's length right after a compaction."""
        return self.prefix + self.summary + self.tail

    @property
    def damage(self) -> int:
        """D as an exact amount."""
        return self.damage_nano * TOKENS_PER_RATE


def to_nano(amount: int) -> int:
    """An exact amount in nano-dollars, rounded once, half up."""
    return (2 * amount + TOKENS_PER_RATE) // (2 * TOKENS_PER_RATE)


def warm_request(rates: Rates, length: int, growth: int, output: int) -> int:
    """Amount of a request of `length` prompt tokens whose last `growth` are new."""
    return rates.cached * (length - growth) + rates.written * growth + rates.output * output


def cold_request(rates: Rates, length: int, output: int) -> int:
    """Amount of a request whose whole prompt is written anew."""
    return rates.written * length + rates.output * output


def suffix_call(rates: Rates, shape: Shape, history: int) -> int:
    """C of a summary call that is a suffix of the warm conversation: `c(P+H+K) + w q + o So`."""
    read = rates.cached * (shape.prefix + history + shape.tail)
    return read + rates.written * shape.instruction + rates.output * shape.summary_output


def separate_call(rates: Rates, shape: Shape, history: int) -> int:
    """C of a summary call with a prompt of its own: `u(H+q) + o So`."""
    return rates.uncached * (history + shape.instruction) + rates.output * shape.summary_output


def cheaper_share(rates: Rates, shape: Shape, history: int) -> Fraction | None:
    """The share of the pool's rates below which another summarizer beats the warm suffix.

    None where a separate call costs nothing anyway.
    """
    separate = separate_call(rates, shape, history)
    return Fraction(suffix_call(rates, shape, history), separate) if separate else None


def gain(rates: Rates, shape: Shape, history: int, call: int, requests: int) -> int:
    """G(N): what a compaction by a call of amount `call` has saved after `requests` more requests."""
    return requests * rates.cached * (history - shape.summary) - _once(rates, shape) - call


def break_even(rates: Rates, shape: Shape, history: int, call: int) -> Fraction | None:
    """N*: the further requests after which a compaction has paid for itself; None: it never does."""
    saved = rates.cached * (history - shape.summary)
    return Fraction(_once(rates, shape) + call, saved) if saved > 0 else None


def overhead(rates: Rates, shape: Shape) -> int:
    """F0 = `c B + o So + w q + (w-c)(S+K) + D`: what a compaction costs however long the history is.

    The instruction is part of the call; without one (q = 0) this is the textbook form.
    """
    call = rates.cached * shape.base + rates.written * shape.instruction
    return call + rates.output * shape.summary_output + _once(rates, shape)


def optimal_growth(rates: Rates, shape: Shape, growth: Fraction) -> int | None:
    """X* = sqrt(2 F0 g / c): the best growth between compactions in tokens, rounded down.

    `growth` is g, tokens per request. None where cached tokens are free: then money has no optimum.
    """
    if rates.cached <= 0:
        return None
    return isqrt(int(2 * overhead(rates, shape) * growth / rates.cached))


def _once(rates: Rates, shape: Shape) -> int:
    """What the first prompt after a compaction costs more, and the damage: `(w-c)(S+K) + D`."""
    return (rates.written - rates.cached) * (shape.summary + shape.tail) + shape.damage


def edit_break_even(rates: Rates, removed: int, replacement: int, behind: int) -> Fraction | None:
    """The further requests after which an edit of a warm prompt pays: `((w-c)/c) Y / (dT-m)`.

    It replaces `removed` tokens by `replacement`, with `behind` tokens after them that must be written
    again. None: it never pays.
    """
    shorter = removed - replacement
    if shorter <= 0 or rates.cached <= 0:
        return None
    return Fraction((rates.written - rates.cached) * behind, rates.cached * shorter)


def drop_bound(rates: Rates, item: int, requests: int, length: int, call_output: int) -> Fraction:
    """Drop an item now and fetch it later iff the probability that it is needed lies below this.

    `item` is R tokens, needed at most once in `requests` (N) requests, in a context of `length` (L)
    tokens; fetching takes a call of `call_output` output tokens:
    `c R N / (w R + c R N/2 + c L + o call)`. 0 where nothing costs anything.
    """
    kept = 2 * rates.cached * item * requests
    fetched = 2 * (rates.written * item + rates.cached * length + rates.output * call_output)
    fetched += rates.cached * item * requests
    return Fraction(kept, fetched) if fetched else Fraction(0)
