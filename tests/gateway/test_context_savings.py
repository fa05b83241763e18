"""Where compaction does not pay it stops, and says so; what an answer would have cost is found by record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ctxgate.compression.compaction import Compaction
from ctxgate.compression.window import Compact, Reason, target
from ctxgate.gateway import context_savings
from ctxgate.gateway.context_savings import Savings
from ctxgate.gateway.replay_policies_check import gateway_cuts
from ctxgate.gateway.replay_policies_run import Setting, play
from ctxgate.inference.prompts import PromptRenderer
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, Usage, measured
from support.steady import CONTEXT, RATES, steady

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ctxgate.compression.window import Conversation, Decision, Terms
    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]


def always(reason: Reason) -> Callable[[Conversation, Terms], Decision]:
    """Compact whenever the prompt is long enough for it."""

    def decided(state: Conversation, terms: Terms) -> Decision:
        return Compact(reason, target(terms), None)

    return decided


@pytest.mark.integration
@pytest.mark.parametrize(
    ("reason", "stops"), [(Reason.MONEY, True), (Reason.WINDOW, False), (Reason.LATENCY, False)]
)
async def test_only_compaction_for_money_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, reason: Reason, stops: bool
) -> None:
    monkeypatch.setattr(Savings, "allows", lambda _self, _request: False)
    setting = Setting(RATES, CONTEXT, PromptRenderer(), 12)
    run = await play(steady(12), "always", always(reason), setting)
    assert (gateway_cuts(run.attempts) == 0) is stops


async def test_the_event_is_a_warning_and_a_metric_and_names_only_the_team(
    upstream: Upstream, start_gateway: Start, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(upstream)
    gateway.services.savings._switched_off(("acme/alpha", b"root"), -1_500_000_000)
    assert caplog.messages == [
        "compaction for money is off for one kind of conversation of team alpha: its latest ones have cost"
        " 1.5 dollars more than they saved"
    ]
    assert (await gateway.metrics())['ctxgate_compaction_off_total{team="alpha"}'] == 1


@pytest.mark.parametrize(
    ("record", "old", "first"),
    [
        (Compaction(b"", 9, dropped=((3, 7),), carrier=b"{}"), None, 3),
        (Compaction(b"", 9, masked=(4, 6)), None, 4),
        (Compaction(b"", 9, masked=(4, 6)), Compaction(b"", 8, masked=(4,)), 6),
        # A later summary stands where the first one did, so all behind that place is new.
        (
            Compaction(b"", 9, dropped=((3, 9),), carrier=b"{2}"),
            Compaction(b"", 7, dropped=((3, 7),), carrier=b"{1}"),
            3,
        ),
        (
            Compaction(b"", 9, dropped=((3, 7),), carrier=b"{1}", split=((8, 400),)),
            Compaction(b"", 7, dropped=((3, 7),), carrier=b"{1}"),
            8,
        ),
    ],
)
def test_what_a_new_record_changes_first(record: Compaction, old: Compaction | None, first: int) -> None:
    assert context_savings._first_change(record, old) == first


def test_a_refused_prompt_is_no_request_of_the_conversation() -> None:
    read = Usage(measured(20), measured(80), measured(7))
    assert context_savings._is_measured(read)
    assert not context_savings._is_measured(NOTHING_USED)
    assert not context_savings._is_measured(NOTHING_KNOWN)
