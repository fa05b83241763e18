"""`ctxgate simulate`: routing policies beside each other on a fleet of engine models, on a virtual clock.

Nothing is sent and no engine is needed: it takes minutes where a fleet would take hours.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from ctxgate.gateway.extras import NEEDS_TWIN
from ctxgate.gateway.replay_count import PromptCounter
from ctxgate.gateway.sessions import SessionError, read_session
from ctxgate.gateway.simulate import SECONDS, SESSIONS, as_json, as_text, shapes_of, simulate
from ctxgate.gateway.simulate_sessions import kind_of, shape_of
from ctxgate.routing.policies import POLICIES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ctxgate.gateway.simulate import Result
    from ctxgate.routing.simulated_load import Shape


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("--sessions", nargs="+", type=Path, default=[], metavar="FILE", help="recorded sessions in JSONL")
    add(
        "--mixes",
        type=_mixes,
        default=(SESSIONS,),
        metavar="LIST",
        help=f"kinds of traffic: {', '.join(SECONDS)} (default: {SESSIONS})",
    )
    add(
        "--loads",
        type=_loads,
        default=(0.3, 0.7, 0.95),
        metavar="LIST",
        help="shares of what the fleet can take (default: 0.3,0.7,0.95)",
    )
    add(
        "--policies",
        type=_policies,
        default=POLICIES,
        metavar="LIST",
        help=f"some of {', '.join(POLICIES)} (default: all)",
    )
    add(
        "--seconds",
        type=_seconds,
        metavar="N",
        help="how long tasks arrive, the first half to warm up (default: 9000 with sessions, else 400)",
    )
    add("--seed", default="a", help="another one gives other arrivals (default: %(default)s)")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was simulated; 2 where the arguments do not allow it."""
    try:
        shapes = _shapes(args.sessions) if SESSIONS in args.mixes else []
    except ImportError as error:
        print(f"ctxgate simulate: {error.name} is missing; counting prompts {NEEDS_TWIN}", file=sys.stderr)
        return 2
    except (SessionError, ValueError, OSError) as error:
        print(f"ctxgate simulate: {error}", file=sys.stderr)
        return 2
    results: list[Result] = []
    for mix in args.mixes:
        tasks = shapes_of(mix, shapes)
        for load in args.loads:
            for policy in args.policies:
                seconds = args.seconds or SECONDS[mix]
                results.append(simulate(mix, tasks, load, policy, seconds, args.seed))
    print(json.dumps(as_json(results), indent=2) if args.json else as_text(results))
    return 0


def _shapes(files: Sequence[Path]) -> list[Shape]:
    if not files:
        raise ValueError(f"the mix {SESSIONS!r} needs --sessions FILE...")
    tokens = PromptCounter()
    found = [read_session(file) for file in files]
    return [shape_of(session, kind_of(session), tokens) for session in found]


def _mixes(text: str) -> tuple[str, ...]:
    return _among(text, tuple(SECONDS), "a mix")


def _policies(text: str) -> tuple[str, ...]:
    return _among(text, POLICIES, "a policy")


def _among(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise ArgumentTypeError(f"{unknown!r} is not {what}: {', '.join(known)}")
    return names


def _loads(text: str) -> tuple[float, ...]:
    return tuple(_positive(part, 1.5) for part in text.split(","))


def _seconds(text: str) -> float:
    return _positive(text, 1e6)


def _positive(text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = inf
    if not 0 < value <= most:
        raise ArgumentTypeError(f"{text!r} is not a number above 0 and up to {most:g}")
    return value
