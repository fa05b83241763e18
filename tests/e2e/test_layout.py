"""Levels `safe` and `declared` on real engines: clients that break their own prefixes keep their hits.

Efficiency is the cached tokens over those the unperturbed session could have had at most, so that a
perturbed session is measured against what its client would have got by sending the same bytes again.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ctxgate.gateway.commands.replay import load_tokenizer
from ctxgate.gateway.perturb import Perturbation, parse_perturbations
from ctxgate.gateway.replay_client import Backend
from ctxgate.gateway.replay_run import Plan, Player
from ctxgate.gateway.sessions import read_session
from ctxgate.inference.oracle import PrefixOracle
from e2e.engine import BLOCK_SIZE
from e2e.gateway_process import TRUSTED_SECRET, GatewayConfig, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ctxgate.gateway.replay import Played
    from ctxgate.gateway.sessions import Session
    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

TRAJECTORIES: Final = Path(__file__).parents[3] / "shared" / "trajectories"
PERTURBATIONS: Final = ("", "tool-order", "json-keys", "reserialize", "tool-order,json-keys,reserialize")
LAYOUTS: Final[Mapping[str, str | Mapping[str, object]]] = {
    "off": "off",
    "safe": "safe",
    "declared": {"level": "declared", "volatile": ["clock"]},
}
_SALTS: Final = count()
_DROPPED: Final = re.compile(r'^ctxgate_layout_dropped_total\{reason="(\w+)"\}', re.MULTILINE)


@dataclass(frozen=True)
class Figures:
    """What one run of all sessions came to."""

    requests: int
    prompt: int
    cached: int
    sessions: tuple[Played, ...] = field(compare=False, repr=False)

    def lost(self) -> list[tuple[str, int]]:
        """Session and turn of each request that did not find the prompt of the turn before it."""
        return [
            (one.session, after.turn)
            for one in self.sessions
            for before, after in pairwise(one.measures)
            if (after.usage.cached.value or 0) < (before.usage.prompt or 0) - 2 * BLOCK_SIZE
        ]


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    if not TRAJECTORIES.is_dir():
        pytest.skip("the recorded sessions lie outside the repository")
    files = sorted([*TRAJECTORIES.glob("airline-*.jsonl"), *TRAJECTORIES.glob("repair-*.jsonl")])
    assert len(files) == 26
    return [read_session(path) for path in files]


@pytest.fixture(scope="module")
def ideal(sessions: Sequence[Session]) -> tuple[int, int]:
    """The tokens of the unperturbed sessions, and the most of them that could have been cached."""
    tokenize = load_tokenizer(None)
    assert tokenize is not None
    oracle, total, cached = PrefixOracle(BLOCK_SIZE), 0, 0
    for session in sessions:
        for turn in session.turns():
            ids = tokenize(turn.messages, turn.tools)
            assert ids is not None
            total += len(ids)
            cached += oracle.observe(ids)
    return total, cached


@pytest.fixture(scope="module")
def bound(ideal: tuple[int, int]) -> int:
    """The most tokens that the unperturbed sessions could have cached, one after the other."""
    return ideal[1]


async def play(url: str, sessions: Sequence[Session], perturb: str, key: str | None = None) -> Figures:
    """All sessions in order against a server, in a cache domain of their own."""
    extra = {"cache_salt": f"layout-{next(_SALTS)}"}
    plan = Plan("tiny", max_tokens=1, perturbations=parse_perturbations(perturb), extra=extra)
    async with Backend(url, key) as backend:
        played = await Player(backend, plan).play(sessions)
    measures = [measure for one in played for measure in one.measures]
    assert not [measure.error for measure in measures if measure.error]
    assert len(measures) == sum(session.requests for session in sessions)
    cached = sum(measure.usage.cached.value or 0 for measure in measures)
    prompt = sum(measure.usage.prompt or 0 for measure in measures)
    return Figures(len(measures), prompt, cached, tuple(played))


async def through_gateway(config: GatewayConfig, sessions: Sequence[Session], perturb: str) -> Figures:
    """The same through a new gateway, which knows no earlier forms."""
    with serving(config) as gateway:
        figures = await play(gateway.url, sessions, perturb, TRUSTED_SECRET)
        # A stalled disk may cost single requests their layout, which the efficiency then shows.
        assert set(_DROPPED.findall(gateway.exposition())) <= {"store"}
        return figures


@pytest.fixture
def configs(engines: Mapping[str, Engine], tmp_path: Path) -> Mapping[str, GatewayConfig]:
    """By level: a gateway with a store of its own in front of the same engine."""
    found = {}
    for level, layout in LAYOUTS.items():
        folder = tmp_path / level
        folder.mkdir()
        found[level] = GatewayConfig(folder, {"standard": [engines["standard"].url]}, layout=layout)
    return found


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> Iterator[list[tuple[str, str, float]]]:
    """Rows of perturbation, way and efficiency, printed in the end."""
    rows: list[tuple[str, str, float]] = []
    yield rows
    with capsys.disabled():
        for perturb, way, efficiency in rows:
            print(f"\n{perturb or 'unperturbed':40} {way:8} {efficiency:.4f}", end="")  # noqa: T201 - the table is the result


@pytest.mark.parametrize("perturb", PERTURBATIONS)
async def test_safe_keeps_the_hits_that_clients_throw_away(
    engines: Mapping[str, Engine],
    configs: Mapping[str, GatewayConfig],
    sessions: Sequence[Session],
    bound: int,
    perturb: str,
    table: list[tuple[str, str, float]],
) -> None:
    direct, safe = await asyncio.gather(  # each on an engine of its own
        play(engines["fast"].url, sessions, perturb), through_gateway(configs["safe"], sessions, perturb)
    )
    table += [(perturb, "direct", direct.cached / bound), (perturb, "safe", safe.cached / bound)]
    if perturb:
        assert safe.cached >= 0.97 * bound
        return
    off = await through_gateway(configs["off"], sessions, perturb)
    table.append((perturb, "off", off.cached / bound))
    assert off.cached >= 0.99 * bound
    assert safe.cached >= 0.99 * bound
    assert off == safe == direct


@pytest.mark.parametrize("level", ["safe", "declared"])
async def test_a_late_tool_loses_the_history_once(
    engines: Mapping[str, Engine],
    configs: Mapping[str, GatewayConfig],
    sessions: Sequence[Session],
    level: str,
) -> None:
    found = await through_gateway(configs[level], sessions, "late-tool")
    changes = [(one.name, (one.requests + 1) // 2) for one in sessions if one.requests > 1]
    assert found.lost() == changes


@pytest.mark.parametrize("perturb", ["", "clock", ",".join(Perturbation)])
async def test_declared_keeps_the_hits_of_clients_with_a_clock(
    engines: Mapping[str, Engine],
    configs: Mapping[str, GatewayConfig],
    sessions: Sequence[Session],
    ideal: tuple[int, int],
    perturb: str,
    table: list[tuple[str, str, float]],
) -> None:
    """Notes are cached as well; so that they do not count in favour, what is read anew is compared too."""
    direct, declared = await asyncio.gather(
        play(engines["fast"].url, sessions, perturb), through_gateway(configs["declared"], sessions, perturb)
    )
    total, cached = ideal
    table += [(perturb, "direct", direct.cached / cached), (perturb, "declared", declared.cached / cached)]
    table.append(
        (
            f"{perturb or 'unperturbed'}, tokens read anew",
            "declared",
            (declared.prompt - declared.cached) / (total - cached),
        )
    )
    assert declared.cached >= (0.95 if perturb else 0.99) * cached
    late = Perturbation.LATE_TOOL in parse_perturbations(perturb)
    anew = declared.prompt - declared.cached
    assert anew <= (1.65 if late else 1.15) * (total - cached)  # a late tool loses each history once
    assert declared.prompt <= 1.04 * total
