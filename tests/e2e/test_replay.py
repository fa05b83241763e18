"""`ctxgate replay` as a user runs it: against a twin, through the gateway, with the recorded sessions."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.demo import PLAIN, config_text
from ctxgate.gateway.demo_servers import ctxgate_command
from e2e.engine import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

TRAJECTORIES = Path(__file__).parents[3] / "shared" / "trajectories"
SECRET = "cg-" + "k" * 43


def short_session(folder: Path, name: str = "s", turns: int = 6) -> Path:
    """A session with tool calls whose prompts grow by several blocks per request.

    Its very first words are its name: two sessions share no block, and are equally long where their
    names are one letter each.
    """
    tool = {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "deep": {"type": "boolean"}},
            },
        },
    }
    other = {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}},
    }
    lines: list[dict[str, Any]] = [
        {"session": name, "tools": [tool, other]},
        {"role": "system", "content": f"{name}: " + "you explain words, one after the other. " * 4},
        {"role": "user", "content": "Explain every word of the list."},
    ]
    for number in range(turns - 1):
        arguments = json.dumps({"word": f"word-{number}", "deep": number % 2 == 0})
        function = {"name": "look", "arguments": arguments}
        call = {"id": f"c{number}", "type": "function", "function": function}
        lines += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": f"Meaning {number} of the word. " * 20},
        ]
    lines.append({"role": "assistant", "content": "That is all."})
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ctxgate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a `ctxgate` command to its end."""
    return subprocess.run(
        ctxgate_command([str(each) for each in arguments]), capture_output=True, text=True, check=False
    )


def replayed(*arguments: str | Path) -> dict[str, Any]:
    done = ctxgate("replay", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@contextmanager
def serving(folder: Path, *arguments: str | Path) -> Iterator[str]:
    """Run a serving `ctxgate` command; yields the URL that it prints."""
    with (folder / "errors.log").open("ab") as errors:
        child = subprocess.Popen(
            ctxgate_command([str(each) for each in arguments]),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert "http://" in line, (folder / "errors.log").read_text()
        yield line.split()[-1]
    finally:
        child.terminate()
        child.communicate()


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One twin for all tests here, as fast as it can; the sessions share no block."""
    with serving(tmp_path_factory.mktemp("twin"), "twin", "--port", "0", "--time-scale", "0") as url:
        yield url


@pytest.fixture(scope="module")
def letters() -> Iterator[str]:
    """Session names that no other test here has had."""
    return iter(ascii_letters)


def test_a_growing_session_hits_all_that_can_be_hit(
    tmp_path: Path, twin: str, letters: Iterator[str]
) -> None:
    """On an engine that evicts nothing, the cached tokens are the oracle's."""
    result = replayed(short_session(tmp_path, next(letters)), "--to", twin)
    total = result["total"]
    assert (total["requests"], total["failed"]) == (6, 0)
    assert total["cached_tokens"] == total["oracle_tokens"] > 0
    assert total["efficiency"] == 1.0
    assert total["prompt_tokens"] == total["cached_tokens"] + total["uncached_tokens"]
    assert total["output_tokens"] <= 6 * 16
    assert not total["oracle_approximate"]
    assert not result["block_size_assumed"]
    assert total["cost_usd"] is None
    assert total["unknown"] == {"cost_nano": 6}


def test_streaming_changes_no_count(tmp_path: Path, twin: str, letters: Iterator[str]) -> None:
    streamed = replayed(short_session(tmp_path, next(letters)), "--to", twin, "--stream")
    whole = replayed(short_session(tmp_path, next(letters)), "--to", twin + "/v1/", "--no-stream")
    counts = ("requests", "prompt_tokens", "cached_tokens", "oracle_tokens")
    assert [streamed["total"][name] for name in counts] == [whole["total"][name] for name in counts]
    assert streamed["total"]["ttft_p50_ms"] > 0
    assert whole["total"]["ttft_p50_ms"] is None


def test_what_clients_do_to_prompts_costs_hits(tmp_path: Path, twin: str, letters: Iterator[str]) -> None:
    plain = replayed(short_session(tmp_path, next(letters)), "--to", twin)["total"]
    for kind in ("clock", "tool-order", "json-keys", "late-tool"):
        perturbed = replayed(short_session(tmp_path, next(letters)), "--to", twin, "--perturb", kind)
        assert perturbed["perturbations"] == [kind]
        assert perturbed["total"]["requests"] == 6
        assert perturbed["total"]["cached_tokens"] < plain["cached_tokens"], kind
        assert perturbed["total"]["cached_tokens"] == perturbed["total"]["oracle_tokens"], kind


def test_an_engine_that_parses_arguments_does_not_see_their_white_space(
    tmp_path: Path, twin: str, letters: Iterator[str]
) -> None:
    plain = replayed(short_session(tmp_path, next(letters)), "--to", twin)
    perturbed = replayed(short_session(tmp_path, next(letters)), "--to", twin, "--perturb", "reserialize")
    assert perturbed["total"]["cached_tokens"] == plain["total"]["cached_tokens"]


@contextmanager
def gateway(folder: Path, pool: str) -> Iterator[str]:
    """A gateway before one server, and its ledger at `l.db`."""
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    config = folder / "ctxgate.yaml"
    sha256s = {PLAIN: digest}
    config.write_text(config_text({"standard": pool}, "tiny", 0, folder / "l.db", sha256s, date(2026, 1, 1)))
    with serving(folder, "serve", "--config", config) as url:
        yield url


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_the_gateway_books_what_the_replay_measured(
    tmp_path: Path, twin: str, letters: Iterator[str], stream: str
) -> None:
    names = [next(letters), next(letters)]
    files = [short_session(tmp_path, name) for name in names]
    options = (stream, "--key", SECRET, "--task-prefix", "run/", "--block-size", "16", "--concurrency", "2")
    with gateway(tmp_path, twin) as url:
        through = replayed(*files, "--to", url, *options)
    total = through["total"]
    assert (total["requests"], total["failed"], total["efficiency"]) == (12, 0, 1.0)
    # 0.15 / 0.0375 / 0.60 dollars per million are 150 / 37.5 / 600 nano-dollars per token; whole blocks
    # of 16 cached tokens leave no fraction to round.
    exact = 300 * total["uncached_tokens"] + 75 * total["cached_tokens"] + 1200 * total["output_tokens"]
    assert 2 * total["cost_nano"] == exact
    report = ctxgate("report", "--by", "task", "--json", "--db", tmp_path / "l.db")
    rows = {row["group"]: row for row in json.loads(report.stdout)["rows"]}
    assert sorted(rows) == sorted(f"run/{name}" for name in names)
    for session in through["sessions"]:
        row = rows[session["task"]]
        for name in ("requests", "cached_tokens", "uncached_tokens", "output_tokens", "cost_nano"):
            assert row[name] == session[name], name


def test_the_table_is_plain_when_piped(tmp_path: Path, twin: str, letters: Iterator[str]) -> None:
    one, two = next(letters), next(letters)
    files = [short_session(tmp_path, name, 3) for name in (one, two)]
    done = ctxgate("replay", *files, "--to", twin, "--max-requests", "2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["session", "requests", "prompt"]
    assert [line.split()[:2] for line in lines[2:4]] == [[one, "2"], [two, "2"]]
    assert lines[5].split()[:2] == ["total", "4"]
    assert lines[6] == f"{one}: 2 of 3 requests: stopped after --max-requests 2"
    assert "\x1b" not in done.stdout


def test_a_request_that_fails_makes_the_exit_code_one(tmp_path: Path) -> None:
    """The window fits no prompt at all, and the replay is told otherwise: the engine refuses the first."""
    with serving(tmp_path, "twin", "--port", "0", "--max-model-len", "64") as url:
        done = ctxgate("replay", short_session(tmp_path), "--to", url, "--max-context", "100000")
    assert done.returncode == 1
    assert "s, request 1 failed: HTTP 400: This model's maximum context length is 64 tokens." in done.stdout


def test_a_session_ends_where_the_window_does(tmp_path: Path, twin: str, letters: Iterator[str]) -> None:
    whole = replayed(short_session(tmp_path, next(letters)), "--to", twin)
    cut = replayed(short_session(tmp_path, next(letters)), "--to", twin, "--max-context", "700")
    (session,) = cut["sessions"]
    assert 0 < session["requests"] < whole["total"]["requests"]
    assert session["stopped"] == "the next prompt no longer fits 700 tokens"
    assert session["failed"] == 0


def test_the_servers_window_is_the_default(tmp_path: Path) -> None:
    with serving(tmp_path, "twin", "--port", "0", "--max-model-len", "700", "--time-scale", "0") as url:
        result = replayed(short_session(tmp_path), "--to", url)
    assert result["max_context"] == 700
    assert result["sessions"][0]["stopped"] == "the next prompt no longer fits 700 tokens"


def test_without_the_local_tokenizer_there_is_no_oracle(
    tmp_path: Path, twin: str, letters: Iterator[str]
) -> None:
    hide = (
        "import sys; sys.modules['tokenizers'] = None; from ctxgate.gateway.cli import main; sys.exit(main())"
    )
    path = short_session(tmp_path, next(letters))
    done = subprocess.run(
        [sys.executable, "-P", "-c", hide, "replay", path, "--to", twin],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2].split()[-2:] == ["-", "-"]
    assert "needs the extra `twin`" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--to", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9/v1/models"),
        (["--to", "127.0.0.1:9"], "--to 127.0.0.1:9: must begin with http:// or https://"),
        (["gone.jsonl", "--to", "http://127.0.0.1:9"], "gone.jsonl: there is no such file"),
        (["--to", "http://127.0.0.1:9", "--perturb", "clocks"], "unknown perturbation 'clocks'"),
        (["--to", "http://127.0.0.1:9", "--tokenizer", "/nowhere"], "no usable tokenizer and template"),
    ],
)
def test_what_cannot_be_played_is_told_in_one_line(
    tmp_path: Path, arguments: list[str], problem: str
) -> None:
    done = ctxgate("replay", short_session(tmp_path), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ctxgate replay: ")
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_model_is_told_with_the_known_ones(tmp_path: Path, twin: str) -> None:
    done = ctxgate("replay", short_session(tmp_path), "--to", twin, "--model", "gpt-0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ctxgate replay: the server has no model 'gpt-0'; it has tiny\n"


def test_a_broken_file_is_told_with_its_line(tmp_path: Path) -> None:
    path = short_session(tmp_path)
    path.write_text(path.read_text() + "{\n")
    done = ctxgate("replay", path, "--to", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert done.stderr.startswith(f"ctxgate replay: {path}:15: not JSON: ")


def test_a_session_given_twice_is_refused(tmp_path: Path) -> None:
    path = short_session(tmp_path)
    done = ctxgate("replay", path, path, "--to", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "'s' was given before" in done.stderr


@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository")
def test_a_recorded_session_is_played_whole(twin: str) -> None:
    result = replayed(TRAJECTORIES / "airline-000-0.jsonl", "--to", twin, "--max-tokens", "2")
    assert result["sessions"][0]["requests_recorded"] == 15
    assert (result["total"]["requests"], result["total"]["failed"]) == (15, 0)
    assert result["total"]["cached_tokens"] == result["total"]["oracle_tokens"]


def test_real_vllm_hits_what_the_oracle_says(tmp_path: Path, engines: Mapping[str, Engine]) -> None:
    """Local count, block size and bound against the real engine, plain and with a client's habits."""
    url = engines["fast"].url
    for name, kinds in (("v", ""), ("w", "tool-order,reserialize"), ("x", "clock,json-keys,late-tool")):
        result = replayed(short_session(tmp_path, f"real {name}"), "--to", url, "--perturb", kinds)
        total = result["total"]
        assert (total["requests"], total["failed"]) == (6, 0)
        assert (result["block_size"], result["block_size_assumed"]) == (BLOCK_SIZE, False)
        assert not total["oracle_approximate"]
        assert total["cached_tokens"] == total["oracle_tokens"], kinds
