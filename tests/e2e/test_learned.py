"""Level `learned` on a real engine: from the third conversation on, clocks and memories cost little."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.commands.replay import load_tokenizer
from ctxgate.gateway.sessions import read_session
from ctxgate.inference.oracle import PrefixOracle
from e2e.engine import BLOCK_SIZE
from e2e.gateway_process import GatewayConfig
from e2e.test_layout import TRAJECTORIES, Figures, play, through_gateway

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ctxgate.gateway.sessions import Session
    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

TAUGHT = 2  # conversations that a template's first order takes


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    if not TRAJECTORIES.is_dir():
        pytest.skip("the recorded sessions lie outside the repository")
    files = sorted(TRAJECTORIES.glob("airline-*.jsonl"))
    assert len(files) == 24
    return [read_session(path) for path in files]


def bounds(sessions: Sequence[Session]) -> list[int]:
    """For each session as it is: the most tokens that could have been cached, one after the other."""
    tokenize = load_tokenizer(None)
    assert tokenize is not None
    oracle, found = PrefixOracle(BLOCK_SIZE), []
    for session in sessions:
        cached = 0
        for turn in session.turns():
            ids = tokenize(turn.messages, turn.tools)
            assert ids is not None
            cached += oracle.observe(ids)
        found.append(cached)
    return found


def efficiency(figures: Figures, bound: Sequence[int]) -> float:
    """Cached tokens over the bound, without the conversations that were learned from."""
    cached = [sum(each.usage.cached.value or 0 for each in one.measures) for one in figures.sessions]
    return sum(cached[TAUGHT:]) / sum(bound[TAUGHT:])


@pytest.fixture
def config(engines: Mapping[str, Engine], tmp_path: Path) -> GatewayConfig:
    return GatewayConfig(tmp_path, {"standard": [engines["standard"].url]}, layout="learned")


async def test_a_clock_is_learned(
    config: GatewayConfig, sessions: Sequence[Session], capsys: pytest.CaptureFixture[str]
) -> None:
    bound = bounds(sessions)
    plain = await through_gateway(config, sessions, "")
    timed = await through_gateway(replace(config, folder=_folder(config, "timed")), sessions, "clock")
    with capsys.disabled():
        for name, figures in (("unperturbed", plain), ("clock", timed)):
            print(f"\nlearned, 3rd on: {name:12} {efficiency(figures, bound):.4f}", end="")  # noqa: T201 - the result
    assert efficiency(plain, bound) >= 0.99
    assert efficiency(timed, bound) >= 0.95


async def test_a_users_memory_is_learned(
    engines: Mapping[str, Engine], config: GatewayConfig, sessions: Sequence[Session]
) -> None:
    """Behind the stable part, it costs its own tokens and those between it and the user's words."""
    bound = bounds(sessions)
    remembering = [_with_memory(session, user) for user, session in enumerate(sessions)]
    direct = await play(engines["standard"].url, remembering, "")
    learned = await through_gateway(config, remembering, "")
    assert learned.prompt == direct.prompt, "nothing is added"
    assert efficiency(learned, bound) > efficiency(direct, bound)
    assert efficiency(learned, bound) >= 0.97


def _with_memory(session: Session, user: int) -> Session:
    """The session of a user of whom something is known, which stands before the rules."""
    title, rules = session.messages[0]["content"].split("\n\n", 1)
    facts = "\n\n".join(f"- {user * 7 + at}: likes seat {user * 3 + at}" for at in range(user % 4 + 1))
    content = f"{title}\n\n<user_memory>\n{facts}\n</user_memory>\n\n{rules}"
    return replace(session, messages=({**session.messages[0], "content": content}, *session.messages[1:]))


def _folder(config: GatewayConfig, name: str) -> Path:
    folder = config.folder / name
    folder.mkdir()
    return folder
