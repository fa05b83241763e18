"""Rates, shapes and sessions of the tests of when to compact."""

from __future__ import annotations

import json
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ctxgate.compression.economics import Shape
from ctxgate.compression.schedule import recorded_steps
from ctxgate.inference.rates import Rates

if TYPE_CHECKING:
    from ctxgate.compression.schedule import Step

TRAJECTORIES: Final = Path(__file__).parents[3] / "shared" / "trajectories"
SHAPE: Final = Shape(prefix=18_000, summary=4_000, tail=20_000, summary_output=5_500)


def dollars(uncached: float, cached: float, written: float, output: float) -> Rates:
    """Rates in dollars per million tokens."""
    nano = [round(each * 10**9) for each in (uncached, cached, output, written)]
    return Rates(nano[0], nano[1], nano[2], nano[3], effective=date(2026, 11, 30))


# The price shapes of the tables: u/c/w/o.
PRICES: Final = {
    "5/.5/6.25/25": dollars(5, 0.5, 6.25, 25),
    "1.25/.125/1.25/10": dollars(1.25, 0.125, 1.25, 10),
    "1/.1/1/4": dollars(1, 0.1, 1, 4),
    ".14/.0028/.14/.28": dollars(0.14, 0.0028, 0.14, 0.28),
}


@cache
def recorded(name: str) -> tuple[Step, ...]:
    """The requests of a recorded session; the test is skipped where the recordings are not there."""
    path = TRAJECTORIES / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("the recorded sessions are not here")
    lines = path.read_bytes().splitlines()
    return recorded_steps(json.loads(line) for line in lines[1:])
