"""No cut, mask or split ever breaks a conversation, whatever its calls and results do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxgate.compression.cut import (
    Cut,
    CutReason,
    Range,
    head_length,
    plan_cut,
    remaining,
    stands,
    still_stands,
    units,
)
from ctxgate.compression.dialects.chat import Facts, facts_of, rounds
from ctxgate.compression.masking import NOTHING, Masking, mask
from ctxgate.compression.validity import pairing_faults
from support.chats import chat

pytestmark = pytest.mark.integration

SESSIONS = sorted((Path(__file__).parents[3] / "shared" / "trajectories").glob("*.jsonl"))
here = pytest.mark.skipif(not SESSIONS, reason="the recorded sessions lie outside the repository")
LARGE = 10**9


@st.composite
def conversations(draw: st.DrawFn) -> str:
    """Batches whose results come late, out of order, twice, never, or around other messages."""
    out = ["S"] * draw(st.integers(0, 2)) + ["U"] * draw(st.integers(0, 1))
    for number in range(draw(st.integers(0, 7))):
        ids = [f"c{number}{letter}" for letter in "abc"[: draw(st.integers(0, 3))]]
        if ids and draw(st.integers(0, 4)) == 0:
            ids[0] = "same"  # an id that is used again and again
        out.append(f"A[{','.join(ids)}]" if ids else "A")
        results = [f"R{each}" for each in draw(st.permutations(ids))]
        fate = draw(st.sampled_from(["whole", "whole", "whole", "partial", "approved", "twice", "foreign"]))
        if fate == "partial":
            results = results[: draw(st.integers(0, len(results)))]
        elif fate == "approved":
            results.insert(draw(st.integers(0, len(results))), draw(st.sampled_from(["U", "U A", "N"])))
        elif fate == "twice" and results:
            results.append(results[0])
        elif fate == "foreign":
            results.insert(draw(st.integers(0, len(results))), "Rnobody")
        out += results
        out += ["U"] * draw(st.integers(0, 1))
    return " ".join(out)


def gone(dropped: tuple[Range, ...]) -> set[int]:
    return {at for each in dropped for at in range(each.start, each.stop)}


def check_cut(messages: list[Facts], cut: Cut, keep: set[int]) -> None:
    dropped = gone(cut.dropped)
    assert stands(messages, cut.dropped)
    assert not pairing_faults(remaining(messages, cut.dropped)) - pairing_faults(messages)
    head = head_length(messages)
    users = [at for at in range(head, len(messages)) if messages[at].role == "user"]
    assert not dropped & {*range(head), *keep, *users[:1], *users[-1:]}
    assert not dropped or len(messages) - 1 not in dropped
    for each in rounds(messages):
        assert len({at in dropped for at in range(each.start, each.stop)}) == 1, "a round in part"
    callers = {call: at for at, facts in enumerate(messages) for call in facts.calls}
    for at, facts in enumerate(messages):
        if facts.role == "tool" and at not in dropped and (facts.answers or "") in callers:
            called = [n for n in range(at) if facts.answers in messages[n].calls]
            assert not called or any(n not in dropped for n in called), "a result without its call"


@settings(deadline=None, max_examples=150)
@given(conversations(), st.data())
def test_context_a1_b1_cuts_leave_whole_rounds(text: str, data: st.DataObject) -> None:
    messages = chat(text)
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=len(messages), max_size=len(messages)))
    indexes = st.integers(0, max(len(messages) - 1, 0))
    keep = data.draw(st.sets(indexes, max_size=2)) if messages else set()
    tail = data.draw(st.integers(0, 200))
    cut = plan_cut(messages, sizes, tail_tokens=tail, room=LARGE, keep=keep)
    check_cut(messages, cut, keep)
    if cut.dropped:
        kept_tail = sum(sizes[cut.tail :])
        last = units(messages)[-1]
        assert kept_tail <= tail or cut.tail == last.start
    assert (cut.reason is CutReason.CUT) == bool(cut.dropped)
    parts = units(messages)
    assert [at for part in parts for at in range(part.start, part.stop)] == list(range(len(messages)))


@settings(deadline=None, max_examples=100)
@given(conversations(), conversations(), st.integers(0, 100))
def test_context_b2_d10_a_cut_still_stands_when_the_conversation_goes_on(
    one: str, more: str, tail: int
) -> None:
    """What was dropped stays dropped by the next cut, unless a call is open; and nothing is torn.

    The continuation uses ids of its own, so a call that was given up stays so.
    """
    more = more.replace("S", "").replace("c", "d").replace("same", "other").strip()
    messages, later = chat(one), chat(f"{one} {more}")
    first = plan_cut(messages, [1] * len(messages), tail_tokens=tail, room=LARGE)
    if more.startswith("R"):
        return  # an orphan there belongs to the last message of the first part, which is never dropped
    assert stands(later, first.dropped)
    floor = first.dropped[-1].stop if first.dropped else 0
    second = plan_cut(later, [1] * len(later), tail_tokens=tail, room=LARGE, floor=floor)
    check_cut(later, second, set())


@settings(deadline=None, max_examples=150)
@given(conversations(), st.data())
def test_context_l2_masking_never_fails_and_only_grows(text: str, data: st.DataObject) -> None:
    messages = chat(text)
    sizes = data.draw(st.lists(st.integers(1, 3000), min_size=len(messages), max_size=len(messages)))
    tail = data.draw(st.integers(0, 4000))
    before: Masking = NOTHING
    for target in sorted(data.draw(st.lists(st.integers(0, 20_000), min_size=1, max_size=3)), reverse=True):
        found = mask(messages, sizes, target=target, tail_tokens=tail, before=before)
        assert found.fits == (found.tokens <= target)
        assert not pairing_faults(remaining(messages, found.dropped)) - pairing_faults(messages)
        assert gone(found.dropped) >= gone(before.dropped)
        assert set(found.masked) | gone(found.dropped) >= set(before.masked)
        assert all(messages[at].role == "tool" for at in found.masked)
        assert not gone(found.dropped) & set(range(head_length(messages)))
        assert mask(messages, sizes, target=target, tail_tokens=tail, before=found) == found
        if sum(sizes) <= target and before == NOTHING:
            assert (found.masked, found.dropped, found.split) == ((), (), ())
        before = found


def session(path: Path) -> tuple[list[Facts], list[int]]:
    facts: list[Facts] = []
    for line in path.read_bytes().splitlines()[1:]:
        message: dict[str, Any] = json.loads(line)
        message.pop("_recorded", None)
        facts.append(facts_of(json.dumps(message).encode()))
    return facts, [max(1, each.size // 4) for each in facts]


@here
@pytest.mark.parametrize("tail", [0, 2_000, 20_000])
def test_context_a11_no_cut_of_any_recorded_session_breaks_it(tail: int) -> None:
    """At every request of every session; each cut goes on standing in the whole session."""
    cuts = 0
    for path in SESSIONS:
        messages, sizes = session(path)
        assert not +pairing_faults(messages)
        requests = [at for at, facts in enumerate(messages) if facts.role == "assistant"]
        for at in requests[:: max(1, len(requests) // 60)]:
            cut = plan_cut(messages[:at], sizes[:at], tail_tokens=tail, room=LARGE)
            check_cut(messages[:at], cut, set())
            assert not +pairing_faults(remaining(messages, cut.dropped))
            assert stands(messages, cut.dropped)
            cuts += bool(cut.dropped)
    assert cuts >= 20


@here
@pytest.mark.parametrize("share", [0.5, 0.2, 0.05])
def test_every_recorded_session_can_be_masked_to_a_share(share: float) -> None:
    for path in SESSIONS:
        messages, sizes = session(path)
        floor = sum(sizes[: head_length(messages)]) + 1200  # the head, the task and the last message
        target = max(int(sum(sizes) * share), floor)
        found = mask(messages, sizes, target=target, tail_tokens=2_000)
        assert found.fits, path.stem
        assert not +pairing_faults(remaining(messages, found.dropped))


@given(conversations(), conversations(), st.data())
def test_what_surely_still_stands_does_stand(before: str, after: str, data: st.DataObject) -> None:
    whole = chat(f"{before} {after}".replace(" S", " U"))
    since = data.draw(st.integers(0, len(whole)))
    borders = sorted({part.start for part in units(whole[:since])} | {since})
    start, stop = (data.draw(st.sampled_from(borders)) for _ in range(2))
    dropped = [Range(min(start, stop), max(start, stop))]
    if stands(whole[:since], dropped) and still_stands(whole, dropped, since):
        assert stands(whole, dropped)
