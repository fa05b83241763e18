"""`ctxgate check` and `ctxgate keys` as a user meets them."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from typing import TYPE_CHECKING

import pytest

from config_texts import DIGEST, VALID, edited, read_text
from ctxgate.gateway.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def test_check_prints_one_line_per_problem_and_fails(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(VALID + "x: 1\n" + "lisen: 1\n")
    assert main(["check", "-c", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == (
        f"{file}:17:1: x: is not a known field; known are listen, store, limits, pools, models, teams, keys, "
        "cache_salt_env, docs\n"
        f"{file}:18:1: lisen: is not a known field; did you mean listen?\n"
        "2 problems\n"
    )
    assert err == ""


def test_check_prints_problems_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(VALID + "lisen: 1\n")
    assert main(["check", "-c", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "problems": [
            {
                "file": str(file),
                "line": 17,
                "column": 1,
                "field": "lisen",
                "message": "is not a known field; did you mean listen?",
            }
        ],
    }


SUMMARY = """\
{file} is valid
  listen  http://[::1]:9000
  ledger  {store}

pools (US dollars per million tokens)
  standard
    aborts by request id; sends no API key
    cached prompts are shared within a team
    standard-0  http://10.0.0.1:8000
    standard-1  http://10.0.0.2:8000
    from        prompt above  uncached  cached  output
    2026-01-01             0       0.4    0.04     1.6
  fast
    no abort: the usage of broken-off calls is estimated; sends an API key
    cached prompts are shared within a team
    quick  http://10.0.0.3:8000
    from        prompt above  uncached  cached  output
    2026-01-01             0      1.25   0.125      10

models
  tiny: standard
  swift: fast

teams
  name      organisation  compaction  layout
  research  acme          auto        safe

keys
  id           team      organisation
  research-ci  research  acme
"""


@pytest.fixture
def full(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid file with an upstream key in the environment."""
    monkeypatch.setenv("FAST_KEY", "upstream-value-7261")
    more = "    api_key_env: FAST_KEY\n    abort: false\n"
    file.write_text(
        'listen: {host: "::1", port: 9000}\n' + edited("    replicas: [{name", more + "    replicas: [{name")
    )
    return file


def test_check_sums_a_valid_file_up(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-c", str(full)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == SUMMARY.format(file=full, store=full.parent / "ctxgate.db")


def test_check_sums_a_valid_file_up_as_json_without_secrets_and_hashes(
    full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "-c", str(full), "--json"]) == 0
    printed = capsys.readouterr().out
    assert "upstream-value-7261" not in printed
    assert DIGEST not in printed
    summary = json.loads(printed)
    assert summary["ok"] is True
    assert summary["config"]["pools"]["fast"]["sends_api_key"] is True
    assert summary["config"]["pools"]["fast"]["rates"] == [
        {
            "effective": "2026-01-01",
            "above_prompt_tokens": 0,
            "usd_per_million_uncached": "1.25",
            "usd_per_million_cached": "0.125",
            "usd_per_million_output": "10",
            "usd_per_million_written": "1.25",
        }
    ]
    assert summary["config"]["keys"] == [{"id": "research-ci", "team": "research"}]
    assert summary["config"]["pools"]["fast"]["cache_isolation"] == "team"
    team = summary["config"]["teams"]["research"]
    context, classes = team.pop("context"), team.pop("classes")
    assert classes["default"] == "agent"
    assert classes["batch"] == {"ttft_ms": None, "latency_ms": None, "prefer": "standard"}
    assert team == {"organisation": "acme", "layout": {"level": "safe", "volatile": []}}
    assert (context["compaction"], context["tail_tokens"], context["sticky_tools"]) == ("auto", 20_000, [])


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        ('"off"', "off"),
        ("learned", "learned"),
        ("{level: declared, volatile: [uuid, clock]}", "declared; volatile: clock, uuid"),
        ("{level: learned, volatile: [{pattern: '^Build: .+'}]}", "learned; volatile: 1 expression"),
        ("{level: safe, volatile: [clock]}", "safe"),  # not used there, which a warning says
    ],
)
def test_check_shows_how_each_team_s_prompts_are_laid_out(
    file: Path, layout: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(edited("{organisation: acme}", f"{{organisation: acme, layout: {layout}}}"))
    assert main(["check", "-c", str(file)]) == 0
    assert f"  research  acme          auto        {shown}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("context", "shown"),
    [
        ('"off"', "off"),
        ("{summarizer: extractive}", "auto, extractive"),
        ("{compaction: window, summarizer: off}", "window, no summary"),
    ],
)
def test_check_shows_what_becomes_of_each_team_s_long_conversations(
    file: Path, context: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(edited("{organisation: acme}", f"{{organisation: acme, context: {context}}}"))
    assert main(["check", "-c", str(file)]) == 0
    assert re.search(rf"^  research  acme          {shown}  +safe$", capsys.readouterr().out, re.MULTILINE)


def test_check_shows_who_shares_a_pool_s_cache(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(edited("  fast:\n", "  fast:\n    cache_isolation: none\n"))
    assert main(["check", "-c", str(file)]) == 0
    shared = [line for line in capsys.readouterr().out.splitlines() if "cached prompts" in line]
    assert shared == [
        "    cached prompts are shared within a team",
        "    cached prompts are shared by everybody",
    ]


def test_check_shows_volatile_text_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = "{level: declared, volatile: [clock, {pattern: '^Build: .+'}]}"
    file.write_text(edited("{organisation: acme}", f"{{organisation: acme, layout: {layout}}}"))
    assert main(["check", "-c", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["teams"]["research"]["layout"] == {
        "level": "declared",
        "volatile": [{"kind": "clock"}, {"pattern": "^Build: .+"}],
    }


def test_routing_i2_check_shows_how_requests_are_routed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = edited("{organisation: acme}", "{organisation: acme, classes: {interactive: {ttft_ms: 800}}}")
    text = text.replace("  fast:\n", "  fast:\n    profile: fast\n")
    file.write_text(text.replace("{pools: [standard]}", "{pools: [standard, fast], routing: lmetric}"))
    assert main(["check", "-c", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  fast, tuned fast" in lines
    assert "  tiny: standard, fast, routed by lmetric" in lines
    told = "agent by default; interactive first token in 0.8 s, prefers fast"
    assert f"  research, by class of job: {told}" in lines


def test_check_warns_and_still_succeeds(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(VALID[: VALID.index("keys:")])
    assert main(["check", "-c", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == f"{file}:1:1: warning: there is no key, so every call is refused\n"
    assert out.endswith("keys\n  none\n")


def test_check_takes_the_file_in_configs_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check"]) == 1
    assert capsys.readouterr().out == "configs/ctxgate.yaml: there is no such file\n1 problem\n"


def test_a_new_key_is_shown_once_with_the_entry_that_admits_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--id", "ci-2", "--team", "research"]) == 0
    out = capsys.readouterr().out
    secret, entry = (line for line in out.splitlines() if not line.startswith("#"))
    assert re.fullmatch(r"cg-[A-Za-z0-9_-]{43}", secret)
    assert out.count(secret) == 1
    config = read_text(VALID + f"  {entry}\n").config
    assert config.keys[1].key_id == "ci-2"
    assert config.keys[1].digest == hashlib.sha256(secret.encode()).digest()
    main(["keys", "new", "--id", "ci-2", "--team", "research"])
    assert secret not in capsys.readouterr().out


def test_a_new_key_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--id", "123", "--team", "on", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["entry"] == {
        "id": "123",
        "team": "on",
        "sha256": hashlib.sha256(made["secret"].encode()).hexdigest(),
    }


@pytest.mark.parametrize(
    ("key_id", "team"), [("a b", "t"), ("a", ""), ('a"', "t"), ("a", "t\n"), ("cg-" + "A1" * 20, "t")]
)
def test_unusable_names_make_no_key(key_id: str, team: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--id", key_id, "--team", team]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ctxgate keys new: --")


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_hash_reads_one_line_from_standard_input(
    end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "existing-secret-of-another-system-0001"
    monkeypatch.setattr(sys, "stdin", io.StringIO(secret + end, newline=""))
    assert main(["keys", "hash"]) == 0
    assert capsys.readouterr().out == hashlib.sha256(secret.encode()).hexdigest() + "\n"


@pytest.mark.parametrize(
    "given", [b"", b"short", b"a" * 300, b"a" * 40 + b"\n" + b"b" * 40, b"\xff" * 40, b"a " * 20]
)
def test_hash_refuses_what_is_no_secret_without_showing_it(
    given: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
    assert main(["keys", "hash"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ctxgate keys hash: a secret ")
    assert "aaaa" not in err


def test_hash_takes_no_secret_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["keys", "hash", "secret-on-the-command-line"])
    assert caught.value.code == 2
