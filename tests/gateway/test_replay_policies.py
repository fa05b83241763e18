"""`ctxgate replay --policies`: what sessions cost by compaction policy, from recordings alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.economics import Shape
from ctxgate.compression.schedule import Step
from ctxgate.gateway.cli import main
from ctxgate.gateway.replay_policies import parse_rates, parse_shape, parse_triggers, steps_of
from ctxgate.gateway.sessions import SessionError, parse_session
from support.compaction import TRAJECTORIES

if TYPE_CHECKING:
    from pathlib import Path

# Dollars: fixed triggers from 60k to 250k, never, ski-rental and its compactions, the offline optimum.
EXPECTED = {
    "5/0.5/6.25/25": "22.979 23.126 23.917 27.659 31.525 37.277 58.494 22.096 (9) 21.593",
    "1.25/0.125/1.25/10": "6.568 6.494 6.652 7.552 8.507 9.929 15.219 6.357 (9) 6.124",
    "1/0.1/1/4": "4.151 4.268 4.460 5.225 6.010 7.169 11.424 4.131 (11) 3.948",
    "0.14/0.0028/0.14/0.28": "0.238 0.215 0.209 0.227 0.245 0.275 0.390 0.217 (6) 0.201",
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "not counted"},
    {"role": "user", "content": "x" * 40},
    {"role": "assistant", "content": "fine", "_recorded": {"output": 7}},
    {"role": "user", "content": "y" * 9},
    {"role": "assistant", "content": "12345"},
]


def session_bytes(messages: list[dict[str, Any]]) -> bytes:
    header = {"session": "short", "tools": []}
    return b"\n".join(json.dumps(each).encode() for each in [header, *messages])


@pytest.fixture
def session(tmp_path: Path) -> str:
    path = tmp_path / "short.jsonl"
    path.write_bytes(session_bytes(MESSAGES))
    return str(path)


@pytest.mark.integration
def test_the_table_of_the_long_session_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    path = TRAJECTORIES / "coding-long-a.jsonl"
    if not path.exists():
        pytest.skip("the recorded sessions are not here")
    assert main(["replay", str(path), "--policies"]) == 0
    title, _header, _rule, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("coding-long-a: 468 requests, growth 347,381, output 187,857 tokens")
    found = {line.split()[0]: line.split()[1:] for line in lines}
    for rates, expected in EXPECTED.items():
        *dollars, best = expected.split()
        assert found[rates][: len(dollars)] == dollars
        assert best in found[rates]
        assert float(found[rates][-1]) <= (1.06 if rates.startswith("0.14") else 1.05)


def test_a_session_by_hand(session: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Growth 10, then 4 for 4 + 9 characters; a new token costs a dollar, a cached one half of it."""
    command = ["replay", session, "--policies", "--rates", "1000000/500000/1000000/0"]
    command += ["--shape", "100/0/0/0"]
    assert main([*command, "--triggers", "114", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    [table] = document["policies"]
    assert (table["session"], table["requests"]) == ("short", 2)
    assert (table["growth_tokens"], table["output_tokens"]) == (14, 9)
    [row] = table["rows"]
    policies = {each["policy"]: each for each in row["policies"]}
    # 100 cached and 10 new, then 110 cached and 4 new
    assert policies["never"]["cost_usd"] == "119"
    assert policies["never"]["to_optimum"] == policies["optimum"]["to_optimum"] == 1
    # before the second request 114 are read for the summary, and the prefix is read again
    assert policies["114"]["compacted_before"] == [1]
    assert policies["114"]["cost_nano"] == (60 + 57 + 50) * 10**9
    assert policies["114"]["to_optimum"] == 167 / 119


def test_what_was_recorded_of_outputs_is_used() -> None:
    assert steps_of(parse_session(session_bytes(MESSAGES), "s")) == (Step(10, 7), Step(4, 2))


@pytest.mark.parametrize("output", [-1, 1.5, "7", True])
def test_an_output_that_is_no_count_is_refused(output: object) -> None:
    messages = [MESSAGES[1], {**MESSAGES[2], "_recorded": {"output": output}}]
    with pytest.raises(SessionError, match=r"s:3: `_recorded.output` must be a number of tokens"):
        parse_session(session_bytes(messages), "s")


def test_arguments_are_read_exactly() -> None:
    rates = parse_rates("5/.5/6.25/0.000000001")
    assert (rates.uncached, rates.cached, rates.written, rates.output) == (
        *(5_000_000_000, 500_000_000, 6_250_000_000, 1),
    )
    assert parse_shape("1/2/3/4") == Shape(prefix=1, summary=2, tail=3, summary_output=4)
    assert parse_triggers("60000,7") == (60_000, 7)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--rates", "1/2/3", "not four rates"),
        ("--rates", "1/2/3/x", "number of dollars"),
        ("--rates", "1/2/3/-4", "at least 0"),
        ("--rates", "1/2/3/NaN", "at least 0"),
        ("--rates", "1/2/3/.0000000001", "nine decimals"),
        ("--shape", "1/2/3", "not four numbers"),
        ("--shape", "1/2/3/-4", "not four numbers"),
        ("--triggers", "60000,", "no list"),
        ("--triggers", "0", "no list"),
    ],
)
def test_a_bad_argument_is_named(
    session: str, option: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", session, "--policies", option, value])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {option}" in error
    assert says in error


def test_it_takes_a_target_or_policies(session: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", session])
    with pytest.raises(SystemExit):
        main(["replay", session, "--policies", "--to", "http://127.0.0.1:1"])
    assert "--to" in capsys.readouterr().err
