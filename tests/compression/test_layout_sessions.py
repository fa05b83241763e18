"""Every request of every recorded session, at every level, with and without its client's habits.

The outgoing bodies are judged by rules put down here once more, beside the gateway's own checker.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway.perturb import Perturbation, perturb
from ctxgate.gateway.replay_run import Plan, request_body
from ctxgate.gateway.sessions import read_session
from support.forms import Process

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ctxgate.gateway.sessions import Turn

TRAJECTORIES: Final = Path(__file__).parents[3] / "shared" / "trajectories"
POLICIES: Final = {
    Level.SAFE: Policy(Level.SAFE),
    Level.DECLARED: Policy(Level.DECLARED, kinds=frozenset({VolatileKind.CLOCK})),
    Level.LEARNED: Policy(Level.LEARNED),
}
ALL_FIVE: Final = frozenset(Perturbation)
LONG: Final = 100  # requests; of a longer session with habits every eighth one is taken, for speed

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository"),
]


def turns(habits: Collection[Perturbation]) -> Iterator[Turn]:
    """All requests of all sessions, in order."""
    files = sorted(TRAJECTORIES.glob("*.jsonl"))
    assert len(files) == 27
    for path in files:
        session = read_session(path)
        for turn in session.turns():
            if not habits:
                yield turn
            elif session.requests <= LONG or turn.number % 8 == 0:
                yield perturb(turn, habits)


def faults(messages: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """What a wire and a template would not take: results without their call, calls without a result."""
    found: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for message in messages:
        if message["role"] == "tool":
            found["result without a call"] += waiting[message["tool_call_id"]] < 1
            waiting[message["tool_call_id"]] -= 1
            continue
        found["call without a result"] += sum(count for count in waiting.values() if count > 0)
        waiting = Counter(call["id"] for call in message.get("tool_calls") or ())
    return found


def meaning(message: Mapping[str, Any]) -> Any:
    """What an assistant message says but for ids and spelling."""
    calls = [
        [call["function"]["name"], json.loads(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], message.get("content") or "", calls]


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def judge(came: Mapping[str, Any], went: Mapping[str, Any], level: Level) -> None:
    """Compare what a client sent with what goes out."""
    assert came.keys() == went.keys()
    assert [each["role"] for each in came["messages"]] == [each["role"] for each in went["messages"]]
    assert faults(went["messages"]) == faults(came["messages"])
    tools = [{json.dumps(tool, sort_keys=True) for tool in body.get("tools", ())} for body in (came, went)]
    assert tools[0] == tools[1]
    for old, new in zip(came["messages"], went["messages"], strict=True):
        if old["role"] == "assistant":
            assert meaning(old) == meaning(new)
        elif level is Level.SAFE:
            assert text_of(old) == text_of(new)
        elif old["role"] in ("user", "tool"):
            assert text_of(new).startswith(text_of(old))  # at most a note behind it
    json.dumps(went, ensure_ascii=False).encode()  # well-formed Unicode


@pytest.mark.parametrize("habits", [frozenset(), ALL_FIVE], ids=["unperturbed", "all five"])
@pytest.mark.parametrize("level", POLICIES)
def test_no_request_of_any_session_is_invalid(level: Level, habits: frozenset[Perturbation]) -> None:
    process = Process(policy=POLICIES[level])
    count = changed = 0
    for turn in turns(habits):
        raw = request_body(turn, Plan("m", max_tokens=1))
        out = process.checked(raw)  # raises where the gateway's checker finds a fault
        judge(json.loads(raw), json.loads(out), level)
        count += 1
        changed += raw != out
    assert count > (380 if habits else 700)
    # The airline's own prompt says what time it is, which `declared` moves even though it never changes.
    assert changed > 100 if habits or level is Level.DECLARED else changed == 0
