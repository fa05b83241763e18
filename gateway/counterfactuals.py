"""What compaction saves, kept per conversation while requests pass, and where it does not pay.

One per process. A conversation that has been silent for `ENDED_US` has ended: its last compaction is then
judged by what it saved until there. Conversations are judged together by their team and the template that
they begin with, which is what one kind of agent has in common.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from ctxgate.compression import verdict
from ctxgate.compression.counterfactual import START, Lines, Terms, Turn, called, looked_up, observed
from ctxgate.compression.economics import to_nano
from ctxgate.compression.recent import Recent
from ctxgate.inference.rates import TOKENS_PER_RATE
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxgate.compression.verdict import Verdict

ENDED_US: Final = 1_800_000_000  # half an hour
CONVERSATIONS: Final = 50_000
KINDS: Final = 10_000
_NAMES: Final = 4  # requests of a conversation that a call may still be paid for
_AT_ONCE: Final = 8  # ended conversations that one request sees to

Kind: TypeAlias = "tuple[str, bytes]"
"""A team (with its organisation), and the chain hash of what its conversations begin with."""


class Beside(Record, frozen=True):
    """What one request would have cost otherwise, in nano-dollars; None where unknown, or impossible.

    `plain`: had the client's own prompts been sent. `fixed`: had they been compacted at a fixed share of
    the window.
    """

    plain: int | None
    fixed: int | None


@dataclass(slots=True)
class _Open:
    """A conversation by the names (chain hashes) of its latest requests, the newest last."""

    lines: Lines
    kind: Kind
    seen_us: int
    names: list[bytes]
    forced: bool = False  # the latest compaction was necessary, and is not judged


class Counterfactuals:
    """Belongs to one event loop.

    `switched_off` is told of each kind for which compaction stops, and the nano-dollars (below zero) that
    its latest compactions have saved.
    """

    def __init__(self, switched_off: Callable[[Kind, int], None] = lambda _kind, _nano: None) -> None:
        self._switched_off = switched_off
        self._open: OrderedDict[bytes, _Open] = OrderedDict()  # by its newest name
        self._newest: dict[bytes, bytes] = {}  # by each name: the newest one
        self._verdicts: Recent[Kind, Verdict] = Recent(KINDS)

    def allows(self, kind: Kind) -> bool:
        """Whether such conversations may be compacted for money."""
        return self._verdict(kind).on

    def called(self, name: bytes, nano: int) -> None:
        """A call of the gateway's own (a summary) was paid for the conversation of a request."""
        newest = self._newest.get(name)
        if newest is not None:
            known = self._open[newest]
            known.lines = called(known.lines, nano * TOKENS_PER_RATE)

    def looked_up(self, name: bytes, nano: int) -> None:
        """The answer to a request needed so much more, as the model looked up what its prompt lacked."""
        newest = self._newest.get(name)
        if newest is not None:
            known = self._open[newest]
            known.lines = looked_up(known.lines, nano * TOKENS_PER_RATE)

    def answered(
        self,
        before: bytes | None,
        name: bytes,
        kind: Kind,
        turn: Turn,
        terms: Terms,
        paid_nano: int | None,
        now_us: int,
    ) -> Beside:
        """A request was answered and cost `paid_nano`; returns what it would have cost otherwise.

        `name` is the chain hash of its last message, `before` that of the request it goes on from (None
        where it begins).
        """
        self._end(now_us)
        known = self._renamed(before, name, kind, now_us)
        known.lines, costs = observed(known.lines, turn, terms)
        if turn.shared is not None:
            if costs.closed is not None and not known.forced:
                self._judge(kind, costs.closed)
            known.forced = turn.forced
        self._verdicts.put(kind, verdict.passed(self._verdict(kind)))
        if paid_nano is None:
            return Beside(None, None)
        return Beside(
            None if costs.plain is None else paid_nano + to_nano(costs.plain),
            None if costs.fixed is None else paid_nano + to_nano(costs.fixed),
        )

    def _verdict(self, kind: Kind) -> Verdict:
        return self._verdicts.get(kind) or verdict.NEW

    def _renamed(self, before: bytes | None, name: bytes, kind: Kind, now_us: int) -> _Open:
        """The conversation under its new name; a fork of one that has gone on begins anew."""
        if name in self._open:
            before = name  # the same request once more
        known = None if before is None else self._open.pop(before, None)
        if known is None:
            known = _Open(START, kind, now_us, [])
        known.seen_us = now_us
        if name not in known.names:
            known.names.append(name)
        for old in known.names[:-_NAMES]:
            self._newest.pop(old, None)
        del known.names[:-_NAMES]
        self._newest |= dict.fromkeys(known.names, name)
        self._open[name] = known
        return known

    def _end(self, now_us: int) -> None:
        """Judge what conversations left that have ended, or that are too many to be kept."""
        for _ in range(_AT_ONCE):
            if not self._open:
                return
            conversation = next(iter(self._open))
            oldest = self._open[conversation]
            if now_us - oldest.seen_us < ENDED_US and len(self._open) < CONVERSATIONS:
                return
            del self._open[conversation]
            for name in oldest.names:
                self._newest.pop(name, None)
            left = oldest.lines.left()
            if left is not None and not oldest.forced:
                self._judge(oldest.kind, left)

    def _judge(self, kind: Kind, net: int) -> None:
        before = self._verdict(kind)
        after = verdict.judged(before, net)
        self._verdicts.put(kind, after)
        if before.on and not after.on:
            self._switched_off(kind, to_nano(after.net))
