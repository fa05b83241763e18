"""Explanations against a real engine: what was expected, what it reported, and why the two differ."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ctxgate.gateway.commands import report as report_command
from ctxgate.gateway.miss import MissCause
from ctxgate.gateway.perturb import Perturbation, perturb
from ctxgate.gateway.replay_client import Backend
from ctxgate.gateway.replay_run import Plan, Player
from ctxgate.gateway.sessions import read_session
from e2e.engine import BLOCK_SIZE
from e2e.gateway_process import TRUSTED_SECRET, GatewayConfig, serving
from support.habits import EXPLAINED, what_changed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.gateway.ledger import Attempt
    from ctxgate.gateway.sessions import Session, Turn
    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

TRAJECTORIES: Final = Path(__file__).parents[3] / "shared" / "trajectories"
NAMES: Final = ("airline-000-0", "airline-001-0", "airline-002-0", "repair-b")
MOST_REQUESTS: Final = 20  # of a session
_SALTS: Final = count()


@dataclass(frozen=True)
class Run:
    """The ledger's rows of each session, beside the requests that its client sent."""

    turns: Mapping[str, Sequence[Turn]]
    rows: Mapping[str, Sequence[Attempt]]
    exposition: str


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    if not TRAJECTORIES.is_dir():
        pytest.skip("the recorded sessions lie outside the repository")
    return [read_session(TRAJECTORIES / f"{name}.jsonl") for name in NAMES]


async def play(url: str, folder: Path, sessions: Sequence[Session], kinds: frozenset[Perturbation]) -> Run:
    """All sessions through a new gateway that changes nothing of them, in a cache domain of their own."""
    extra = {"cache_salt": f"misses-{next(_SALTS)}"}
    plan = Plan("tiny", max_tokens=1, perturbations=kinds, extra=extra, max_requests=MOST_REQUESTS)
    config = GatewayConfig(folder, {"standard": [url]}, layout="off")
    with serving(config) as gateway:
        async with Backend(gateway.url, TRUSTED_SECRET) as backend:
            played = await Player(backend, plan).play(sessions)
        assert not [measure.error for one in played for measure in one.measures if measure.error]
        exposition = gateway.exposition()
    turns = {
        one.task: [perturb(turn, kinds) for turn in session.turns()][:MOST_REQUESTS]
        for one, session in zip(played, sessions, strict=True)
    }
    return Run(turns, {task: gateway.rows(task=task) for task in turns}, exposition)


def known(row: Attempt) -> tuple[int, int]:
    """Prompt tokens and cached ones, as the engine reported them."""
    prompt, cached = row.settled.usage.prompt, row.settled.usage.cached.value
    assert prompt is not None
    assert cached is not None
    return prompt, cached


async def test_what_is_expected_is_reported_and_nothing_is_missed(
    engines: Mapping[str, Engine], sessions: Sequence[Session], tmp_path: Path
) -> None:
    run = await play(engines["standard"].url, tmp_path, sessions, frozenset())
    check_unperturbed(run)


def check_unperturbed(run: Run) -> None:
    checked = 0
    for task, rows in run.rows.items():
        assert len(rows) == len(run.turns[task])
        for number, row in enumerate(rows):
            assert row.settled.miss is None, (task, number)
            expected, (prompt, cached) = row.opened.predicted_cached_tokens, known(row)
            if number:
                assert expected is not None
                assert abs(expected - cached) <= BLOCK_SIZE, (task, number)
                checked += 1
            elif expected is not None:  # of a head that another session sent, apportioned by bytes
                assert abs(expected - cached) <= prompt // 20
    assert checked == sum(map(len, run.rows.values())) - len(run.rows) > 30
    assert "ctxgate_cache_misses_total{" not in run.exposition


@pytest.mark.parametrize("kind", [*Perturbation])
async def test_every_habit_is_named_with_its_place(
    engines: Mapping[str, Engine], sessions: Sequence[Session], tmp_path: Path, kind: Perturbation
) -> None:
    run = await play(engines["standard"].url, tmp_path, sessions, frozenset({kind}))
    check_perturbed(run, kind)


def check_perturbed(run: Run, kind: Perturbation) -> Counter[str]:
    """Every request's cause and index, against what its client did; returns what was seen."""
    seen: Counter[str] = Counter()
    explained = {told for (perturbation, _), told in EXPLAINED.items() if perturbation is kind}
    for task, turns in run.turns.items():
        first = run.rows[task][0].settled.miss
        if first is not None:  # another session of the same agent began with another version of this head
            assert (first.cause, first.detail) in explained, (task, first)
            assert 0 < (first.avoidable_tokens or 0) <= known(run.rows[task][0])[0]
            seen["first requests"] += 1
            seen["avoidable"] += first.avoidable_tokens or 0
        for number, (pair, rows) in enumerate(zip(pairwise(turns), pairwise(run.rows[task]), strict=True), 1):
            changed, miss = what_changed(*pair), rows[1].settled.miss
            (before, _), (prompt, cached) = known(rows[0]), known(rows[1])
            if miss is None:
                # Nothing that the prompt shows, or a form that this engine had read before.
                could = min(before, prompt - 1)
                assert changed is None or cached >= 0.8 * could, (task, number)
                seen["hit"] += 1
                continue
            assert changed is not None, (task, number, miss)
            what, index = changed
            assert (miss.cause, miss.detail) == EXPLAINED[kind, what], (task, number)
            assert (miss.index, miss.offset is None) == (index, False)
            assert 0 < (miss.avoidable_tokens or 0) <= prompt - cached
            seen[what] += 1
            seen["avoidable"] += miss.avoidable_tokens or 0
    wanted = {what for perturbation, what in EXPLAINED if perturbation is kind and what != "message"}
    assert wanted <= set(seen)
    assert (seen["avoidable"] > 0) is bool(wanted)
    uncached = sum(row.settled.usage.uncached.value or 0 for rows in run.rows.values() for row in rows)
    assert seen["avoidable"] <= uncached
    counted = sum(
        float(line.rpartition(" ")[2])
        for line in run.exposition.splitlines()
        if line.startswith("ctxgate_avoidable_tokens_total{")
    )
    assert counted == seen["avoidable"]
    return seen


async def test_a_prompt_that_others_pushed_out_was_evicted(
    start_engine: Callable[..., Engine],
    sessions: Sequence[Session],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An engine with room for 5,152 tokens: a conversation waits while another fills the window of 5,120."""
    engine = start_engine("small", "--num-gpu-blocks-override", "161", "--max-model-len", "5120")
    first, *_, other = sessions
    plan = Plan("tiny", max_tokens=1, max_requests=2)
    with serving(GatewayConfig(tmp_path, {"standard": [engine.url]}, layout="off")) as gateway:
        async with Backend(gateway.url, TRUSTED_SECRET) as backend:
            await Player(backend, plan).play([first])
            await Player(backend, Plan("tiny", max_tokens=1, max_requests=30)).play([other])
            await Player(backend, plan).play([first])
    rows = gateway.rows(task=first.name)
    again = rows[2].settled
    assert rows[1].settled.miss is None
    assert again.miss is not None
    assert (again.miss.cause, again.miss.detail) == (MissCause.EVICTED, None)
    prompt, cached = known(rows[2])
    whole = (prompt - 1) // BLOCK_SIZE * BLOCK_SIZE  # the same prompt sent again, had the cache kept it
    assert again.miss.avoidable_tokens == whole - cached
    assert (rows[2].opened.predicted_cached_tokens or 0) < whole  # what the engine has room for is known
    assert report_command_prints(gateway.ledger, capsys) == ["evicted"]


def report_command_prints(ledger: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The causes that `ctxgate report --misses --json` lists."""
    from argparse import ArgumentParser

    parser = ArgumentParser()
    report_command.configure(parser)
    assert report_command.run(parser.parse_args(["--misses", "--json", "--db", str(ledger)])) == 0
    return [row["cause"] for row in json.loads(capsys.readouterr().out)["misses"]]
