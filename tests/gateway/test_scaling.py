"""The scale signal of a running gateway, and the manifests that follow it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ctxgate.routing.snapshot import Speed
from support.gateway import HELLO, bearer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

MANIFEST = Path(__file__).parents[2] / "configs" / "deploy" / "autoscale.yaml"
WANTED = 'ctxgate_replicas_wanted{pool="standard"}'
# A prompt of 40 tokens of which 32 are cached takes 8 x 50 ms = 0.4 s to compute.
SPEED = Speed(linear_s=0.05, attention_s=0.0, step_s=1e-9, sequence_s=1e-9, context_s=0.0)


async def test_a_pool_of_unknown_speed_tells_nothing(gateway: Gateway) -> None:
    assert (await gateway.post(HELLO)).status == 200
    assert WANTED not in await gateway.metrics()


async def test_a_pool_wants_as_many_replicas_as_its_load_and_its_budgets_ask_for(
    start_gateway: Start, upstream: Upstream
) -> None:
    gateway = await start_gateway(upstream, pool={"speed": SPEED})
    gateway.services.fleet.clock = lambda: 1_000_000  # all in one second, however slow the machine
    for _ in range(3):
        assert (await gateway.post(HELLO)).status == 200
    # The first second counts whole: 3 x 0.4 s of work in it, so that two are busy for 0.6 of their time.
    assert (await gateway.metrics())[WANTED] == 2
    hasty = [bearer(), ("x-ctxgate-ttft-ms", "2000")]
    for _ in range(3):
        assert (await gateway.post(HELLO, headers=hasty)).status == 200
    # 2.4 s of work: three would be busy for 0.8, and 0.8 exp(-1.6 x 0.2 / 0.2) = 0.16 of all were late.
    assert (await gateway.metrics())[WANTED] > 3


def test_the_manifests_follow_the_metric_that_the_gateway_has() -> None:
    scaled, scaler = yaml.safe_load_all(MANIFEST.read_text())
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'sum(ctxgate_replicas_wanted{pool="standard"})'
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == "ctxgate_replicas_wanted"
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert scaled["spec"]["scaleTargetRef"] == scaler["spec"]["scaleTargetRef"]
