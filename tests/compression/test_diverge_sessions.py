"""Every habit of real clients, played on recorded sessions, is explained: kind and place, each time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ctxgate.compression.diverge import diverge
from ctxgate.compression.divergence import DivergenceKind as Kind
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway.perturb import Perturbation, perturb
from ctxgate.gateway.sessions import Turn, read_session
from ctxgate.inference import wire

SESSIONS = sorted((Path(__file__).parents[3] / "shared" / "trajectories").glob("*.jsonl"))
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not SESSIONS, reason="the recorded sessions are not here"),
]


def request_of(turn: Turn) -> wire.Body:
    request = {"model": "m", "tools": turn.tools, "messages": turn.messages}
    return wire.parse(json.dumps(request).encode())


def expected(kind: Perturbation, one: Turn, two: Turn) -> tuple[Kind, int | None]:
    """The kind and the index, from what the perturbation did, by plain comparison of values."""
    if one.tools != two.tools or json.dumps(one.tools) != json.dumps(two.tools):
        pairs = zip(map(json.dumps, one.tools), map(json.dumps, two.tools), strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.tools), len(two.tools)))
        by_kind = {
            Perturbation.TOOL_ORDER: Kind.TOOLS_REORDERED,
            Perturbation.JSON_KEYS: Kind.TOOLS_RESERIALIZED,
            Perturbation.LATE_TOOL: Kind.TOOLS_CHANGED,
        }
        return by_kind[kind], at
    for at, (a, b) in enumerate(zip(one.messages, two.messages, strict=False)):
        if json.dumps(a) != json.dumps(b):
            return (Kind.VOLATILE_IN_HEAD if kind is Perturbation.CLOCK else Kind.HISTORY_RESERIALIZED), at
    return Kind.EXTENDS, None


INTENDED = {
    Perturbation.CLOCK: {Kind.VOLATILE_IN_HEAD},
    Perturbation.TOOL_ORDER: {Kind.TOOLS_REORDERED},
    Perturbation.JSON_KEYS: {Kind.TOOLS_RESERIALIZED},
    Perturbation.RESERIALIZE: {Kind.HISTORY_RESERIALIZED},
    Perturbation.LATE_TOOL: {Kind.TOOLS_CHANGED},
}


def sampled(turns: list[Turn]) -> list[tuple[Turn, Turn]]:
    """Consecutive turns: at the start, around the middle where the late tool comes, and at the end."""
    middle = next(turn.number for turn in turns if 2 * turn.number >= turn.of)
    wanted = {1, 2, 3, middle - 1, middle, middle + 1, len(turns) - 1} & set(range(1, len(turns)))
    return [(turns[number - 1], turns[number]) for number in sorted(wanted)]


@pytest.mark.parametrize("kind", [*Perturbation])
def test_every_perturbation_of_every_real_session_is_explained(kind: Perturbation) -> None:
    seen: Counter[Kind] = Counter()
    for path in SESSIONS:
        for pair in sampled(list(read_session(path).turns())):
            one, two = (perturb(turn, {kind}) for turn in pair)
            found = diverge(request_of(one), request_of(two))
            assert (found.kind, found.index) == expected(kind, one, two), (path.stem, two.number)
            if found.kind is Kind.VOLATILE_IN_HEAD:
                assert (found.volatile, found.field) == (VolatileKind.CLOCK, "messages[0].content")
            seen[found.kind] += 1
    assert seen.total() >= 4 * len(SESSIONS)
    assert set(seen) - {Kind.EXTENDS, Kind.HISTORY_RESERIALIZED} == INTENDED[kind] - {
        Kind.HISTORY_RESERIALIZED
    }
    assert INTENDED[kind] <= set(seen)


def test_unperturbed_sessions_extend_turn_by_turn() -> None:
    for path in SESSIONS:
        for one, two in sampled(list(read_session(path).turns())):
            assert diverge(request_of(one), request_of(two)).kind is Kind.EXTENDS


def expected_of_tools(one: Turn, two: Turn) -> tuple[Kind, int] | None:
    """What a mix of all habits does to the tools first, told by their names and values."""
    names = [[tool["function"]["name"] for tool in turn.tools] for turn in (one, two)]
    for at, (a, b) in enumerate(zip(one.tools, two.tools, strict=False)):
        if json.dumps(a) != json.dumps(b):
            if a == b:
                return Kind.TOOLS_RESERIALIZED, at
            moved = names[0][at] in names[1] and names[1][at] in names[0]
            return (Kind.TOOLS_REORDERED if moved else Kind.TOOLS_CHANGED), at
    return None


def test_all_perturbations_at_once() -> None:
    seen: Counter[Kind] = Counter()
    for path in SESSIONS:
        for pair in sampled(list(read_session(path).turns())):
            one, two = (perturb(turn, [*Perturbation]) for turn in pair)
            found = diverge(request_of(one), request_of(two))
            assert (found.kind, found.index) == expected_of_tools(one, two), (path.stem, two.number)
            seen[found.kind] += 1
    assert {Kind.TOOLS_REORDERED, Kind.TOOLS_RESERIALIZED, Kind.TOOLS_CHANGED} >= set(seen)
    assert seen[Kind.TOOLS_REORDERED] > seen[Kind.TOOLS_CHANGED]
