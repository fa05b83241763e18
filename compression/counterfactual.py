"""What a conversation would have cost without compaction, and with the rule of a fixed share of the window.

Beside what was sent, three lines are kept from request to request, with the same growth and answers:

- *plain*: the prompts that the client itself sent, as without this gateway;
- *fixed*: compacted whenever the prompt reaches `FIXED_PERCENT` of the window, by a suffix call of the
  same shape, as many clients do it;
- *without*: ours, but without the latest compaction: what that one saves is judged by it.

A line shares with the request before it what it had sent then. Of that, the engine's cache is taken to
hold the same share as of ours: a conversation that was cold would have been cold anyway. So before the
first compaction every line costs exactly what was paid. A prompt beyond the window would have failed;
then the plain line has no cost, and nothing counts as saved.

Amounts are exact, rate times tokens, as in `economics`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxgate.compression.economics import Shape
    from ctxgate.inference.rates import Rates

FIXED_PERCENT: Final = 80
WARM_PERCENT: Final = 80
"""Of what is shared, from which on all of it counts as cached: blocks are whole, and estimates are rough."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered request, in tokens, by the engine's count where it is one.

    `removed`: how much longer the client's own prompt is (estimated). `shared`: what this prompt has in
    common with the one before, where a compaction took effect with it; None: all that was sent before.
    `cached` is None where the engine does not say. `forced`: that compaction was necessary to fit.
    """

    prompt: int
    cached: int | None
    output: int
    removed: int = 0
    shared: int | None = None
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Terms:
    """`rates` gives those of a prompt of so many tokens; `window` is None where none is known."""

    rates: Callable[[int], Rates]
    shape: Shape
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Lines:
    """The state of one conversation: the prompt lengths of the last request on each line.

    `without` is how much longer ours would be without the latest compaction; None before the first.
    `net` is what that one has saved so far, less its price; `calls` the price of calls whose summary has
    not taken effect.
    """

    prompt: int = 0
    plain: int = 0
    fixed: int = 0
    without: int | None = None
    net: int = 0
    calls: int = 0

    def left(self) -> int | None:
        """What the latest compaction came to when the conversation ends here; None where there was none.

        Calls that came to nothing count as well.
        """
        return self.net - self.calls if self.without is not None or self.calls else None


@dataclass(frozen=True, slots=True)
class Costs:
    """What one request would have cost more (or, below zero, less) than it did, by line.

    None: unknown, or, on the plain line, a prompt that would not have fitted. `closed` is what the
    compaction before came to, where another one took effect with this request.
    """

    plain: int | None
    fixed: int | None
    closed: int | None = None


START: Final = Lines()


def called(lines: Lines, amount: int) -> Lines:
    """The state after a call of the gateway's own for this conversation."""
    return replace(lines, calls=lines.calls + amount)


def looked_up(lines: Lines, amount: int) -> Lines:
    """The state after the model has looked something up: a price of the latest compaction, if any."""
    return lines if lines.without is None else replace(lines, net=lines.net - amount)


def observed(lines: Lines, turn: Turn, terms: Terms) -> tuple[Lines, Costs]:
    """The state after an answered request, and what it would have cost on the other lines."""
    closed: int | None = None
    if turn.shared is not None:
        closed = None if lines.without is None else lines.net
        before = lines.prompt + _growth(lines, turn)
        lines = replace(lines, without=max(0, before - turn.prompt), net=-lines.calls, calls=0)
    growth = _growth(lines, turn)
    fixed, cut = _next_fixed(lines, growth, terms)
    length = turn.prompt + turn.removed
    after = replace(lines, prompt=turn.prompt, plain=length, fixed=fixed)
    # A conversation that begins here with a compacted prompt was begun elsewhere: what it shared is unknown.
    if turn.cached is None or (turn.removed and not lines.plain):
        return after, Costs(None, None, closed)
    share = _Share(turn, lines, terms.rates)
    plain = share.beside(length, lines.plain)
    if cut is None:
        beside = share.beside(fixed, lines.fixed)
    else:
        rates, shape = terms.rates(cut), terms.shape
        call = rates.written * shape.instruction + rates.output * shape.summary_output + shape.damage
        beside = share.beside(fixed, shape.prefix) + share.read(cut, cut) + call
    if lines.without is not None:
        before = lines.prompt + (0 if turn.shared is not None else lines.without)
        saved = share.beside(turn.prompt + lines.without, before)
        after = replace(after, net=after.net + saved)
    fits = terms.window is None or length + turn.output <= terms.window
    return after, Costs(plain if fits else None, beside if terms.window is not None else None, closed)


def _growth(lines: Lines, turn: Turn) -> int:
    """By how much the client's conversation has grown; below zero where it was edited."""
    return turn.prompt + turn.removed - lines.plain


def _next_fixed(lines: Lines, growth: int, terms: Terms) -> tuple[int, int | None]:
    """The length on the fixed line, and the one at which it was compacted just before this request."""
    length = max(0, lines.fixed + growth)
    if terms.window is None or 100 * length < FIXED_PERCENT * terms.window or length <= terms.shape.base:
        return length, None
    return terms.shape.base, length


class _Share:
    """Prices prompts of other lengths as if as much of what they share were cached as of ours."""

    def __init__(self, turn: Turn, lines: Lines, rates: Callable[[int], Rates]) -> None:
        self._turn = turn
        self._rates = rates
        self._cached = turn.cached or 0
        sent = lines.prompt if turn.shared is None else turn.shared
        self._shared = min(sent, turn.prompt)
        self._paid = self._price(turn.prompt, self._cached)

    def beside(self, length: int, sent: int) -> int:
        """What a prompt of `length`, of which `sent` were sent before, costs more than ours."""
        return self._price(length, self._hit(length, sent)) - self._paid

    def read(self, length: int, sent: int) -> int:
        """What reading a prompt of `length` costs, without an answer."""
        return self._price(length, self._hit(length, sent), output=0)

    def _hit(self, length: int, sent: int) -> int:
        """Cached tokens: ours, and of what is shared beyond ours the same share."""
        sent = min(sent, length)
        more = sent - self._shared
        held = min(self._cached, self._shared)
        warm = 100 * held >= WARM_PERCENT * self._shared
        hit = self._cached + (more if warm else more * held // self._shared)
        return max(0, min(hit, length))

    def _price(self, length: int, cached: int, output: int | None = None) -> int:
        rates = self._rates(length)
        said = self._turn.output if output is None else output
        return rates.cached * cached + rates.written * (length - cached) + rates.output * said
