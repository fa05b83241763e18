"""`ctxgate pools compare` and the ten steps of `pools probe`, against twins."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.agreement import Share, compare, read_cases
from ctxgate.gateway.commands.pools_compare import as_json, as_text, verdicts
from ctxgate.gateway.config import Pool, Replica
from ctxgate.gateway.pool_compare import NotComparable, models_of, outcomes, side
from ctxgate.gateway.pool_report import probed
from support.gateway import MODEL, Gateway, config
from support.twin import serving

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ctxgate.gateway.config import Config

pytestmark = pytest.mark.integration
EXPECTED: tuple[dict[str, Any], ...] = ({"expect": {"regex": "."}}, {"expect": "no such words"}, {}, {})
CASES = "".join(
    json.dumps({"id": f"c{n}", "messages": [{"role": "user", "content": f"case {n}"}], "max_tokens": 6} | one)
    + "\n"
    for n, one in enumerate(EXPECTED)
)


def two_pools(folder: Path, urls: Sequence[str]) -> Config:
    base = config(folder / "l.db", [], served_name="tiny")
    rates = base.pools["standard"].rates
    pools = {
        name: Pool(name, (Replica(f"{name}-0", url),), rates, cache_isolation="none", probe=False, load="off")
        for name, url in zip(("fast", "standard"), urls, strict=True)
    }
    return replace(base, pools=pools, models={MODEL: replace(base.models[MODEL], pools=("standard", "fast"))})


async def test_two_pools_of_the_same_engine_agree(tmp_path: Path) -> None:
    async with serving() as one, serving() as other:
        gateway = await Gateway.start(two_pools(tmp_path, [one.url, other.url]))
        try:
            services = gateway.services
            first, second = models_of(services.config, ("fast", "standard"), None)
            assert first is second is services.config.models[MODEL]
            sides = (await side(services, "fast", first), await side(services, "standard", second))
            steps: list[int] = []
            found = await outcomes(services, sides, read_cases(CASES), 2, lambda: steps.append(1))
            rows = await gateway.rows()
        finally:
            await gateway.stop()
    figures = compare(found)
    assert len(steps) == 4
    assert (figures.agreement, figures.failed) == (Share(4, 4), 0)
    assert (figures.first_passes, figures.second_passes) == (Share(1, 2), Share(1, 2))
    assert (figures.only_first, figures.only_second, figures.p_value) == (0, 0, 1.0)
    assert sides[0].cost.calls == sides[1].cost.calls == 4
    assert {(row.opened.organisation, row.opened.task) for row in rows} == {("ctxgate", "compare")}
    assert sum(one.cost.nano for one in sides) == sum(row.settled.charge.total or 0 for row in rows)

    # 4 of 4: Wilson's lower end is 4 / (4 + 1.96^2) = 0.51
    assert verdicts(figures, 0.51, None) == []
    assert "not shown to reach 0.52" in verdicts(figures, 0.52, None)[0]
    assert "the pass rate is not shown to reach 0.5" in verdicts(figures, None, 0.5)[0]
    assert "the same answer        100.0% (4 of 4; 95 % interval 51.0% to 100.0%)" in as_text(
        figures, found, sides
    )
    document = json.loads(json.dumps(as_json(figures, found, sides)))
    assert document["agreement"]["count"] == 4
    assert document["outcomes"][1] == {
        "id": "c1",
        "agrees": True,
        "passes": {"fast": False, "standard": False},
    }


async def test_a_pool_that_fails_does_not_agree(tmp_path: Path) -> None:
    async with serving() as one, serving(max_num_queued_reqs=0) as other:
        gateway = await Gateway.start(two_pools(tmp_path, [one.url, other.url]))
        try:
            services = gateway.services
            model = services.config.models[MODEL]
            sides = (await side(services, "fast", model), await side(services, "standard", model))
            figures = compare(await outcomes(services, sides, read_cases(CASES), 2, lambda: None))
        finally:
            await gateway.stop()
    assert (figures.agreement, figures.failed) == (Share(0, 0), 4)
    assert "no case" in verdicts(figures, 0.5, None)[0]


def test_pools_that_cannot_be_compared(tmp_path: Path) -> None:
    found = two_pools(tmp_path, ["http://127.0.0.1:9"] * 2)
    for pools, model, words in (
        (("fast", "slow"), None, "no pool slow"),
        (("fast", "fast"), None, "name two pools"),
        (("fast", "standard"), "x", "no model x"),
    ):
        with pytest.raises(NotComparable, match=words):
            models_of(found, pools, model)
    alone = replace(found, models={MODEL: replace(found.models[MODEL], pools=("fast",))})
    with pytest.raises(NotComparable, match="no model leads to the pool standard"):
        models_of(alone, ("fast", "standard"), None)


async def test_the_ten_steps_against_the_twin(tmp_path: Path) -> None:
    async with serving(block_size=16) as one, serving() as other:
        gateway = await Gateway.start(two_pools(tmp_path, [one.url, other.url]))
        try:
            report = await probed(gateway.services, gateway.services.fleet.record("fast", "fast-0"))
            rows = await gateway.rows()
        finally:
            await gateway.stop()
    found = {one.step: one.found for one in report.steps}
    assert [one.number for one in report.steps] == [*range(1, 11)]
    assert found == {
        "models": "yes",
        "metrics": "partly",
        "cached tokens": "yes",
        "usage of streams": "yes",
        "render": "yes",
        "template": "yes",
        "cache events": "no",
        "priority": "unknown",
        "load header": "yes",
        "fingerprint": "yes",
    }
    assert report.steps[1].told == (
        "without time_to_first_token_seconds_count, inter_token_latency_seconds_count, "
        "request_queue_time_seconds_count, request_prefill_time_seconds_count"
    )
    assert all(one.degrades for one in report.steps if one.found == "no")
    assert report.models[0].cost.calls == len(rows)
