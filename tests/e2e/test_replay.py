"""`ctxgate replay` as a user runs it: against a twin, through the gateway, with the recorded sessions."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import asynccontextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.demo import config_text
from ctxgate.gateway.demo_servers import Servers, ctxgate_command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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


async def ctxgate(*arguments: str | Path) -> tuple[int, str, str]:
    """Run a `ctxgate` command; its exit code, output and errors."""
    child = await asyncio.create_subprocess_exec(
        *ctxgate_command([str(each) for each in arguments]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


async def replayed(*arguments: str | Path) -> dict[str, Any]:
    code, out, err = await ctxgate("replay", "--json", *arguments)
    assert (code, err) == (0, "")
    result: dict[str, Any] = json.loads(out)
    return result


@asynccontextmanager
async def twin(folder: Path, name: str = "standard") -> AsyncIterator[tuple[Servers, str]]:
    async with Servers(folder) as servers:
        yield servers, await servers.start(name, ["twin", "--profile", "fast", "--port", "0"])


async def test_a_growing_session_hits_all_that_can_be_hit(tmp_path: Path) -> None:
    """On an engine that evicts nothing, cached tokens are the oracle's, request by request."""
    async with twin(tmp_path) as (_, url):
        result = await replayed(short_session(tmp_path), "--to", url)
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


async def test_streaming_changes_no_count(tmp_path: Path) -> None:
    one, two = short_session(tmp_path, "a"), short_session(tmp_path, "b")
    async with twin(tmp_path) as (_, url):
        streamed = await replayed(one, "--to", url, "--stream")
        whole = await replayed(two, "--to", url + "/v1/", "--no-stream")
    counts = ("requests", "prompt_tokens", "cached_tokens", "oracle_tokens")
    assert [streamed["total"][name] for name in counts] == [whole["total"][name] for name in counts]
    assert streamed["total"]["ttft_p50_ms"] > 0
    assert whole["total"]["ttft_p50_ms"] is None


@pytest.mark.parametrize("kind", ["clock", "tool-order", "json-keys", "late-tool"])
async def test_what_clients_do_to_prompts_costs_hits(tmp_path: Path, kind: str) -> None:
    async with twin(tmp_path) as (_, url):
        plain = await replayed(short_session(tmp_path, "a"), "--to", url)
        perturbed = await replayed(short_session(tmp_path, "b"), "--to", url, "--perturb", kind)
    assert perturbed["perturbations"] == [kind]
    assert perturbed["total"]["requests"] == 6
    assert perturbed["total"]["cached_tokens"] < plain["total"]["cached_tokens"]
    assert perturbed["total"]["cached_tokens"] == perturbed["total"]["oracle_tokens"]


async def test_white_space_of_arguments_costs_nothing_on_an_engine_that_parses_them(tmp_path: Path) -> None:
    async with twin(tmp_path) as (_, url):
        plain = await replayed(short_session(tmp_path, "a"), "--to", url)
        perturbed = await replayed(short_session(tmp_path, "b"), "--to", url, "--perturb", "reserialize")
    assert perturbed["total"]["cached_tokens"] == plain["total"]["cached_tokens"]


async def test_through_the_gateway_counts_are_the_same_and_every_request_is_priced(tmp_path: Path) -> None:
    files = [short_session(tmp_path, name) for name in ("a", "b")]
    async with twin(tmp_path) as (servers, url):
        digest = hashlib.sha256(SECRET.encode()).hexdigest()
        config = tmp_path / "ctxgate.yaml"
        text = config_text({"standard": url}, "tiny", 0, tmp_path / "l.db", digest, date(2026, 1, 1))
        config.write_text(text)
        gateway = await servers.start("gateway", ["serve", "--config", str(config)], ready="/ready")
        through = await replayed(
            *files,
            "--to",
            gateway,
            "--key",
            SECRET,
            "--task-prefix",
            "run/",
            "--block-size",
            "16",
            "--concurrency",
            "2",
        )
        code, out, _ = await ctxgate("report", "--by", "task", "--json", "--db", tmp_path / "l.db")
    assert code == 0
    total = through["total"]
    assert (total["requests"], total["failed"]) == (12, 0)
    # standard: 0.15 / 0.0375 / 0.60 dollars per million, so 150 / 37.5 / 600 nano-dollars per token.
    exact = 150 * total["uncached_tokens"] + 37.5 * total["cached_tokens"] + 600 * total["output_tokens"]
    assert total["cost_nano"] == pytest.approx(exact, abs=12)  # at most half a nano-dollar per component
    rows = {row["group"]: row for row in json.loads(out)["rows"]}
    assert sorted(rows) == ["run/a", "run/b"]
    for session in through["sessions"]:
        row = rows[session["task"]]
        for name in ("requests", "cached_tokens", "uncached_tokens", "output_tokens", "cost_nano"):
            assert row[name] == session[name], name


async def test_the_table_is_plain_when_piped(tmp_path: Path) -> None:
    files = [short_session(tmp_path, name, 3) for name in ("a", "b")]
    async with twin(tmp_path) as (_, url):
        code, out, err = await ctxgate("replay", *files, "--to", url, "--max-requests", "2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split("  ")[0] == "session"
    assert [line.split()[0] for line in lines[2:4]] == ["a", "b"]
    assert lines[5].split()[:2] == ["total", "4"]
    assert lines[6] == "a: 2 of 3 requests: stopped after --max-requests 2"
    assert "\x1b" not in out


async def test_a_request_that_fails_makes_the_exit_code_one(tmp_path: Path) -> None:
    """The window fits no prompt at all: the very first request is refused by the engine."""
    async with Servers(tmp_path) as servers:
        url = await servers.start("twin", ["twin", "--port", "0", "--max-model-len", "64"])
        code, out, _ = await ctxgate(
            "replay", short_session(tmp_path), "--to", url, "--max-context", "100000"
        )
    assert code == 1
    assert "failed" in out


async def test_a_session_ends_where_the_window_does(tmp_path: Path) -> None:
    async with twin(tmp_path) as (_, url):
        whole = await replayed(short_session(tmp_path, "x"), "--to", url)
        half = await replayed(short_session(tmp_path, "y"), "--to", url, "--max-context", "700")
    (session,) = half["sessions"]
    assert 0 < session["requests"] < whole["total"]["requests"]
    assert session["stopped"] == "the next prompt no longer fits 700 tokens"
    assert session["failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--to", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9/v1/models"),
        (["--to", "http://127.0.0.1:9", "--perturb", "clocks"], "unknown perturbation 'clocks'"),
        (["--to", "http://127.0.0.1:9", "--tokenizer", "/nowhere"], "no usable tokenizer and template"),
    ],
)
async def test_what_cannot_be_played_is_told_in_one_line(
    tmp_path: Path, arguments: list[str], problem: str
) -> None:
    code, out, err = await ctxgate("replay", short_session(tmp_path), *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ctxgate replay: ")
    assert problem in err
    assert len(err.splitlines()) == 1


async def test_a_broken_file_is_told_with_its_line(tmp_path: Path) -> None:
    path = short_session(tmp_path)
    path.write_text(path.read_text() + "{\n")
    code, _, err = await ctxgate("replay", path, "--to", "http://127.0.0.1:9")
    assert code == 2
    assert err.startswith(f"ctxgate replay: {path}:15: not JSON: ")


async def test_a_session_given_twice_is_refused(tmp_path: Path) -> None:
    path = short_session(tmp_path)
    code, _, err = await ctxgate("replay", path, path, "--to", "http://127.0.0.1:9")
    assert code == 2
    assert "'s' was given before" in err


@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository")
async def test_a_recorded_session_is_played_whole(tmp_path: Path) -> None:
    async with twin(tmp_path) as (_, url):
        result = await replayed(TRAJECTORIES / "airline-000-0.jsonl", "--to", url, "--max-tokens", "2")
    assert result["sessions"][0]["requests_recorded"] == 15
    assert result["total"]["requests"] == 15
    assert result["total"]["failed"] == 0
    assert result["total"]["cached_tokens"] == result["total"]["oracle_tokens"]
