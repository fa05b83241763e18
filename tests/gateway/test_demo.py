"""The demo's parts: the agent's tools and loop, the comparison, the configuration, the processes."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ctxgate
from ctxgate.gateway.config_load import parse
from ctxgate.gateway.demo import CASES, MODELS, Case, Compared, added, comparison, config_text
from ctxgate.gateway.demo_agent import Act, Ask, Say, Toolbox, work
from ctxgate.gateway.demo_script import SYSTEM, review
from ctxgate.gateway.demo_servers import ServerFailed, Servers
from ctxgate.gateway.perturb import Perturbation
from ctxgate.gateway.replay import Measure, Played, Sums, summarize
from ctxgate.gateway.sessions import parse_session
from ctxgate.inference.usage import Usage, measured

if TYPE_CHECKING:
    from ctxgate.gateway.demo_agent import Script

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
    text = config_text(twins, "tiny", 0, tmp_path / "l.db", "ab" * 32, date(2026, 3, 4))
    config = parse(text, file="c", folder=tmp_path, environ={}, today=date(2026, 3, 4)).config
    assert {name: pool.replicas[0].url for name, pool in config.pools.items()} == twins
    assert {name: (model.pools, model.served_name) for name, model in config.models.items()} == {
        "demo": (("standard",), "tiny"),
        "demo-fast": (("fast",), "tiny"),
    }
    (rates,) = config.pools["standard"].rates.versions[0]
    assert (rates.uncached, rates.cached, rates.output) == (150_000_000, 37_500_000, 600_000_000)
    assert config.keys[0].digest == bytes.fromhex("ab" * 32)


def sums(prompt: int, cached: int, *, cost: int = 10, error: str | None = None) -> Sums:
    usage = Usage(measured(prompt - cached), measured(cached), measured(3))
    return summarize([Played("s", "s", 1, [Measure(0, usage, cost, 0.25, 0.3, error, prompt, cached)])])


def test_equal_hits_are_called_equal() -> None:
    text = comparison([Compared(Case("standard", "plain"), sums(100, 64), sums(100, 64))], color=False)
    assert text.splitlines()[-1] == "plain: the same prompts, the same hits, the same cost"


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        # quartiles 1 and 3: a median of 2 does not exceed their distance
        ([1, 1, 2, 3, 9], "; the difference in TTFT is within noise"),
        ([2, 2, 3, 3, 9], "; TTFT +3.0 ms"),
        # A gateway makes no call faster, whatever the clock says.
        ([-9, -9, -9, -9, -9], "; the difference in TTFT is within noise"),
    ],
)
def test_a_difference_in_ttft_is_told_where_it_exceeds_the_interquartile_range(
    milliseconds: list[int], words: str
) -> None:
    added_s = tuple(each / 1000 for each in milliseconds)
    text = comparison([Compared(Case("fast", "x"), sums(9, 0), sums(9, 0), added_s)], color=False)
    assert text.splitlines()[-1] == "x: the same prompts, the same hits, the same cost" + words


def test_ttft_is_compared_request_by_request() -> None:
    one = [
        Played("s", "s", 3, [Measure(turn, ttft_s=ttft) for turn, ttft in ((0, 1.0), (1, 2.0), (2, None))])
    ]
    two = [
        Played("s", "t", 3, [Measure(turn, ttft_s=ttft) for turn, ttft in ((1, 2.5), (0, 1.25), (2, 4.0))])
    ]
    assert added(one, two) == (0.25, 0.5)


def test_what_a_habit_costs_is_told_against_the_plain_case() -> None:
    plain, shuffled = (Case("fast", "plain"), Case("fast", "shuffled", frozenset({Perturbation.TOOL_ORDER})))
    text = comparison(
        [
            Compared(plain, sums(100, 90, cost=10), sums(100, 90, cost=10)),
            Compared(shuffled, sums(100, 40, cost=25), sums(100, 40, cost=25)),
        ],
        color=False,
    )
    assert text.splitlines()[-1] == (
        "shuffled: the cache serves 40% of the prompt instead of 90%, and the same work costs 2.5 times as "
        "much. Send the tools in one order."
    )


def test_different_hits_are_called_different() -> None:
    text = comparison(
        [Compared(Case("standard", "plain"), sums(100, 64), sums(100, 96, cost=9))], color=False
    )
    assert text.splitlines()[-1].startswith("plain: cached tokens 64 direct, 96 through ctxgate")


def test_failures_make_a_case_incomparable() -> None:
    text = comparison([Compared(Case("fast", "x"), sums(1, 0), sums(1, 0, error="HTTP 500"))], color=False)
    assert text.splitlines()[-1] == "x: not comparable, some requests failed or reported no usage"


def test_cases_name_known_pools_and_one_shows_a_habit_of_clients() -> None:
    assert {case.pool for case in CASES} == set(MODELS)
    assert frozenset({Perturbation.TOOL_ORDER}) in {case.perturbations for case in CASES}


async def test_a_child_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    async with Servers(tmp_path) as servers:
        with pytest.raises(ServerFailed, match=r"(?s)gateway ended with code 2\n.*missing\.yaml"):
            await servers.start("gateway", ["serve", "--config", str(tmp_path / "missing.yaml")])
