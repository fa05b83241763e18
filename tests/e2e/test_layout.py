"""Level `safe` on real engines: clients that break their own prefixes keep their hits.

Efficiency is the cached tokens over those the unperturbed session could have had at most, so that a
perturbed session is measured against what its client would have got by sending the same bytes again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ctxgate.gateway.commands.replay import load_tokenizer
from ctxgate.gateway.perturb import parse_perturbations
from ctxgate.gateway.replay_client import Backend
from ctxgate.gateway.replay_run import Plan, Player
from ctxgate.gateway.sessions import read_session
from ctxgate.inference.oracle import PrefixOracle
from e2e.engine import BLOCK_SIZE
from e2e.gateway_process import TRUSTED_SECRET, GatewayConfig, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ctxgate.gateway.sessions import Session
    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

TRAJECTORIES: Final = Path(__file__).parents[3] / "shared" / "trajectories"
PERTURBATIONS: Final = ("", "tool-order", "json-keys", "reserialize", "tool-order,json-keys,reserialize")
_SALTS: Final = count()


@dataclass(frozen=True)
class Figures:
    """What one run of all sessions came to."""

    requests: int
    prompt: int
    cached: int


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    if not TRAJECTORIES.is_dir():
        pytest.skip("the recorded sessions lie outside the repository")
    files = sorted([*TRAJECTORIES.glob("airline-*.jsonl"), *TRAJECTORIES.glob("repair-*.jsonl")])
    assert len(files) == 26
    return [read_session(path) for path in files]


@pytest.fixture(scope="module")
def bound(sessions: Sequence[Session]) -> int:
    """The most tokens that the unperturbed sessions could have cached, one after the other."""
    tokenize = load_tokenizer(None)
    assert tokenize is not None
    oracle, total = PrefixOracle(BLOCK_SIZE), 0
    for session in sessions:
        for turn in session.turns():
            ids = tokenize(turn.messages, turn.tools)
            assert ids is not None
            total += oracle.observe(ids)
    return total


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
    return Figures(len(measures), sum(measure.usage.prompt or 0 for measure in measures), cached)


async def through_gateway(config: GatewayConfig, sessions: Sequence[Session], perturb: str) -> Figures:
    """The same through a new gateway, which knows no earlier forms."""
    with serving(config) as gateway:
        figures = await play(gateway.url, sessions, perturb, TRUSTED_SECRET)
        assert "ctxgate_layout_dropped_total{" not in gateway.exposition()
        return figures


@pytest.fixture
def configs(engines: Mapping[str, Engine], tmp_path: Path) -> Mapping[str, GatewayConfig]:
    """By level: a gateway with a store of its own in front of the same engine."""
    found = {}
    for level in ("off", "safe"):
        folder = tmp_path / level
        folder.mkdir()
        found[level] = GatewayConfig(folder, {"standard": [engines["standard"].url]}, layout=level)
    return found


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> Iterator[list[tuple[str, str, float]]]:
    """Rows of perturbation, way and efficiency, printed in the end."""
    rows: list[tuple[str, str, float]] = []
    yield rows
    with capsys.disabled():
        for perturb, way, efficiency in rows:
            print(f"\n{perturb or 'unperturbed':40} {way:7} {efficiency:.4f}", end="")  # noqa: T201 - the table is the result


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
