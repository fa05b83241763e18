"""Savings per conversation, and the switch of each kind of conversation."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

import pytest

from ctxgate.compression.counterfactual import Terms, Turn
from ctxgate.compression.economics import Shape
from ctxgate.compression.verdict import PAUSE, STRETCH
from ctxgate.gateway import counterfactuals
from ctxgate.gateway.counterfactuals import ENDED_US, Beside, Counterfactuals
from ctxgate.inference.rates import Rates

if TYPE_CHECKING:
    from ctxgate.gateway.counterfactuals import Kind

# Ten nano-dollars per computed token, one per cached one.
RATES = Rates(10_000_000, 1_000_000, 40_000_000, 10_000_000, effective=date(2026, 11, 1))
TERMS = Terms(lambda _tokens: RATES, Shape(100, 50, 50, 20))
KIND = ("acme/search", b"root")


class Fleet:
    def __init__(self) -> None:
        self.off: list[tuple[Kind, int]] = []
        self.now_us = 0
        self.at: dict[str, bytes] = {}
        self.number = 0
        self.state = Counterfactuals(self._off)

    def _off(self, kind: Kind, nano: int) -> None:
        self.off.append((kind, nano))

    def answer(self, name: str, turn: Turn, *, paid: int | None = 0) -> Beside:
        """The next request of a conversation."""
        before = self.at.get(name)
        self.number += 1
        self.at[name] = after = b"%d" % self.number
        return self.state.answered(before, after, KIND, turn, TERMS, paid, self.now_us)

    def call(self, name: str, nano: int) -> None:
        self.state.called(self.at[name], nano)

    def compact(self, name: str, *, call: int = 900, forced: bool = False) -> None:
        """1,000 tokens become 200 of 1,100: the request itself costs 900 less, and the call costs `call`."""
        self.answer(name, Turn(1000, 0, 5))
        self.call(name, call)
        self.answer(name, Turn(200, 100, 5, removed=900, shared=100, forced=forced))

    def end(self) -> None:
        """All conversations fall silent for long, and other ones go on."""
        self.now_us += ENDED_US
        for _ in range(STRETCH):
            self.answer("other", Turn(10, 0, 1))


def test_a_request_says_what_it_would_have_cost() -> None:
    fleet = Fleet()
    assert fleet.answer("a", Turn(1000, 0, 5), paid=10_200) == Beside(10_200, None)
    fleet.call("a", 900)
    found = fleet.answer("a", Turn(200, 100, 5, removed=900, shared=100), paid=1300)
    assert found == Beside(2200, None)
    assert fleet.answer("a", Turn(250, None, 5, removed=900), paid=700) == Beside(None, None)
    assert fleet.answer("a", Turn(250, 250, 5, removed=900), paid=None) == Beside(None, None)


def test_gateways_n5_compaction_that_never_pays_switches_itself_off_with_an_event() -> None:
    fleet = Fleet()
    for number in range(STRETCH):
        fleet.compact(str(number), call=1000)
    assert fleet.state.allows(KIND)
    fleet.end()
    assert fleet.off == [(KIND, -100 * STRETCH)]
    assert not fleet.state.allows(KIND)
    assert fleet.state.allows(("acme/search", b"other root"))
    assert fleet.state.allows(("acme/other", b"root"))
    for _ in range(PAUSE):
        fleet.answer("other", Turn(10, 0, 1))
    assert fleet.state.allows(KIND)


@pytest.mark.parametrize(("call", "forced"), [(900, False), (5000, True)])
def test_it_stays_on_where_it_pays_or_cannot_be_helped(call: int, forced: bool) -> None:
    fleet = Fleet()
    for number in range(STRETCH + 1):
        fleet.compact(str(number), call=call, forced=forced)
    fleet.end()
    assert fleet.state.allows(KIND)
    assert fleet.off == []


def test_a_compaction_is_judged_when_the_next_one_takes_effect() -> None:
    fleet = Fleet()
    fleet.compact("a", call=1000)
    for _ in range(STRETCH):
        fleet.call("a", 5000)
        fleet.answer("a", Turn(200, 100, 5, removed=1000, shared=100))
    assert [kind for kind, _ in fleet.off] == [KIND]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counterfactuals, "CONVERSATIONS", 4)
    fleet = Fleet()
    for number in range(50):
        fleet.compact(str(number), call=1000)
    assert len(fleet.state._open) <= 5
    assert fleet.off


def test_a_fork_of_a_conversation_that_went_on_is_not_taken_for_it() -> None:
    fleet = Fleet()
    fleet.answer("a", Turn(1000, 0, 5))
    fleet.at["b"] = fleet.at["a"]
    fleet.call("a", 900)
    fleet.answer("a", Turn(200, 100, 5, removed=900, shared=100))
    # What the fork has in common with what was sent before is not known any more: no saving is claimed.
    assert fleet.answer("b", Turn(200, 100, 5, removed=900, shared=100), paid=7) == Beside(None, None)
    assert fleet.answer("b", Turn(250, 200, 5, removed=900), paid=700) == Beside(1600, None)


def test_the_same_request_again_goes_on_from_itself() -> None:
    fleet = Fleet()
    fleet.answer("a", Turn(1000, 0, 5))
    again = fleet.state.answered(None, fleet.at["a"], KIND, Turn(1000, 990, 5), TERMS, 1, 0)
    assert again == Beside(1, None)
    assert len(fleet.state._open) == 1


def test_a_call_is_booked_to_a_conversation_that_went_on_meanwhile() -> None:
    fleet = Fleet()
    fleet.answer("a", Turn(1000, 0, 5))
    name = fleet.at["a"]
    fleet.answer("a", Turn(1100, 1000, 5))
    fleet.state.called(name, 900)
    [known] = fleet.state._open.values()
    assert known.lines.calls == 900_000_000
    fleet.state.called(b"unheard of", 900)
    assert known.lines.calls == 900_000_000
