"""What `ctxgate pools probe` prints, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from config_texts import VALID
from ctxgate.gateway.cli import main
from ctxgate.gateway.own_calls import Cost
from ctxgate.gateway.pool_probe import Examined
from ctxgate.gateway.pool_report import ReplicaReport, as_json, as_text, with_window
from ctxgate.inference.template_facts import (
    CacheReport,
    Extension,
    Findings,
    TemplateFacts,
    Turns,
    Verdict,
)

if TYPE_CHECKING:
    from pathlib import Path

FACTS = TemplateFacts(
    plain=Turns(Extension.YES),
    tools=Turns(Extension.BUT_ANSWER, 4),
    reasoning=Turns(Extension.NO, 310),
    arguments=Verdict.REORDERED,
    empty_content=Verdict.EQUIVALENT,
    tool_order=Verdict.DIFFERENT,
    call_ids=Verdict.RENAMED,
)
FOUND = Examined(
    "swift",
    "org/engine",
    131072,
    16,
    True,
    Findings(CacheReport(True, True, 16), True, FACTS),
    ("something is wrong (a cure)",),
    Cost(3, 4650, 1_860_000),
)
BARE = Examined("tiny", "tiny", None, None, False, Findings())
UP = ReplicaReport("fast", "fast-0", "http://10.0.0.3:8000", None, (FOUND, BARE))
DOWN = ReplicaReport("slow", "slow-0", "http://10.0.0.4:8000", "nothing listens there")

TEXT = """\
fast/fast-0  http://10.0.0.3:8000
  model                 swift (org/engine)        tiny
  window                131,072 tokens            unknown
  cache block           16 tokens                 unknown
  abort by id           yes                       no
  render endpoint       yes                       no
  reports cached tokens yes                       unknown
  salts isolate         yes                       unknown
  extends: plain        yes                       unknown
  extends: tools        but the answer, 4 tokens  unknown
  extends: reasoning    no, 310 tokens            unknown
  extends: tool results unknown                   unknown
  rule: arguments       on (reordered)            on (unknown)
  rule: empty content   on (equivalent)           on (unknown)
  rule: tools           off (different)           on (unknown)
  rule: call ids        on (renamed)              on (unknown)
  ! swift: something is wrong (a cure)

slow/slow-0  http://10.0.0.4:8000
  not reachable: nothing listens there

The probe took 3 calls and 4,650 tokens, $0.00186; they are booked to the task probe.
"""


def test_the_table_has_a_block_per_replica_and_a_column_per_model() -> None:
    assert as_text([UP, DOWN]) == TEXT


def test_the_same_as_json() -> None:
    document = json.loads(json.dumps(as_json([UP, DOWN])))
    assert document["ok"] is False
    assert json.loads(json.dumps(as_json([UP])))["ok"] is True
    up, down = document["replicas"]
    assert (up["alive"], down["alive"], down["problem"]) == (True, False, "nothing listens there")
    assert down["models"] == []
    swift, tiny = up["models"]
    assert (swift["model"], swift["served_name"], swift["max_model_len"]) == ("swift", "org/engine", 131072)
    assert (swift["block_size"], swift["abort_by_id"], swift["render"]) == (16, True, True)
    assert (swift["reports_cached"], swift["salts_isolate"]) == (True, True)
    assert swift["extends"]["reasoning"] == {"extension": "no", "lost": 310}
    assert swift["rules"]["tools"] == {"found": "different", "on": False}
    assert swift["rules"]["call_ids"] == {"found": "renamed", "on": True}
    assert (swift["calls"], swift["tokens"], swift["cost_usd"]) == (3, 4650, "0.00186")
    assert (tiny["reports_cached"], tiny["problems"]) == (None, [])


def test_a_replica_fails_where_it_is_down_or_lacks_a_model() -> None:
    lacking = Examined("x", "x", None, None, True, Findings(), ("it does not serve x",), missing=True)
    assert DOWN.failed
    assert not UP.failed
    assert ReplicaReport("p", "r", "u", None, (BARE, lacking)).failed


def test_context_i1_an_unknown_window_is_a_problem_unless_the_configuration_states_it() -> None:
    unbounded = replace(BARE, window=None)
    (problem,) = with_window(unbounded, ()).problems
    assert problem.startswith("the window is not known")
    assert f"models.{BARE.model}.window" in problem
    assert with_window(unbounded, {BARE.model}) == unbounded
    assert with_window(replace(BARE, window=4096), ()).problems == ()
    assert with_window(replace(unbounded, missing=True), ()).problems == ()


def test_mistakes_are_told_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(VALID)
    assert main(["pools", "probe", "-c", str(file), "--pool", "slow"]) == 1
    assert capsys.readouterr() == ("", "there is no pool slow; known are standard, fast\n")
    file.write_text(VALID + "lisen: 1\n")
    assert main(["pools", "probe", "-c", str(file)]) == 1
    assert "did you mean listen?" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.integration
def test_servers_that_are_down_are_named_and_end_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    replicas = '["http://10.0.0.1:8000", "http://10.0.0.2:8000"]'
    assert replicas in VALID
    file.write_text(VALID.replace(replicas, '["http://127.0.0.1:9"]'))
    assert main(["pools", "probe", "-c", str(file), "--pool", "standard"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("standard/standard-0  http://127.0.0.1:9\n  not reachable: nothing listens there\n")
    assert out.endswith("The probe took 0 calls and 0 tokens, $0; they are booked to the task probe.\n")
