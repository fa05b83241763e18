"""Token hit efficiency of every layout level under every habit of clients, on two real engines.

usage: python -m tests.bench.levels [--perturb HABITS]... [--way WAY]... [--only GLOB]

Efficiency is the cached tokens over the most that the *unperturbed* sessions could have had, so that a
client with a habit is measured against one without. `learned` needs experience: its second figure
leaves the first two conversations of each kind out. Needs the recorded sessions and a vLLM environment.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.commands.replay import load_tokenizer
from ctxgate.gateway.perturb import Perturbation, parse_perturbations
from ctxgate.gateway.replay_client import Backend
from ctxgate.gateway.replay_run import Plan, Player
from ctxgate.gateway.sessions import read_session
from ctxgate.inference.oracle import PrefixOracle

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # as pytest does, for the servers that the tests start

from e2e.engine import BLOCK_SIZE, Spec, interpreter, running  # noqa: E402 - behind the path
from e2e.gateway_process import TRUSTED_SECRET, GatewayConfig, serving  # noqa: E402 - behind the path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxgate.gateway.replay import Played
    from ctxgate.gateway.sessions import Session
    from e2e.engine import Engine

TRAJECTORIES: Final = ROOT.parent / "shared" / "trajectories"
KINDS: Final = ("airline", "repair")
WAYS: Final[Mapping[str, object]] = {
    "direct": None,
    "off": "off",
    "safe": "safe",
    "declared": {"level": "declared", "volatile": ["clock"]},
    "learned": "learned",
}
HABITS: Final = ("", *Perturbation, "tool-order,json-keys,reserialize", ",".join(Perturbation))
_SALTS: Final = count()


@dataclass(frozen=True, slots=True)
class Result:
    """One cell: all conversations, and those from the third of each kind on."""

    habits: str
    way: str
    all: float
    experienced: float


def sessions_of(pattern: str) -> list[Session]:
    """The recorded sessions that end within the engines' window, in order."""
    files = [path for kind in KINDS for path in sorted(TRAJECTORIES.glob(f"{kind}-*.jsonl"))]
    return [read_session(path) for path in files if path.match(pattern)]


def bounds(sessions: Sequence[Session]) -> list[int]:
    """By session: the most tokens of the unperturbed requests that a cache could have had."""
    tokenize = load_tokenizer(None)
    if tokenize is None:
        raise SystemExit("levels: the tokenizer's packages are missing: install ctxgate[twin]")
    oracle, found = PrefixOracle(BLOCK_SIZE), []
    for session in sessions:
        prompts = [tokenize(turn.messages, turn.tools) for turn in session.turns()]
        found.append(sum(oracle.observe(ids) for ids in prompts if ids is not None))
    return found


def experienced(sessions: Sequence[Session]) -> list[int]:
    """Positions of the sessions that are at least the third of their kind; all where no kind has three."""
    seen: dict[str, int] = {}
    found = []
    for at, session in enumerate(sessions):
        kind = session.name.split("-", 1)[0]
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] > 2:
            found.append(at)
    return found or list(range(len(sessions)))


async def play(url: str, key: str | None, habits: str, sessions: Sequence[Session]) -> list[int]:
    """Cached tokens by session, in a cache domain of their own."""
    extra = {"cache_salt": f"levels-{next(_SALTS)}"}
    plan = Plan("tiny", max_tokens=1, perturbations=parse_perturbations(habits), extra=extra)
    async with Backend(url, key) as backend:
        played = await Player(backend, plan).play(sessions)
    return [cached(one) for one in played]


def cached(played: Played) -> int:
    """The tokens that one session read from the cache; a failed request ends the run."""
    for measure in played.measures:
        if measure.error or measure.usage.cached.value is None:
            raise SystemExit(f"levels: {played.session}, turn {measure.turn}: {measure.error or 'no figure'}")
    return sum(measure.usage.cached.value or 0 for measure in played.measures)


async def cell(engine: Engine, habits: str, way: str, sessions: Sequence[Session]) -> list[int]:
    """One run, through a new gateway unless it is direct."""
    if way == "direct":
        return await play(engine.url, None, habits, sessions)
    with tempfile.TemporaryDirectory() as folder:
        config = GatewayConfig(Path(folder), {"standard": [engine.url]}, layout=WAYS[way])
        with serving(config) as gateway:
            return await play(gateway.url, TRUSTED_SECRET, habits, sessions)


async def measure(
    engines: Sequence[Engine], cells: Sequence[tuple[str, str]], sessions: Sequence[Session]
) -> list[Result]:
    """All cells, as many at a time as there are engines."""
    limits = bounds(sessions)
    late = experienced(sessions)
    waiting = list(reversed(cells))
    results: list[Result] = []

    async def worker(engine: Engine) -> None:
        while waiting:
            habits, way = waiting.pop()
            tokens = await cell(engine, habits, way, sessions)
            one = Result(
                habits,
                way,
                sum(tokens) / sum(limits),
                sum(tokens[at] for at in late) / sum(limits[at] for at in late),
            )
            results.append(one)
            print(f"{habits or 'unperturbed'} {way} {one.all:.4f} {one.experienced:.4f}", file=sys.stderr)

    async with asyncio.TaskGroup() as group:
        for engine in engines:
            group.create_task(worker(engine))
    return results


def table(results: Sequence[Result], habits: Sequence[str], ways: Sequence[str]) -> str:
    """Markdown: a row per habit, a column per way; `learned` twice."""
    by_cell = {(one.habits, one.way): one for one in results}
    columns = [*ways, *(["learned, 3rd on"] if "learned" in ways else [])]
    lines = [f"| client | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for habit in habits:
        row = [f"{by_cell[habit, way].all:.4f}" for way in ways]
        if "learned" in ways:
            row.append(f"{by_cell[habit, 'learned'].experienced:.4f}")
        name = "unperturbed" if not habit else "all five" if habit.count(",") == 4 else habit
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure and print; 2 where something it needs is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--perturb", action="append", metavar="HABITS", help="default: each, three, all five")
    parser.add_argument("--way", action="append", choices=WAYS, help="default: all")
    parser.add_argument("--only", default="*", metavar="GLOB", help="of the recorded sessions")
    args = parser.parse_args()
    python, sessions = interpreter(), sessions_of(args.only) if TRAJECTORIES.is_dir() else []
    if python is None or not sessions:
        print("levels: needs the recorded sessions and a vLLM environment", file=sys.stderr)
        return 2
    habits, ways = list(args.perturb or HABITS), list(args.way or WAYS)
    cells = [(habit, way) for habit in habits for way in ways]
    specs = [Spec("first", core=0), Spec("second", core=1)][: len(cells)]
    with tempfile.TemporaryDirectory() as folder, running(python, Path(folder), *specs) as engines:
        results = asyncio.run(measure(engines, cells, sessions))
    print(table(results, habits, ways), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
