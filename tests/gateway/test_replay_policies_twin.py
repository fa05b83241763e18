"""The policies through the whole gateway, against a twin: the ledger's dollars beside the model's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ctxgate.compression.economics import Shape
from ctxgate.compression.schedule import Step
from ctxgate.compression.window import Compact, Conversation, Terms
from ctxgate.gateway.cli import main
from ctxgate.gateway.ledger import Attempt
from ctxgate.gateway.replay_policies import parse_rates
from ctxgate.gateway.replay_policies_all import Unplayable, compare
from ctxgate.gateway.replay_policies_check import (
    Compared,
    as_text,
    carried_out,
    gateway_cuts,
    left_by,
    modelled,
    policies,
    same_order,
    scheduled,
    sizes_of,
)
from ctxgate.gateway.replay_policies_run import Setting, play
from ctxgate.inference.prompts import PromptRenderer
from ctxgate.inference.usage import Usage, measured
from support.ledgers import opened, settled
from support.steady import CONTEXT, RATES, session_bytes, steady

if TYPE_CHECKING:
    from pathlib import Path


def attempt(purpose: str, prompt: int, cached: int, output: int) -> Attempt:
    usage = Usage(measured(prompt - cached), measured(cached), measured(output))
    return Attempt(opened(purpose=purpose), settled(usage=usage))


@pytest.mark.integration
async def test_the_same_policies_through_the_gateway_cost_what_the_model_says() -> None:
    compared, sizes = await compare(steady(40), RATES, (6000, 12_000), 40, context=CONTEXT)
    assert [each.policy for each in compared] == [
        *("6000", "12000", "never", "ski-rental", "shipped", "optimum"),
    ]
    found = {each.policy: each for each in compared}
    assert found["never"].gateway_cuts == 0
    assert all(each.gateway_cuts > 1 for each in compared if each.policy != "never")
    assert same_order(compared), as_text(compared, sizes)
    assert all(abs(each.difference) < 0.05 for each in compared), as_text(compared, sizes)
    assert found["shipped"].gateway_nano < found["never"].gateway_nano


@pytest.mark.integration
def test_the_command_compares_and_says_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steady.jsonl"
    path.write_bytes(session_bytes(4))
    command = ["replay", str(path), "--policies", "--twin", "--triggers", "6000"]
    assert main(command) == 2
    assert "too short for its triggers" in capsys.readouterr().err
    assert main(["replay", str(path), "--to", "http://127.0.0.1:1", "--twin"]) == 2
    assert "--twin goes with --policies" in capsys.readouterr().err


@pytest.mark.integration
async def test_a_session_that_is_never_compacted_cannot_be_compared() -> None:
    with pytest.raises(Unplayable, match="no policy has compacted"):
        await compare(steady(2), RATES, (), 2)


NEVER = [attempt("answer", 1100, 100, 5), attempt("answer", 1300, 1100, 6), attempt("answer", 1600, 1300, 7)]
CUT = [
    attempt("answer", 1100, 100, 5),
    attempt("summary", 1150, 1100, 40),
    attempt("answer", 400, 100, 6),
    attempt("answer", 700, 400, 7),
]


def test_sizes_are_those_that_were_measured() -> None:
    sizes = sizes_of(NEVER, [NEVER, CUT])
    assert sizes.steps == (Step(1000, 5), Step(200, 6), Step(300, 7))
    assert sizes.shape == Shape(prefix=100, summary=0, tail=300, summary_output=40, instruction=50)
    with pytest.raises(ValueError, match="no policy has compacted"):
        sizes_of(NEVER, [NEVER])


def test_what_each_compaction_left_is_known() -> None:
    deep = [*CUT[:2], attempt("answer", 200, 100, 6)]
    sizes = sizes_of(NEVER, [CUT, deep])
    assert sizes.shape.tail == 200
    assert (left_by([*CUT, *deep]), left_by(NEVER)) == ((400, 200), ())
    assert (carried_out([*CUT, *deep[1:]]), carried_out(NEVER)) == ((1, 3), ())


def test_a_schedule_goes_on_until_each_of_its_cuts_was_made() -> None:
    decide = scheduled([1, 3])
    terms = Terms(RATES, Shape(100, 10, 10, 5))
    done = [
        isinstance(decide(Conversation(120, 500, requests=requests, passes=passes), terms), Compact)
        for requests, passes in ((0, 0), (1, 0), (2, 0), (2, 1), (3, 1), (9, 2))
    ]
    assert done == [False, True, True, False, True, False]


def test_the_model_of_a_policy_by_hand() -> None:
    rates = parse_rates("10/1/10/100")  # thousandths of a nano-dollar per token: 10, 1, 100
    sizes = sizes_of(NEVER, [CUT])
    known = policies([1000])
    kept = (100 + 10_000 + 500) + (1100 + 2000 + 600) + (1300 + 3000 + 700)
    assert modelled(known["never"], sizes, rates, sizes.shape) == (kept * 1000, 0)
    # Before the second request: 1,100 are read, 50 more and an answer of 40; then 100 cached and 300 new.
    cut = (1100 + 500 + 4000) + (100 + 3000 + 600)
    last = 400 + 3000 + 700
    paid = 10_600 + cut + last
    assert modelled(known["1000"], sizes, rates, sizes.shape) == (paid * 1000, 1)
    # Where it left 500 instead of 400: 100 more written, then 100 more read.
    assert modelled(known["1000"], sizes, rates, sizes.shape, [500]) == ((paid + 1000 + 100) * 1000, 1)


def test_order_counts_where_the_model_tells_policies_apart() -> None:
    def one(name: str, model: int, gateway: int) -> Compared:
        return Compared(name, model, gateway, 0, 0)

    assert same_order([one("a", 100, 100), one("b", 103, 101)])
    assert not same_order([one("a", 100, 101), one("b", 103, 101)])
    assert same_order([one("a", 1000, 1010), one("b", 1015, 1000)])
    assert one("a", 200, 190).difference == pytest.approx(-0.05)


@pytest.mark.integration
async def test_what_the_ledger_says_that_plain_prompts_would_have_cost_is_what_they_cost() -> None:
    setting = Setting(RATES, CONTEXT, PromptRenderer(), 36)
    chosen = policies([6000])
    never = await play(steady(36), "never", chosen["never"], setting)
    ours = await play(steady(36), "6000", chosen["6000"], setting)
    assert gateway_cuts(ours.attempts) >= 3
    plain = [each.settled.plain_nano for each in ours.attempts if each.opened.purpose == "answer"]
    small = sum(nano is None for nano in plain)  # bodies too small for the context stage: never compacted
    assert 0 < small < 6
    known = sum(nano for nano in plain if nano is not None)
    costs = [each.settled.charge.total or 0 for each in never.attempts]
    assert known == pytest.approx(sum(costs[small:]), rel=0.02)
    # Nothing was compacted in the run that never is: each request would have cost what it did.
    assert [each.settled.plain_nano for each in never.attempts[small:]] == costs[small:]
    summaries = [each for each in ours.attempts if each.opened.purpose == "summary"]
    assert summaries
    assert all(each.settled.plain_nano is None for each in summaries)
