"""What look-ups cost, in the rule that decides on compactions and in what it would have cost without any."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.ledger import EVERYTHING
from support.gateway import RATES, until
from support.looking_up import CONTEXT, Agent, call, calls, says

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ctxgate.compression.window import Conversation
    from ctxgate.gateway.context_terms import Known
    from ctxgate.gateway.context_turn import Turn
    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

LONG = 90_000  # above what a compaction would leave: prefix, summary and tail


def has_windows(gateway: Gateway) -> bool:
    """Whether every replica has said how long a prompt may be."""
    return all(record.windows for record in gateway.services.fleet.records())


def states_of(gateway: Gateway) -> list[Conversation]:
    """What is known of conversations after each request, as it becomes known."""
    states: list[Conversation] = []
    stage = gateway.services.context
    remember = stage.remember

    def noted(turn: Turn, known: Known) -> None:
        states.append(known.state)
        remember(turn, known)

    stage.remember = noted  # type: ignore[method-assign]  # a spy
    return states


@pytest.mark.parametrize("stream", [False, True])
async def test_each_answer_that_goes_on_pays_for_the_history_once_more(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    """Of LONG and 1,000 tokens more, the second call finds all but the 1,000 in the cache."""
    spent = []
    upstream.models = {"object": "list", "data": [{"id": "m", "max_model_len": 2**20}]}
    for looks_up in (False, True):
        gateway = await start_gateway(upstream, context=CONTEXT)
        await until(partial(has_windows, gateway))
        one = Agent(gateway, upstream, stream)
        states = states_of(one.gateway)
        await one.begin()
        first: dict[str, Any] = {"prompt": LONG, "cached": LONG - 500, "completion": 20}
        more: dict[str, Any] = {"prompt": LONG + 1000, "cached": LONG, "completion": 5}
        upstream.play(
            *([calls(call(), **first), says("Yes.", **more)] if looks_up else [says("Yes.", **first)])
        )
        assert (await one.ask()).status == 200
        await one.gateway.quiet()
        state = states[-1]
        assert (state.tokens, state.requests) == (LONG, 2)
        spent.append(state.spent)
        above = LONG + 1000 - state.base
    assert spent[1] - spent[0] == above * RATES.cached


@pytest.mark.parametrize("stream", [False, True])
async def test_saved_is_what_the_clients_prompt_would_have_cost_with_the_same_answer(
    upstream: Upstream, start_gateway: Start, stream: bool
) -> None:
    """The call took 20 tokens, the answer 200: without a look-up only these 200 would have been said.

    So what is lost of the whole cost is the second prompt, 10 x 1,000 + 190 x 100 nano-dollars, and the
    call, 20 x 2,000.
    """
    one = Agent(await start_gateway(upstream, context=CONTEXT), upstream, stream)
    await one.begin()
    upstream.play(
        calls(call(), prompt=150, cached=140, completion=20),
        says("It is.", prompt=200, cached=190, completion=200),
    )
    assert (await one.ask()).status == 200
    rows = [row.settled for row in (await one.gateway.rows())[-2:]]
    assert [row.charge.total for row in rows] == [10_000 + 14_000 + 40_000, 10_000 + 19_000 + 400_000]
    answer, further = rows
    assert answer.plain_nano is not None
    assert further.plain_nano == further.fixed_nano == 400_000 - 40_000
    (saved,) = await one.gateway.services.ledger.savings(EVERYTHING)
    lost = 10_000 + 19_000 + 40_000
    assert saved.saved_nano == (answer.plain_nano - 64_000) - lost
    assert saved.calls == 1
