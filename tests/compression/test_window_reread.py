"""What a prompt costs that is no request of the client's own."""

from __future__ import annotations

from dataclasses import replace

from ctxgate.compression.window import Conversation, Terms, observed, reread
from support.compaction import PRICES, SHAPE

TERMS = Terms(PRICES["1/.1/1/4"], SHAPE)
GROWN = Conversation(42_000, 70_000, 60_000, 50, 0, 10, passes=1)


def test_a_look_up_pays_for_the_excess_once_more_and_is_no_growth() -> None:
    """A prompt of 72k whose answer goes on with 73k, of which 70k are cached: 31k above the base, read again.

    Of the 30k that a compaction would have spared, 2k were computed.
    """
    state = observed(GROWN, TERMS, 72_000)
    more = reread(state, TERMS, 73_000, cached=70_000)
    assert more == replace(state, spent=state.spent + 31_000 * 10**8 + 2_000 * 9 * 10**8)
    assert reread(state, TERMS, 73_000).spent == state.spent + 31_000 * 10**8
    assert reread(replace(GROWN, tokens=42_000), TERMS, 42_000).spent == 0, "nothing lies above the base"
