"""The official `openai` client when something goes wrong: time-outs, and replicas that die."""

from __future__ import annotations

import re
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import openai
import pytest

from ctxgate.gateway.demo_servers import ctxgate_command
from ctxgate.gateway.ledger import Outcome
from e2e.gateway_process import TRUSTED_SECRET, GatewayConfig, booked, serving, settled_counters, until
from e2e.sdk import HELLO, RUN_ON, client_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from openai.types.chat import ChatCompletionMessageParam

    from e2e.engine import Engine

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_metered_exactly(
    engines: Mapping[str, Engine], tmp_path: Path, stream: bool
) -> None:
    """By its own time-out, or by closing a stream it has read a part of."""
    engine = engines["standard"]
    before = settled_counters(engine)
    config = GatewayConfig(tmp_path, {"standard": [engine.url]}, {"abort_drain_s": 60})
    with serving(config) as gateway, client_of(gateway.url, TRUSTED_SECRET) as client:
        if stream:
            endless = client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=50_000, stream=True, extra_body=RUN_ON
            )
            for _ in zip(range(5), endless, strict=False):
                pass
            endless.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.7).chat.completions.create(
                    model="tiny", messages=HELLO, max_tokens=50_000, extra_body=RUN_ON
                )
        until(gateway.idle, 60, "the gateway is idle")
        rows = gateway.rows()
    used = settled_counters(engine) - before
    assert [row.settled.outcome for row in rows] == [Outcome.CLIENT_DISCONNECTED]
    assert booked(rows) == used
    assert 0 < used.generation < 50_000


def test_a_replica_that_dies_is_left_without_the_client_noticing(
    engines: Mapping[str, Engine], tmp_path: Path
) -> None:
    """Two replicas, one a twin that is killed right before the requests: no probe has noticed yet."""
    with twin(tmp_path) as (url, process):
        config = GatewayConfig(tmp_path, {"standard": [engines["standard"].url, url]})
        with serving(config) as gateway, client_of(gateway.url) as client:
            process.kill()
            process.wait()
            for number in range(12):
                asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"Root {number}."}]
                raw = client.chat.completions.with_raw_response.create(
                    model="tiny", messages=asked, max_tokens=2
                )
                assert raw.headers["x-ctxgate-replica"] == "standard-0"
                assert raw.retries_taken == 0
            rows = gateway.rows()
    lost = [row for row in rows if row.opened.replica == "standard-1"]
    assert lost, "the dead replica was tried"
    assert {row.settled.outcome for row in lost} == {Outcome.UNREACHABLE}
    assert {row.settled.charge.total for row in lost} == {0}
    second = {row.opened.request_id for row in rows if row.opened.attempt_number == 2}
    assert second == {row.opened.request_id for row in lost}
    answered = [row for row in rows if row.opened.replica == "standard-0"]
    assert len(answered) == 12
    assert {row.settled.outcome for row in answered} == {Outcome.COMPLETED}


def test_without_any_replica_the_client_retries_and_is_told(tmp_path: Path) -> None:
    with twin(tmp_path) as (url, process), serving(GatewayConfig(tmp_path, {"standard": [url]})) as gateway:
        process.kill()
        process.wait()
        client = client_of(gateway.url).with_options(max_retries=1)
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
        assert caught.value.status_code == 502
        assert caught.value.code == "upstream_unreachable"
        assert 'ctxgate_requests_total{status="502",surface="chat"} 2.0' in gateway.exposition()


@contextmanager
def twin(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A `ctxgate twin` process that may be killed: its URL and itself."""
    log = folder / "twin.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ctxgate_command(["twin", "--profile", "standard", "--port", "0"]), stdout=output, stderr=output
        )

    def address() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        return found[0] if found else None

    try:
        yield until(address, 30, "the twin listens"), process
    finally:
        process.kill()
        process.wait()
