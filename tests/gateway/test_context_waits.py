"""How long a conversation waits after a compaction in the background that found too little to leave out."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from ctxgate.gateway.config import Context
from ctxgate.gateway.context_background import until_more_is_old
from ctxgate.gateway.context_masking import Tokens
from support.chats import chat

if TYPE_CHECKING:
    from ctxgate.gateway.context_background import Job

# The head, the task, and rounds of 1,000 and 5,000 tokens.
TEXT, TOKENS = "S U A[a] Ra A[b] Rb", (500, 100, 200, 800, 1000, 4000)


def job(tail: int, harder: Fraction = Fraction(1)) -> Job:
    turn = SimpleNamespace(facts=chat(TEXT), context=Context(summary_tokens=700))
    terms = SimpleNamespace(shape=SimpleNamespace(tail=tail), harder=harder)
    return cast("Job", SimpleNamespace(turn=turn, terms=terms, tokens=Tokens(TOKENS, {})))


@pytest.mark.parametrize(
    ("tail", "saved", "growth"),
    [
        (6000, 0, 701),  # both rounds fill the tail: whatever comes moves it on, by more than a summary
        (8600, 0, 2000 + 701),  # all that there is, of 6,600 tokens
        (5500, 0, 500 + 701),  # the last round alone
        (5500, 600, 500 + 101),
        (3000, 700, 1),  # the last round, which is more than the tail
    ],
)
def test_context_f2_the_next_try_waits_until_the_tail_has_moved_on(
    tail: int, saved: int, growth: int
) -> None:
    assert until_more_is_old(job(tail), saved) == growth
    assert until_more_is_old(job(2 * tail, Fraction(1, 2)), saved) == growth
