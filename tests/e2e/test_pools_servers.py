"""`ctxgate pools command | up | down` with a real engine: it starts, serves, is probed, and is gone again."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.demo_servers import ctxgate_command
from ctxgate.gateway.pool_processes import began
from e2e.engine import MODEL, READY_S, START, free_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e
SECRET = "pool-key-for-the-test"


def run(config: Path, action: str, *more: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ctxgate_command(["pools", action, "-c", str(config), *more]),
        check=False,
        capture_output=True,
        text=True,
        timeout=READY_S + 60,
        env=os.environ | {"FAST_POOL_KEY": SECRET},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def written(folder: Path, python: Path, *extra: str) -> Path:
    """A configuration with one pool of one replica, `fast`, which demands a key."""
    rates = {"effective": "2026-01-01"} | {
        f"usd_per_million_{kind}": 1 for kind in ("uncached", "cached", "output")
    }
    engine = {
        "model": str(MODEL),
        "device": "cpu",
        "max_model_len": 4096,
        "bind": [str(min(os.sched_getaffinity(0)))],
        "env": START | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        "extra_args": ["--load-format", "dummy", "--dtype", "bfloat16", *extra],
        "speculative": {"method": "ngram", "tokens": 2, "lookup_max": 3},
        "python": str(python),
    }
    pool = {
        "replicas": [
            {
                "name": "fast-0",
                "url": f"http://127.0.0.1:{free_port()}",
                "kv_events": {
                    "endpoint": f"tcp://127.0.0.1:{free_port()}",
                    "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
                },
            }
        ],
        "rates": rates,
        "profile": "fast",
        "api_key_env": "FAST_POOL_KEY",
        "engine": engine,
    }
    document: dict[str, Any] = {
        "store": {"sqlite": "ledger.db"},
        "pools": {"fast": pool},
        "models": {"tiny": {"pools": ["fast"]}},
    }
    file = folder / "c.yaml"
    file.write_text(json.dumps(document))
    return file


def test_a_pool_is_started_probed_and_ended(vllm_python: Path, tmp_path: Path) -> None:
    config = written(tmp_path, vllm_python)
    line = run(config, "command").stdout.splitlines()[1]
    assert 'VLLM_API_KEY="$FAST_POOL_KEY"' in line
    assert SECRET not in line
    assert shlex.split(line).count("--performance-mode") == 1

    up = run(config, "up")
    try:
        assert "fast/fast-0 is ready" in up.stdout
        assert "runs already" in run(config, "up", "fast").stdout
        (record,) = (tmp_path / "pools-state").glob("*.json")
        pid = json.loads(record.read_text())["pid"]
        assert os.getpgid(pid) == pid != os.getpgid(0)
        arguments = subprocess.run(
            ["ps", "-ww", "-o", "args=", "-g", str(pid)], check=True, capture_output=True, text=True
        ).stdout
        assert "--performance-mode" in arguments
        assert SECRET not in arguments

        probed = json.loads(run(config, "probe", "--json").stdout)
        (model,) = probed["replicas"][0]["models"]
        assert (model["max_model_len"], model["block_size"]) == (4096, 32)
        assert (model["reports_cached"], model["salts_isolate"], model["abort_by_id"]) == (True, True, True)
        steps = {step["step"]: step for step in probed["replicas"][0]["steps"]}
        assert {name: step["found"] for name, step in steps.items()} == {
            "models": "yes",
            "metrics": "yes",
            "cached tokens": "yes",
            "usage of streams": "yes",
            "render": "yes",
            "template": "yes",
            "cache events": "yes",
            "priority": "yes",
            "load header": "yes",
            "fingerprint": "yes",
        }
    finally:
        ended = run(config, "down")
    assert ended.stdout == "fast/fast-0 ended\n"
    assert began(pid) is None
    assert (
        subprocess.run(["ps", "-o", "pid=", "-g", str(pid)], check=False, capture_output=True).stdout == b""
    )
    assert "nothing that" in run(config, "down").stdout


def test_an_engine_that_does_not_come_up_shows_the_end_of_its_log(vllm_python: Path, tmp_path: Path) -> None:
    config = written(tmp_path, vllm_python, "--no-such-flag")
    done = run(config, "up", code=1)
    assert "fast/fast-0 ended with code 2" in done.stderr
    assert "unrecognized arguments: --no-such-flag" in done.stderr
    assert [*(tmp_path / "pools-state").glob("*.json")] == []
