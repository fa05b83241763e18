"""The start-up probe against real engines: three chat templates, by rendered tokens and by usage."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ctxgate.gateway.demo_servers import ctxgate_command
from ctxgate.inference.template_facts import Extension, Verdict
from e2e.engine import BLOCK_SIZE, Counters
from e2e.gateway_process import GatewayConfig, booked, ledger_rows, serving, settled_counters, until
from e2e.probing import played

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

TEMPLATES: Final = Path(__file__).parent / "templates"
YES, NO = Extension.YES, Extension.NO
# What each template must be found to do: turns (plain, tools, reasoning, results), then spellings
# (arguments, empty content, tools, ids). vLLM parses arguments, so that their white space never shows.
EXPECTED: Final = {
    "tiny": (
        (YES, YES, YES, YES),
        (Verdict.REORDERED, Verdict.EQUIVALENT, Verdict.REORDERED, Verdict.EQUIVALENT),
    ),
    "thinking": (
        (YES, YES, NO, YES),
        (Verdict.REORDERED, Verdict.EQUIVALENT, Verdict.REORDERED, Verdict.EQUIVALENT),
    ),
    "printing": (
        (YES, NO, NO, NO),
        (Verdict.REORDERED, Verdict.EQUIVALENT, Verdict.DIFFERENT, Verdict.RENAMED),
    ),
}


def check_template(engine: Engine, name: str) -> None:
    """By rendered tokens and by cached tokens a template is found to be the same."""
    turns, spellings = EXPECTED[name]
    by_tokens = played(engine, f"{name} tokens", may_render=True)
    facts = by_tokens.facts
    found = (facts.plain, facts.tools, facts.reasoning, facts.tool_results)
    assert by_tokens.renders
    assert tuple(one.extension for one in found) == turns
    assert all((one.lost > 0) is (one.extension is not YES) for one in found)
    assert (facts.arguments, facts.empty_content, facts.tool_order, facts.call_ids) == spellings

    by_usage = played(engine, f"{name} usage", may_render=False)
    facts = by_usage.facts
    found = (facts.plain, facts.tools, facts.reasoning, facts.tool_results)
    assert not by_usage.renders
    assert tuple(one.extension for one in found) == turns
    told_by_usage = {Verdict.REORDERED: Verdict.UNKNOWN, Verdict.DIFFERENT: Verdict.UNKNOWN}
    assert (facts.arguments, facts.empty_content, facts.tool_order, facts.call_ids) == tuple(
        told_by_usage.get(verdict, verdict) for verdict in spellings
    )
    for findings in (by_tokens, by_usage):
        assert (findings.cache.reports, findings.cache.isolates) == (True, True)
        assert findings.cache.block_size == BLOCK_SIZE


def probe_command(config: GatewayConfig, *more: str) -> subprocess.CompletedProcess[str]:
    command = ctxgate_command(["pools", "probe", "-c", str(config.write()), *more])
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_the_tiny_template(engines: Mapping[str, Engine]) -> None:
    check_template(engines["standard"], "tiny")


@pytest.mark.parametrize("name", ["thinking", "printing"])
def test_another_template_and_the_rules_that_a_gateway_draws_from_it(
    start_engine: Callable[..., Engine], tmp_path: Path, name: str
) -> None:
    engine = start_engine(name, "--chat-template", str(TEMPLATES / f"{name}.jinja"))
    check_template(engine, name)
    done = probe_command(GatewayConfig(tmp_path, {"standard": [engine.url]}), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (replica,) = json.loads(done.stdout)["replicas"]
    (model,) = replica["models"]
    assert {rule: found["on"] for rule, found in model["rules"].items()} == {
        "arguments": True,
        "empty_content": True,
        "tools": name == "thinking",
        "call_ids": name == "printing",
    }
    assert model["extends"]["reasoning"]["extension"] == "no"
    assert any("renders earlier turns anew" in problem for problem in model["problems"])


def test_the_command_shows_every_replica_and_books_what_it_used(
    engines: Mapping[str, Engine], tmp_path: Path
) -> None:
    config = GatewayConfig(tmp_path, {name: [engine.url] for name, engine in engines.items()})
    before = {name: settled_counters(engine) for name, engine in engines.items()}
    done = probe_command(config)
    assert (done.returncode, done.stderr) == (0, "")
    rows = ledger_rows(config.ledger)
    for name, engine in engines.items():
        mine = [row for row in rows if row.opened.pool == name]
        used = settled_counters(engine) - before[name]
        assert booked(mine) == used != Counters(0, 0, 0)
        assert f"{name}/{name}-0  {engine.url}" in done.stdout
    assert {(row.opened.organisation, row.opened.team, row.opened.task) for row in rows} == {
        ("ctxgate", "ctxgate", "probe")
    }
    total = booked(rows)
    assert len(rows) == 10  # per replica three of the cache report and two of the steps
    assert f"took 10 calls and {total.prompt + total.generation:,} tokens" in done.stdout
    for line in (
        f"cache block           {BLOCK_SIZE} tokens",
        "abort by id           yes",
        "render endpoint       yes",
        "reports cached tokens yes",
        "salts isolate         yes",
        "extends: tool results yes",
        "rule: tools           on (reordered)",
        "rule: call ids        off (equivalent)",
    ):
        assert done.stdout.count(line) == 2, line


def test_a_replica_that_is_down_is_named(engines: Mapping[str, Engine], tmp_path: Path) -> None:
    config = GatewayConfig(tmp_path, {"standard": [engines["standard"].url, "http://127.0.0.1:9"]})
    done = probe_command(config)
    assert done.returncode == 1
    assert "standard/standard-1  http://127.0.0.1:9\n  not reachable: nothing listens there\n" in done.stdout
    assert "reports cached tokens yes" in done.stdout


def test_a_gateway_probes_when_it_starts_and_its_ledger_stays_the_engines(
    engines: Mapping[str, Engine], tmp_path: Path
) -> None:
    engine = engines["standard"]
    before = settled_counters(engine)
    with serving(GatewayConfig(tmp_path, {"standard": [engine.url]}, probe=True)) as gateway:
        until(gateway.idle, 30, "the probe's calls are booked")
        rows = gateway.rows()
    assert [row.opened.task for row in rows] == ["probe"] * 3  # ready means that the probe has ended
    assert booked(rows) == settled_counters(engine) - before


def test_gateways_b7_a_server_that_reports_no_cached_tokens_is_marked_so(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start_engine("mute", "--no-enable-prompt-tokens-details")
    config = GatewayConfig(tmp_path, {"standard": [engine.url]})
    done = probe_command(config, "--json")
    (model,) = json.loads(done.stdout)["replicas"][0]["models"]
    assert (done.returncode, model["reports_cached"], model["salts_isolate"]) == (0, False, None)
    assert any("--enable-prompt-tokens-details" in problem for problem in model["problems"])
    usages = [row.settled.usage for row in ledger_rows(config.ledger)]
    assert len(usages) == 5
    assert all(usage.prompt is not None for usage in usages)
    assert {usage.cached.certainty.value for usage in usages} <= {"unknown", "estimated"}
