"""Whether a passage is worth bringing back: relevant enough, and cheaper than being fetched by the model.

A passage that stays out can still be had: the model reads the file again, or asks. By the rule of
`economics.drop_bound` it is cheaper to leave it out while the probability that it is needed lies below a
bound; here that is turned round.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.economics import drop_bound
from ctxgate.compression.identifiers import estimated_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxgate.inference.rates import Rates

LEAST: Final = 0.4
"""Relevance below which nothing is brought back (measured: docs/decisions/0017-recall.md)."""

CALL_OUTPUT: Final = 100
"""Output tokens of a call that fetches something."""

# How often the first window of a relevance answered the question, where half of the questions had no answer.
_CALIBRATION: Final = ((0.4, Fraction(1, 4)), (0.5, Fraction(1, 2)), (0.65, Fraction(9, 10)))


def probability(relevance: float) -> Fraction:
    """How likely a passage of that relevance is what is asked for."""
    found = Fraction(0)
    for least, share in _CALIBRATION:
        if relevance >= least:
            found = share
    return found


@dataclass(frozen=True, slots=True)
class Gate:
    """What a passage must pass.

    `rates`: those of the pool; None where they are not known, and then relevance alone decides.
    `requests`: how many more are expected to carry the passage; `length`: of the prompt, in tokens.
    `held`: whether the prompt has a text already. `without`: ids of messages that are not quoted, such as
    the one that asks. `among`: the only ids that may be quoted; None: any of the conversation's.
    """

    rates: Rates | None = None
    requests: int = 0
    length: int = 0
    held: Callable[[str], bool] = field(default=lambda _: False)
    least: float = LEAST
    without: frozenset[str] = frozenset()
    among: frozenset[str] | None = None

    def quotes(self, id_: str) -> bool:
        """Whether a message may be quoted, by its id."""
        return id_ not in self.without and (self.among is None or id_ in self.among)

    def passes(self, text: str, relevance: float) -> bool:
        """Whether a passage is worth its place."""
        if relevance < self.least:
            return False
        if self.rates is None:
            return True
        tokens = estimated_tokens(text)
        bound = drop_bound(self.rates, tokens, self.requests, self.length, CALL_OUTPUT)
        return probability(relevance) >= bound


OPEN: Final = Gate()
"""Only relevance counts."""


def held_in(body: bytes) -> Callable[[str], bool]:
    """Whether a request's JSON holds a text verbatim, however its client escapes it."""

    def held(text: str) -> bool:
        plain = msgspec.json.encode(text)[1:-1]
        if plain in body:
            return True
        return not text.isascii() and _escaped(text) in body

    return held


def _escaped(text: str) -> bytes:
    """A text's JSON in ASCII alone."""
    return json.dumps(text).encode()[1:-1]
