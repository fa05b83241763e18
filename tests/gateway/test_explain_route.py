"""`ctxgate explain` with a configuration: where a request would go, with every candidate's figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from config_texts import DIGEST
from ctxgate.gateway.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Explain = Callable[..., tuple[int, str, str]]

CONFIG = f"""\
pools:
  standard:
    replicas: ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    profile: standard
    rates: {{effective: 2026-01-01, usd_per_million_uncached: 0.4, usd_per_million_cached: 0.04,
            usd_per_million_output: 1.6}}
  fast:
    replicas: [{{name: quick, url: "http://10.0.0.3:8000"}}]
    profile: fast
    rates: {{effective: 2026-01-01, usd_per_million_uncached: 1.25, usd_per_million_cached: 0.125,
            usd_per_million_output: 10}}
models:
  tiny: {{pools: [standard, fast]}}
teams:
  research: {{organisation: acme, classes: {{interactive: {{ttft_ms: 1}}}}}}
keys:
  - {{id: research-ci, team: research, sha256: {DIGEST}}}
"""
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 400}]}


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Explain:
    """Run the command on one request, or on two; returns code, output and errors."""
    (tmp_path / "c.yaml").write_text(CONFIG)

    def run(*options: str, after: Any = None, **members: Any) -> tuple[int, str, str]:
        paths = []
        for flag, body in (("--request", HELLO | members), ("--after", after)):
            if body is not None:
                file = tmp_path / f"{flag[2:]}.json"
                file.write_text(json.dumps(body))
                paths += [flag, str(file)]
        code = main(["explain", *paths, "-c", str(tmp_path / "c.yaml"), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def route(explain: Explain, *options: str, **more: Any) -> dict[str, Any]:
    code, out, err = explain("--json", *options, **more)
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)["route"]
    return found


def test_every_candidate_is_told_with_time_and_price(explain: Explain) -> None:
    found = route(explain, "--class", "batch", max_tokens=100)
    assert (found["pool"], found["policy"], found["output_tokens"]) == ("standard", "ctxgate", 100)
    assert {(one["pool"], one["replica"]) for one in found["candidates"]} == {
        ("standard", "standard-0"),
        ("standard", "standard-1"),
        ("fast", "quick"),
    }
    prices = {one["pool"]: one["cost_nano"] for one in found["candidates"]}
    prompt = found["prompt_tokens"]
    assert prices == {
        "standard": prompt * 400 + 100 * 1_600,
        "fast": prompt * 1_250 + 100 * 10_000,
    }
    assert all(one["ttft_s"] > 0 and one["total_s"] > one["ttft_s"] for one in found["candidates"])


def test_a_table_for_readers_begins_with_the_choice(explain: Explain) -> None:
    code, out, _ = explain("--class", "batch")
    _, _, table = out.partition("Where it would go")
    assert code == 0
    lines = table.splitlines()
    assert "standard/standard-" in lines[0]
    assert lines[3].split()[:3] == ["pool", "replica", "cached"]
    assert [line.split()[0] for line in lines[4:]] == ["standard", "standard", "fast"]


def test_a_bound_that_nobody_keeps_is_told(explain: Explain) -> None:
    found = route(explain, "--ttft-ms", "1")
    assert (found["fits"], found["reason"]) == (False, "fastest")
    assert found["budget"]["ttft_us"] == 1_000
    assert route(explain, "--team", "research", "--class", "interactive")["budget"]["ttft_us"] == 1_000
    assert route(explain)["fits"] is None


def test_what_the_earlier_request_left_draws_the_next_one(explain: Explain) -> None:
    more = [*HELLO["messages"], {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go."}]
    found = route(explain, "--class", "batch", after=HELLO | {"messages": more})
    warm = [one for one in found["candidates"] if one["hit_tokens"]]
    assert len(warm) == 1
    assert (warm[0]["pool"], warm[0]["replica"]) == (found["pool"], found["replica"])
    assert 0 < warm[0]["hit_tokens"] < found["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--class", "fsat"), "--class must be one of: interactive, agent, batch, reasoning"),
        (("--ttft-ms", "0"), "--ttft-ms must be a whole number of milliseconds"),
        (("--team", "nobody"), "there is no team nobody; known are research"),
    ],
)
def test_what_cannot_be_understood_is_refused(explain: Explain, options: tuple[str, ...], words: str) -> None:
    code, out, err = explain(*options)
    assert (code, out) == (2, "")
    assert words in err


def test_a_model_that_is_not_configured_is_refused(explain: Explain) -> None:
    code, _, err = explain(model="huge")
    assert code == 2
    assert "known are tiny" in err
