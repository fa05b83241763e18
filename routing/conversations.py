"""Where conversations went last, and what each may spend on leaving there: a small, bounded memory.

Leaving the replica where a conversation is warm costs what must be computed anew elsewhere. One that is
served warm earns a part of what that saved, so that it may move after some turns, and not at every change
of the load: once, not to and fro.

What conversations that were there lately hold of a replica's cache is summed up, as they may go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from ctxgate.routing.prefix_index import Place

    Name: TypeAlias = Hashable

MOST: Final = 10_000
EARNED: Final = 8
"""One part in so many of what a warm turn saved is earned: after so many turns one like it may be lost."""
LIVE_US: Final = 600_000_000
"""A conversation that has been silent for longer is not expected to go on."""


class Standing(NamedTuple):
    """Where a conversation went last and when, its credit in nano-dollars, its prompt's length in tokens."""

    place: Place
    credit_nano: int
    tokens: int
    at_us: int


class Conversations:
    """The latest ones, each by its name. No clock of its own: the times it is given never step back."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._standings: dict[Name, Standing] = {}  # the one that was silent for longest first
        self._live: dict[Name, None] = {}  # of these the ones that may go on, in the same order
        self._tokens: dict[Place, int] = {}

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._standings)

    def of(self, name: Name) -> Standing | None:
        """How one stands, None where it is not known."""
        return self._standings.get(name)

    def live_tokens(self, now_us: int) -> Mapping[Place, int]:
        """By place, the lengths of the conversations there that may go on; 0 where it is not named."""
        while self._live:
            name = next(iter(self._live))
            if self._standings[name].at_us > now_us - LIVE_US:
                break
            self._end(name)
        return self._tokens

    def went(
        self,
        name: Name,
        place: Place,
        now_us: int,
        *,
        tokens: int = 0,
        saved_nano: int = 0,
        paid_nano: int = 0,
    ) -> bool:
        """Note where one goes now, with a prompt of `tokens`; whether that is another replica than before.

        `saved_nano`: what the expected hit there costs less than computing it. `paid_nano`: what the turn
        costs more than at the warmest replica. A credit grows no further than what one turn saves.
        """
        self._end(name)
        before = self._standings.pop(name, None)
        credit = 0 if before is None else before.credit_nano
        credit = max(credit, min(credit + saved_nano // EARNED, saved_nano))
        self._standings[name] = Standing(place, max(credit - paid_nano, 0), tokens, now_us)
        self._live[name] = None
        self._tokens[place] = self._tokens.get(place, 0) + tokens
        if len(self._standings) > self._most:
            oldest = next(iter(self._standings))
            self._end(oldest)
            del self._standings[oldest]
        return before is not None and before.place != place

    def _end(self, name: Name) -> None:
        """Count it no longer among those that may go on."""
        if name in self._live:
            del self._live[name]
            standing = self._standings[name]
            self._tokens[standing.place] -= standing.tokens
