"""`ctxgate probe-recall` against a real engine and a real twin: the machinery, as neither model can read."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from ctxgate.gateway.demo_servers import ctxgate_command
from ctxgate.gateway.recall_probe import decode
from ctxgate.gateway.recall_probe_picture import centre, colour
from e2e.gateway_process import GatewayConfig, booked, ledger_rows, settled_counters

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

LENGTHS, DEPTHS = (300, 600), (0, 50, 100)


def test_a_real_engine_is_probed_and_every_token_of_it_is_booked(
    engines: Mapping[str, Engine], tmp_path: Path
) -> None:
    engine = engines["standard"]
    config = GatewayConfig(tmp_path, {"standard": [engine.url]})
    before = settled_counters(engine)
    out, picture = tmp_path / "recall.json", tmp_path / "recall.png"
    command = ["probe-recall", "--pool", "standard", "-c", str(config.write()), "--max-tokens", "8"]
    command += ["--lengths", "600,300", "--depths", "0,50,100"]
    command += ["--out", str(out), "--picture", str(picture)]
    too_long = [*command, "--lengths", "600,131073"]
    done = subprocess.run(ctxgate_command(too_long), check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert "131,073 is more than the model's window of 131,072 tokens" in done.stderr
    assert not out.exists()
    assert ledger_rows(config.ledger) == []
    done = subprocess.run(ctxgate_command(command), check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")

    result = decode(out.read_bytes())
    assert (result.pool, result.model, result.calls) == ("standard", "tiny", 2 + 6)
    assert [row.wanted for row in result.rows] == list(LENGTHS)
    for row in result.rows:
        assert row.tokens is not None
        assert 0.85 * row.wanted < row.tokens < 1.1 * row.wanted
        assert [(cell.depth, cell.asked) for cell in row.cells] == [(depth, 1) for depth in DEPTHS]
    assert result.reliable_length is None  # a random model finds nothing
    assert "not even the shortest length finds 90% of the needles" in done.stdout

    rows = ledger_rows(config.ledger)
    assert {(row.opened.organisation, row.opened.team, row.opened.task) for row in rows} == {
        ("ctxgate", "ctxgate", "probe")
    }
    total = booked(rows)
    assert total == settled_counters(engine) - before
    assert result.tokens == total.prompt + total.generation
    assert result.cost_nano == sum(row.settled.charge.total or 0 for row in rows)

    image = Image.open(picture)
    for at, row in enumerate(result.rows):
        for column, cell in enumerate(row.cells):
            assert image.getpixel(centre(at, column)) == colour(cell.share)
