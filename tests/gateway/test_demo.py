"""The demo's parts: the agent's tools and loop, the comparison, the configuration, the processes."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ctxgate
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway.config_load import parse
from ctxgate.gateway.demo import (
    CASES,
    DECLARING,
    MODELS,
    PLAIN,
    TEAMS,
    Case,
    Compared,
    added,
    config_text,
    most,
    why,
)
from ctxgate.gateway.demo_agent import Act, Ask, Say, Toolbox, work
from ctxgate.gateway.demo_script import SYSTEM, review
from ctxgate.gateway.demo_servers import ServerFailed, Servers
from ctxgate.gateway.demo_words import comparison
from ctxgate.gateway.perturb import Perturbation
from ctxgate.gateway.replay import Measure, Played, Sums, summarize
from ctxgate.gateway.sessions import Session, parse_session
from ctxgate.inference.usage import UNKNOWN, Usage, measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.gateway.demo_agent import Script
    from ctxgate.gateway.sessions import Message, Tool

pytestmark = pytest.mark.integration

ROOT = Path(next(iter(ctxgate.__path__)))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text("def one():\n    return 1\n\n\ndef two():\n    return 2\n")
    (tmp_path / "pkg" / "b.txt").write_text("def three()\n")
    (tmp_path / "pkg" / ".hidden").write_text("x")
    (tmp_path / "linked").symlink_to(tmp_path / "pkg")
    return tmp_path


def test_list_files(tree: Path) -> None:
    assert Toolbox(tree).call("list_files", {"path": "."}) == "linked/\npkg/"
    assert Toolbox(tree).call("list_files", {"path": "pkg"}) == "a.py 50\nb.txt 12"


def test_read_file(tree: Path) -> None:
    tools = Toolbox(tree)
    assert tools.call("read_file", {"path": "pkg/a.py", "first": 5, "count": 9}) == "def two():\n    return 2"
    assert (
        tools.call("read_file", {"path": "pkg/a.py", "first": 2, "count": 1})
        == "    return 1\n[4 more lines]"
    )


def test_grep_follows_links_to_folders(tree: Path) -> None:
    tools = Toolbox(tree)
    assert tools.call("grep", {"pattern": r"def t", "path": "pkg"}) == "pkg/a.py:5:def two():"
    assert (
        tools.call("grep", {"pattern": r"def t", "path": "."})
        == "linked/a.py:5:def two():\npkg/a.py:5:def two():"
    )
    assert tools.call("grep", {"pattern": "nothing", "path": "pkg/a.py"}) == "no match"


def test_run_python(tree: Path) -> None:
    tools = Toolbox(tree)
    assert (
        tools.call("run_python", {"code": "import os; print(sorted(os.listdir()))"}) == "['linked', 'pkg']\n"
    )
    assert tools.call("run_python", {"code": "raise SystemExit('no')"}) == "exit code 1\nno\n"


def test_a_failed_call_is_a_result_without_this_machines_folders(tree: Path) -> None:
    result = Toolbox(tree).call("read_file", {"path": "gone.py", "first": 1, "count": 1})
    assert result == f"error: {os.strerror(2)}"


@pytest.mark.parametrize("path", ["../x", "/etc", "pkg/../../x"])
def test_tools_stay_in_their_tree(tree: Path, path: str) -> None:
    assert Toolbox(tree).call("list_files", {"path": path}) == f"error: {path} lies outside the tree"


def test_long_results_are_cut(tree: Path) -> None:
    (tree / "long.txt").write_text("x" * 5000)
    result = Toolbox(tree).call("read_file", {"path": "long.txt", "first": 1, "count": 1})
    assert result == "x" * 4000 + "\n[1000 more characters]"


def little() -> Script:
    yield Ask("How many?")
    listing, grepped = yield Act(
        "I look.", [("list_files", {"path": "pkg"}), ("grep", {"pattern": "def", "path": "pkg"})]
    )
    yield Say(f"{len(listing.splitlines())} files, {len(grepped.splitlines())} functions.")
    yield Ask("Thanks.")
    yield Say("Bye.")


def test_the_loop_records_a_valid_session_of_real_results(tree: Path) -> None:
    seen: list[str] = []
    session = work("t", "sys", little(), Toolbox(tree), 10, seen.append)
    assert [message["role"] for message in session.messages] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert session.messages[3]["content"] == "a.py 50\nb.txt 12"
    assert session.messages[5]["content"] == "2 files, 2 functions."
    assert seen == ["list_files pkg -> 16 characters", "grep def pkg -> 43 characters"]
    header = {"session": session.name, "tools": session.tools}
    lines = "\n".join(json.dumps(each) for each in (header, *session.messages))
    assert parse_session(lines.encode(), "t").messages == session.messages


def test_the_loop_stops_after_the_given_turns(tree: Path) -> None:
    session = work("t", "sys", little(), Toolbox(tree), 2, lambda _: None)
    assert session.requests == 2
    assert session.messages[-1]["content"] == "2 files, 2 functions."


def test_the_review_works_on_the_packages_own_sources() -> None:
    lines: list[str] = []
    session = work("review", SYSTEM, review(), Toolbox(ROOT), 18, lines.append)
    assert session.requests == 18
    assert len(lines) == len([m for m in session.messages if m["role"] == "tool"])
    results = [message["content"] for message in session.messages if message["role"] == "tool"]
    assert not [result for result in results if result.startswith(("error", "exit code", "no match"))]
    answers = [m["content"] for m in session.messages if m["role"] == "assistant" and "tool_calls" not in m]
    assert "printed 0.011684:" in answers[0]
    assert answers[1] == "No. 1 way to cut 63 bytes; 4 events, whatever the size of the chunks."


def test_the_configuration_loads_and_prices_both_pools(tmp_path: Path) -> None:
    twins = {"standard": "http://127.0.0.1:1001", "fast": "http://127.0.0.1:1002"}
    sha256s = {PLAIN: "ab" * 32, DECLARING: "cd" * 32}
    text = config_text(twins, "tiny", 0, tmp_path / "l.db", sha256s, date(2026, 3, 4))
    config = parse(text, file="c", folder=tmp_path, environ={}, today=date(2026, 3, 4)).config
    assert {name: pool.replicas[0].url for name, pool in config.pools.items()} == twins
    assert {name: (model.pools, model.served_name) for name, model in config.models.items()} == {
        "demo": (("standard",), "tiny"),
        "demo-fast": (("fast",), "tiny"),
    }
    (rates,) = config.pools["standard"].rates.versions[0]
    assert (rates.uncached, rates.cached, rates.output) == (150_000_000, 37_500_000, 600_000_000)
    assert {key.team: key.digest.hex() for key in config.keys} == sha256s
    plain, declaring = (config.teams[team] for team in TEAMS)
    assert (plain.layout, plain.kinds) == ("safe", frozenset())  # what users get who say nothing
    assert (declaring.layout, declaring.kinds) == ("declared", frozenset({VolatileKind.CLOCK}))
    assert {pool.cache_isolation for pool in config.pools.values()} == {"team"}


def sums(
    prompt: int, cached: int, *, cost: int | None = 10, error: str | None = None, ttft: float = 0.25
) -> Sums:
    usage = Usage(measured(prompt - cached), measured(cached), measured(3))
    return summarize([Played("s", "s", 1, [Measure(0, usage, cost, ttft, 0.3, error)])])


PLAIN_CASE = Case("fast", "x")
SHUFFLED = Case("fast", "x", frozenset({Perturbation.TOOL_ORDER}), remedy="We sort it out.")


def told(direct: Sums, through: Sums, case: Case = PLAIN_CASE, **more: Any) -> list[str]:
    """What stands below the table and its legend."""
    text = comparison([Compared(case, direct, through, **more)], None, color=False)
    return text.partition("\n\n")[2].splitlines()


def test_the_table_shows_both_ways_and_their_shares_of_hits() -> None:
    text = comparison([Compared(Case("fast", "x"), sums(200, 78), sums(200, 184))], 0.919, color=False)
    lines = text.splitlines()
    assert lines[0].split()[-3:] == ["TTFT", "p95", "hit"]
    assert lines[3].split() == [
        "direct",
        "1",
        "200",
        "78",
        "122",
        "3",
        "0.000000",
        *["250.0", "ms"] * 2,
        "39%",
    ]
    assert lines[4].split()[-1] == "92%"
    assert lines[5].endswith(" served. About 92% can be: the rest is new in each request.")


def test_equal_hits_are_called_equal() -> None:
    assert told(sums(100, 64), sums(100, 64)) == ["x: the same prompts, the same hits, the same cost"]


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        # quartiles 1 and 3: a median of 2 does not exceed their distance
        ([1, 1, 2, 3, 9], "; the difference in TTFT is within noise"),
        ([2, 2, 3, 3, 9], "; TTFT +3.0 ms"),
        # The same prompts with the same hits are not answered faster, whatever the clock says.
        ([-9, -9, -9, -9, -9], "; the difference in TTFT is within noise"),
    ],
)
def test_a_difference_in_ttft_is_told_where_it_exceeds_the_interquartile_range(
    milliseconds: list[int], words: str
) -> None:
    added_s = tuple(each / 1000 for each in milliseconds)
    (line,) = told(sums(9, 0), sums(9, 0), ttft_added_s=added_s)
    assert line == "x: the same prompts, the same hits, the same cost" + words


def test_ttft_is_compared_request_by_request() -> None:
    one = [
        Played("s", "s", 3, [Measure(turn, ttft_s=ttft) for turn, ttft in ((0, 1.0), (1, 2.0), (2, None))])
    ]
    two = [
        Played("s", "t", 3, [Measure(turn, ttft_s=ttft) for turn, ttft in ((1, 2.5), (0, 1.25), (2, 4.0))])
    ]
    assert added(one, two) == (0.25, 0.5)


def test_a_saving_is_told_with_its_cause_and_the_remedy() -> None:
    direct, through = sums(200, 78, cost=23, ttft=0.0851), sums(200, 184, ttft=0.0462)
    assert told(direct, through, SHUFFLED, why="They stand in another order.") == [
        "x: the cache serves 92% of the prompt instead of 39%, TTFT p50 is 46.2 ms instead of 85.1 ms; "
        "direct costs 2.3 times as much",
        "  They stand in another order. We sort it out.",
    ]


def test_a_loss_is_told_as_one_and_claims_no_remedy() -> None:
    lines = told(sums(200, 184), sums(200, 78, cost=23), SHUFFLED, why="Why.")
    assert lines == [
        "x: the cache serves 39% of the prompt instead of 92%, TTFT p50 is 250.0 ms instead of 250.0 ms; "
        "ctxgate costs 2.3 times as much",
        "  Why.",
    ]


@pytest.mark.parametrize(
    ("direct", "through", "words"),
    [
        (10, 10, "the same cost"),
        (1000, 1049, "the cost differs by 4.9%"),
        (1050, 1000, "direct costs 1.1 times as much"),  # 1.05, half up
        (0, 10, "direct is free, ctxgate is not"),
        (10, 0, "ctxgate is free, direct is not"),
        (None, 10, "the cost is unknown"),
    ],
)
def test_costs_are_compared(direct: int | None, through: int | None, words: str) -> None:
    (line,) = told(sums(100, 64, cost=direct), sums(100, 64, cost=through))
    assert line == f"x: the same prompts, the same hits, {words}"


def test_a_difference_below_a_percent_is_told_in_tokens() -> None:
    (line,) = told(sums(10_000, 6_400), sums(10_000, 6_416))
    assert line.startswith("x: the cache serves 6,416 tokens instead of 6,400, ")


def test_what_cannot_be_compared_is_not() -> None:
    unknown = summarize(
        [Played("s", "s", 1, [Measure(0, Usage(UNKNOWN, UNKNOWN, measured(3)), 10, 0.2, 0.3)])]
    )
    two = summarize(
        [
            Played(
                "s",
                "s",
                2,
                [Measure(turn, usage=Usage(measured(1), measured(0), measured(3))) for turn in (0, 1)],
            )
        ]
    )
    for other in (sums(1, 0, error="HTTP 500"), unknown, two):
        for pair in ((sums(1, 0), other), (other, sums(1, 0))):
            assert told(*pair) == ["x: not comparable, some requests failed or reported no usage"]


def test_cases_name_known_pools_and_teams_and_show_habits_of_clients() -> None:
    assert {case.pool for case in CASES} == set(MODELS)
    assert {case.team for case in CASES} == set(TEAMS)
    habits = {habit: case.team for case in CASES for habit in case.perturbations}
    assert habits == {Perturbation.TOOL_ORDER: PLAIN, Perturbation.CLOCK: DECLARING}
    assert all(bool(case.remedy) == bool(case.perturbations) for case in CASES)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (CASES[0], ""),
        (CASES[2], "The same tools stand in another order, from `tools[0]` on."),
        (CASES[3], "`messages[0].content` holds the time of day, which changed."),
    ],
)
def test_a_case_says_where_its_client_breaks_the_prefix(tree: Path, case: Case, sentence: str) -> None:
    session = work("review", "sys", little(), Toolbox(tree), 10, lambda _: None)
    assert why(session, case) == sentence


def test_the_most_that_can_hit_is_the_prefix_that_earlier_requests_left() -> None:
    """One token per character of a message; blocks of four."""
    texts = [("user", "abcdef"), ("assistant", "gh"), ("user", "ijkl"), ("assistant", "m")]
    messages = tuple({"role": role, "content": text} for role, text in texts)
    session = Session(name="s", tools=(), messages=messages)

    def tokenize(sent: Sequence[Message], _: Sequence[Tool]) -> list[int]:
        return [ord(one) for message in sent for one in message["content"]]

    # 6 tokens, then 12 that begin with them: of the 6 only a whole block of 4 can be found.
    assert most(session, tokenize, 4) == 4 / 18
    assert most(session, lambda *_: None, 4) is None


async def test_a_child_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    async with Servers(tmp_path) as servers:
        with pytest.raises(ServerFailed, match=r"(?s)gateway ended with code 2\n.*missing\.yaml"):
            await servers.start("gateway", ["serve", "--config", str(tmp_path / "missing.yaml")])
