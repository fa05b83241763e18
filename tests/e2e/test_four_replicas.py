"""Four real replicas in two pools and recorded sessions: the engines' own hits under each way of routing.

`REPLICAS` sets how many engines there are. Times are not judged here; `python -m tests.bench.replicas` shows
them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest

from e2e.replica_runs import POLICIES, compared, recorded, replicas

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.e2e
COUNT: Final = int(os.environ.get("REPLICAS", "4"))
TASKS: Final = 12
TURNS: Final = 5
TIE: Final = 0.015
"""Of the prompt tokens. Whether one more replica is begun depends on how busy the machine is, and each one
begun computes the 3,520 tokens at the head of all sessions once more: so far apart two runs are a tie."""


def test_no_other_way_of_routing_has_more_hits_in_the_engines(
    vllm_python: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    tasks = recorded(TASKS, TURNS)
    if not tasks:
        pytest.skip("the recorded sessions lie beside the repository, in ../shared/trajectories")
    with replicas(vllm_python, tmp_path, COUNT) as pools:
        runs = {one.name: one for one in compared(tmp_path, pools, tasks)}
    requests = sum(map(len, tasks))
    for name in POLICIES:
        one = runs[name]
        record_property(name, f"{one.hits} of {one.prompt} cached, by replica {one.engines}")
        assert one.failed == 0
        assert len(one.ttfts) == requests
        assert one.prompt == runs["ctxgate"].prompt  # the traffic is equal
    ours = runs["ctxgate"]
    tied = TIE * ours.prompt
    assert {name: ours.hits >= one.hits - tied for name, one in runs.items()} == dict.fromkeys(runs, True)
    assert ours.hits > runs["round-robin"].hits + tied
