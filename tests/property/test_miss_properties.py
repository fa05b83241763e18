"""Every miss is explained by what the client did, over generated and recorded sessions."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.gateway.miss import MissCause
from ctxgate.gateway.perturb import Perturbation, perturb
from ctxgate.gateway.sessions import Session, read_session
from support.following import BLOCK, Follower, request
from support.habits import EXPLAINED, what_changed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.gateway.sessions import Turn

TRAJECTORIES = Path(__file__).parents[3] / "shared" / "trajectories"
SESSIONS = sorted([*TRAJECTORIES.glob("airline-00*.jsonl"), *TRAJECTORIES.glob("repair-*.jsonl")])

words = st.text("abcdefgh ", min_size=1, max_size=120)


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    """A conversation of up to eight requests, with tools and calls in some turns."""
    tools = tuple(
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": draw(words),
                "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in "abc"}},
            },
        }
        for number in range(draw(st.integers(0, 5)))
    )
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": draw(words)},
        {"role": "user", "content": draw(words)},
    ]
    for number in range(draw(st.integers(1, 7))):
        if draw(st.booleans()) and tools:
            arguments = json.dumps({"a": draw(words), "b": number, "c": None})
            function = {"name": "tool_0", "arguments": arguments}
            call = {"id": f"c{number}", "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": f"{number} {draw(words)}"},
            ]
        else:
            # No two messages say the same: one that is gone could else be taken for another that came.
            said = {"role": "assistant", "content": f"{number} {draw(words)}"}
            messages += [said, {"role": "user", "content": f"{number}: {draw(words)}"}]
    messages.append({"role": "assistant", "content": "done"})
    return Session(draw(st.sampled_from("stuv")), tools, tuple(messages))


def play(turns: Sequence[Turn], kind: Perturbation, follower: Follower) -> Counter[str]:
    """Send all turns and hold each explanation against what the client did; counts what was seen."""
    seen: Counter[str] = Counter()
    before, held = follower.send(request(turns[0])), 0
    for one, two in pairwise(turns):
        found = follower.send(request(two))
        changed = what_changed(one, two)
        could = min(before.prompt, found.prompt - 1) // BLOCK * BLOCK
        if found.miss is None:
            # Nothing differs, or the engine had read this form before, or nothing of a size was held.
            assert changed is None or found.cached >= 0.8 * could - 8 * BLOCK, (two.session, two.number)
            seen["hit"] += 1
        else:
            assert changed is not None, (two.session, two.number, found)
            what, index = changed
            assert (found.miss.cause, found.miss.detail) == EXPLAINED[kind, what], (two.session, two.number)
            assert found.miss.index == index
            assert found.miss.offset is not None
            assert 0 < (found.miss.avoidable_tokens or 0) <= found.prompt - found.cached
            # 1000 nano-dollars an uncached token, 100 a cached one.
            assert found.miss.avoidable_nano == 900 * (found.miss.avoidable_tokens or 0)
            seen[what] += 1
            held += found.miss.avoidable_tokens or 0
        before = found
    seen["avoidable"] = held
    return seen


@given(sessions())
def test_a_conversation_that_only_grows_misses_nothing(session: Session) -> None:
    follower = Follower()
    last = None
    for turn in session.turns():
        found = follower.send(request(turn))
        assert (found.miss, found.foreseen) == (None, None)
        if last is not None:
            assert found.expected == last.prompt // BLOCK * BLOCK
            # The last token before an answer may be another one where the answer begins with a space.
            assert found.expected - BLOCK <= found.cached <= found.expected
        last = found


@given(sessions(), st.sampled_from(Perturbation))
def test_each_habit_is_named_with_its_place(session: Session, kind: Perturbation) -> None:
    play([perturb(turn, {kind}) for turn in session.turns()], kind, Follower())


@given(sessions(), st.data())
def test_an_edited_message_is_named_by_its_index(session: Session, data: st.DataObject) -> None:
    one, two = list(session.turns())[-2:]
    follower = Follower()
    follower.send(request(one))
    at = data.draw(st.integers(0, len(two.messages) - 1))
    edited = [*two.messages]
    edited[at] = {**edited[at], "content": "something else entirely"}
    found = follower.send(json.dumps({"model": "m", "tools": two.tools or None, "messages": edited}).encode())
    if found.miss is not None:
        cause = MissCause.SYSTEM_CHANGED if at == 0 else MissCause.HISTORY_EDITED
        assert (found.miss.cause, found.miss.index) == (cause, at)
        assert found.miss.avoidable_tokens is not None
        assert found.miss.avoidable_tokens <= found.prompt - found.cached


@pytest.mark.integration
@pytest.mark.skipif(not SESSIONS, reason="the recorded sessions are not here")
@pytest.mark.parametrize("kind", [*Perturbation])
def test_every_habit_in_every_recorded_session(kind: Perturbation) -> None:
    seen: Counter[str] = Counter()
    for path in SESSIONS:
        turns = [perturb(turn, {kind}) for turn in read_session(path).turns()][:40]
        seen += play(turns, kind, Follower())
    wanted = {what for perturbation, what in EXPLAINED if perturbation is kind and what != "message"}
    assert wanted <= set(seen)
    assert (seen["avoidable"] > 0) is bool(wanted)
