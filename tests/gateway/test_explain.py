"""`ctxgate explain`: what it prints, what it counts, and what it refuses."""

from __future__ import annotations

import json
import sys
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from config_texts import VALID
from ctxgate.gateway.cli import main
from ctxgate.gateway.explain import Price, shorten
from ctxgate.gateway.perturb import Perturbation, perturb
from ctxgate.gateway.sessions import read_session
from ctxgate.inference.prompts import TINY, PromptRenderer
from ctxgate.inference.rates import RateCard, Rates

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

SESSION = Path(__file__).parents[3] / "shared" / "trajectories" / "repair-a.jsonl"
RULES = "Answer in short sentences and name your sources. " * 12
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "Reads a file.", "parameters": {"type": "object"}},
}
TALK = [
    {"role": "user", "content": "What is in the folder? " * 20},
    {"role": "assistant", "content": "Two files, of which the first is longer. " * 20},
    {"role": "user", "content": "Read them both, then tell me what they say."},
]
MORE = [{"role": "assistant", "content": "They say nothing."}, {"role": "user", "content": "Thanks."}]


def system(clock: str) -> dict[str, Any]:
    return {"role": "system", "content": f"{RULES}\nCurrent time: {clock}"}


EARLY, LATE = system("2026-01-05T09:00:00Z"), system("2026-01-05T09:00:47Z")
STILL = {"role": "system", "content": RULES}


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command on two message lists, or on the bytes of two files; returns code, output and errors."""

    def run(before: Any, after: Any, *options: str, **members: Any) -> tuple[int, str, str]:
        for name, content in (("a.json", before), ("b.json", after)):
            if isinstance(content, list):
                content = json.dumps({"model": "tiny", "messages": content, **members}).encode()  # noqa: PLW2901 - the shorthand
            (tmp_path / name).write_bytes(content)
        paths = ["--request", str(tmp_path / "a.json"), "--after", str(tmp_path / "b.json")]
        code = main(["explain", *paths, *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(VALID)
    return str(path)


def ids(messages: list[Any], tools: list[Any] | None = None) -> list[int]:
    renderer = PromptRenderer()
    return renderer.encode(renderer.chat_text(messages, tools))


def compact(message: Any) -> str:
    return json.dumps(message, separators=(",", ":"))


def common(one: list[int], two: list[int]) -> int:
    at = 0
    while at < min(len(one), len(two)) and one[at] == two[at]:
        at += 1
    return at


def usd(tokens: int) -> str:
    """What tokens cost more uncached, at 0.40, than cached, at 0.04 dollars per million."""
    return f"{tokens * 36 / 10**8:.8f}".rstrip("0")


def test_a_clock_in_prose(explain: Callable[..., tuple[int, str, str]], config: str) -> None:
    before, after = [EARLY, *TALK], [LATE, *TALK, *MORE]
    code, out, err = explain(before, after, "-c", config)
    one, two = ids(before), ids(after)
    cached = common(one, two) // 16 * 16
    lost = len(one) // 16 * 16 - cached
    renderer = PromptRenderer()
    head = renderer.chat_text(after).partition("2026-01-05T09:00:47Z")[0]
    behind = len(two) - len(renderer.encode(head))
    offset = compact(LATE).index("47Z")
    assert (code, err) == (0, "")
    explained, _, route = out.partition("\nWhere it would go")
    assert "standard/standard-" in route
    assert explained == (
        "What b.json would miss, sent after a.json:\n"
        "\n"
        "`messages[0].content` holds the time of day, which changed.\n"
        "  before: \u2026 time: 2026-01-05T09:00:00Z\n"
        "  after:  \u2026 time: 2026-01-05T09:00:47Z\n"
        f"  volatile_in_head (clock) at messages[0].content, byte {offset} of messages[0] as compact JSON\n"
        "\n"
        f"{len(two):,} prompt tokens (counted by tiny, cached in blocks of 16):\n"
        f"  {cached:,} stay cached\n"
        f"  {lost:,} lost: cached by a.json, and read anew\n"
        f"  {len(two) - cached - lost:,} new\n"
        f"The lost tokens cost ${usd(lost)} more, at the rates of pool standard.\n"
        "\n"
        "Text in the head of b.json that looks as if it changes by itself. When it does, all from there to "
        "the prompt's end is read anew, new tokens and parts of blocks included:\n"
        f"  messages[0].content: clock, 'Current time: 2026-01-05T09:00:47Z': {behind:,} tokens "
        f"(${usd(behind)}) per turn in which it changes (it did)\n"
        "\n"
        "Fix: take it out of the head. Put it at the end of the last user message, or let a tool tell it; a "
        "date without the time of day changes once a day. Layout `declared` with `volatile: [clock]` moves "
        "it there; `learned` finds out by itself what changes.\n"
    )
    assert lost > 16


def test_the_same_as_json(explain: Callable[..., tuple[int, str, str]], config: str) -> None:
    before, after = [EARLY, *TALK], [LATE, *TALK, *MORE]
    code, out, _ = explain(before, after, "--json", "-c", config, "--block-size", "1")
    report = json.loads(out)
    one, two = ids(before), ids(after)
    lost = len(one) - common(one, two)
    assert code == 0
    assert report["first"] == report["effective"]
    assert (report["first"]["kind"], report["first"]["index"]) == ("volatile_in_head", 0)
    assert (report["first"]["volatile"], report["first"]["field"]) == ("clock", "messages[0].content")
    assert report["tokens"] == {
        "prompt": len(two),
        "cached": common(one, two),
        "lost": lost,
        "counted_by": "tiny",
        "block_size": 1,
    }
    assert report["cost"]["pool"] == "standard"
    assert report["cost"]["lost_nano_usd"] == lost * 360
    assert [(one["kind"], one["changed"]) for one in report["volatile_head"]] == [("clock", True)]


def test_a_conversation_that_only_grows_loses_nothing(explain: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = explain([STILL, *TALK], [STILL, *TALK, *MORE])
    one = ids([STILL, *TALK])
    assert code == 0
    assert "The second request begins with the whole first one.\n" in out
    assert f"  {len(one) // 16 * 16:,} stay cached\n  0 lost: cached by a.json, and read anew\n" in out
    assert "cost" not in out
    assert out.endswith("Fix: nothing; this is how a conversation should grow.\n")


def test_a_clock_that_stands_still_is_named_and_not_blamed(
    explain: Callable[..., tuple[int, str, str]],
) -> None:
    _, out, _ = explain([EARLY, *TALK], [EARLY, *TALK, *MORE])
    assert "per turn in which it changes (the same in both)\n" in out
    assert out.endswith("Fix: nothing; this is how a conversation should grow.\n")


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "read", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def test_other_white_space_in_arguments_costs_nothing(explain: Callable[..., tuple[int, str, str]]) -> None:
    before = [STILL, *TALK, call('{"path": "a"}'), {"role": "tool", "tool_call_id": "c1", "content": "x"}]
    after = [STILL, *TALK, call('{"path":"a"}'), *before[-1:], *MORE]
    _, out, _ = explain(before, after, tools=[TOOL])
    assert '  before: {"path": "a"}\n  after:  {"path":"a"}\n' in out
    assert "history_reserialized at messages[4].tool_calls[0].function.arguments" in out
    assert "That does not reach the prompt as vLLM renders it, and nothing else differs.\n" in out
    assert "  0 lost" in out
    assert "Fix: nothing is lost with vLLM. Other engines may see the difference: keep each message" in out


def test_other_white_space_in_the_files_does_not_hide_the_real_change(
    explain: Callable[..., tuple[int, str, str]],
) -> None:
    edited = {"role": "system", "content": RULES + "Never guess."}
    wide = json.dumps({"model": "tiny", "messages": [edited, *TALK]}, indent=4).encode()
    _, out, _ = explain([STILL, *TALK], wide, "--json")
    report = json.loads(out)
    assert report["first"] == report["effective"]
    assert (report["first"]["kind"], report["first"]["field"]) == ("system_changed", "messages[0].content")
    assert report["first"]["offset"] == compact(STILL).index('"}')
    wide = json.dumps({"model": "tiny", "messages": [STILL, *TALK]}, indent=4).encode()
    _, out, _ = explain([STILL, *TALK], wide, "--json")
    assert json.loads(out)["first"]["kind"] == "extends"


def test_the_first_difference_that_reaches_the_prompt_is_named_beside_the_first(
    explain: Callable[..., tuple[int, str, str]],
) -> None:
    before = [STILL, call('{"path": "a"}'), *TALK]
    after = [STILL, call('{"path":"a"}'), {"role": "user", "content": "What else?"}, *TALK[1:]]
    _, out, _ = explain(before, after, "--json")
    report = json.loads(out)
    assert (report["first"]["kind"], report["first"]["index"]) == ("history_reserialized", 1)
    assert (report["effective"]["kind"], report["effective"]["index"]) == ("history_edited", 2)
    _, out, _ = explain(before, after)
    assert "The first difference that does:\nA message that was sent before was edited" in out


def test_a_late_tool_loses_the_history_and_not_the_tool_itself(
    explain: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    late = {**TOOL, "function": {**TOOL["function"], "name": "late"}}  # type: ignore[dict-item]  # an object
    after = json.dumps({"model": "tiny", "messages": [STILL, *TALK, *MORE], "tools": [TOOL, late]})
    _, out, _ = explain([STILL, *TALK], after.encode(), "--json", "--block-size", "1", tools=[TOOL])
    report = json.loads(out)
    one, two = ids([STILL, *TALK], [TOOL]), ids([STILL, *TALK, *MORE], [TOOL, late])
    assert (report["first"]["kind"], report["first"]["index"]) == ("tools_changed", 1)
    assert report["tokens"]["cached"] == common(one, two)
    assert report["tokens"]["lost"] == len(one) - common(one, two)


@pytest.mark.parametrize("field", ["cache_salt", "model"])
def test_nothing_stays_cached_for_another_salt_or_model(
    explain: Callable[..., tuple[int, str, str]], field: str
) -> None:
    after = json.dumps({"model": "tiny", "messages": [STILL, *TALK], field: "other"}).encode()
    _, out, _ = explain([STILL, *TALK], after, "--json")
    tokens = json.loads(out)["tokens"]
    prompt = len(ids([STILL, *TALK]))
    assert (tokens["cached"], tokens["lost"]) == (0, (prompt - 1) // 16 * 16)


def test_without_a_tokenizer_bytes_are_counted_and_marked(
    explain: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    before, after = [EARLY, *TALK], [LATE, *TALK, *MORE]
    code, out, _ = explain(before, after)
    total = sum(len(compact(message)) for message in after)
    kept = compact(LATE).index("47Z")
    lost = len('Z"}') + sum(len(compact(message)) for message in TALK)
    tokens = [-(-size // 4) for size in (total, kept, kept + lost)]
    assert code == 0
    assert f"~{tokens[0]:,} prompt tokens (estimated at 4 bytes a token):\n" in out
    assert f"  ~{tokens[1]:,} stay cached\n  ~{tokens[2] - tokens[1]:,} lost" in out
    code, _, err = explain(before, after, "--tokenizer", str(TINY))
    assert code == 2
    assert "needs the extra `twin`" in err


def test_a_conversation_that_the_template_refuses_is_counted_by_bytes(
    explain: Callable[..., tuple[int, str, str]],
) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
    code, out, _ = explain([STILL, image], [STILL, image, *MORE])
    assert code == 0
    assert "estimated at 4 bytes a token" in out


def test_a_tokenizer_can_be_named(explain: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, _ = explain([STILL, *TALK], [STILL, *TALK, *MORE], "--tokenizer", str(TINY))
    assert code == 0
    assert f"{len(ids([STILL, *TALK, *MORE])):,} prompt tokens (counted by tiny" in out
    code, _, err = explain([STILL], [STILL], "--tokenizer", str(tmp_path))
    assert code == 2
    assert "no usable tokenizer and template" in err


BAD = [
    (b"", "not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b"{}", "is no chat request"),
    (b'{"messages": []}', "is no chat request"),
    (b'{"prompt": "x"}', "is no chat request"),
    (b'{"messages": [{"content": "x"}]}', "`messages[0]` must be an object with a `role`"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "`messages[0].content` must be a string or an array"),
    (b'{"messages": [{"role": "assistant", "tool_calls": 5}]}', "`messages[0].tool_calls` must be an array"),
    (b'{"messages": [{"role": "user"}], "tools": {}}', "`tools` must be an array"),
    (b'{"messages": [{"role": "user"}], "tools": [{}]}', "`tools[0]` must be an object with a `function`"),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not valid JSON"),
]


@pytest.mark.parametrize(("raw", "message"), BAD)
def test_a_file_that_is_no_chat_request(
    explain: Callable[..., tuple[int, str, str]], raw: bytes, message: str
) -> None:
    code, out, err = explain([STILL], raw)
    assert (code, out) == (2, "")
    assert err.startswith("ctxgate explain: ")
    assert "b.json: " in err
    assert message in err


def test_files_and_configurations_that_are_missing_or_do_not_fit(
    explain: Callable[..., tuple[int, str, str]],
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = str(tmp_path / "none.json")
    assert main(["explain", "--request", missing, "--after", missing]) == 2
    assert capsys.readouterr().err == f"ctxgate explain: {missing}: there is no such file\n"
    code, _, err = explain([STILL], [STILL], "-c", missing)
    assert (code, "there is no such file" in err) == (2, True)
    other = json.dumps({"model": "gpt", "messages": [STILL]}).encode()
    code, _, err = explain(other, other, "-c", config)
    assert code == 2
    assert (
        err == f"ctxgate explain: {config}: the second request's model is not in it; known are swift, tiny\n"
    )


def test_the_dearer_tier_of_a_long_prompt_prices_a_miss() -> None:
    base = {"output": 0, "effective": date(2026, 1, 1)}
    low = Rates(uncached=400_000_000, cached=40_000_000, written=400_000_000, **base)  # type: ignore[arg-type]  # a mix
    high = Rates(uncached=10**9, cached=10**8, written=10**9, above_prompt_tokens=1000, **base)  # type: ignore[arg-type]  # as above
    price = Price("p", RateCard(((low, high),)), date(2026, 2, 1))
    assert price.of_miss(1000, 0, 500) == 500 * 360
    assert price.of_miss(1001, 0, 500) == 500 * 900


def test_a_long_span_is_shown_on_one_short_line() -> None:
    assert shorten("a\nb") == "a\\nb"
    assert shorten("x" * 80) == "x" * 59 + "\u2026"


@pytest.mark.skipif(not SESSION.exists(), reason="the recorded sessions are not here")
@pytest.mark.parametrize(
    ("kind", "found", "place"),
    [
        (Perturbation.CLOCK, "volatile_in_head", "messages[0]"),
        (Perturbation.TOOL_ORDER, "tools_reordered", "tools[0]"),
        (Perturbation.JSON_KEYS, "tools_reserialized", "tools[0]"),
        (Perturbation.RESERIALIZE, "history_reserialized", "messages[2]"),
        (Perturbation.LATE_TOOL, "tools_changed", "tools[3]"),
    ],
)
def test_a_perturbed_session(
    explain: Callable[..., tuple[int, str, str]], kind: Perturbation, found: str, place: str
) -> None:
    turns = [perturb(turn, {kind}) for turn in read_session(SESSION).turns()]
    reports = []
    for one, two in pairwise(turns):
        pair = (
            json.dumps({"model": "m", "messages": t.messages, "tools": t.tools}).encode() for t in (one, two)
        )
        reports.append(json.loads(explain(*pair, "--json")[1]))
    kinds = {report["first"]["kind"] for report in reports}
    assert kinds - {"extends", "history_reserialized"} <= {found}
    named = [report["first"] for report in reports if report["first"]["kind"] == found]
    assert place in {one["field"].partition(".")[0] for one in named}
    for report in reports:
        tokens = report["tokens"]
        assert tokens["cached"] % 16 == 0
        assert 0 <= tokens["lost"] <= tokens["prompt"] - tokens["cached"]
        if report["effective"]["kind"] == "extends":
            assert tokens["lost"] == 0
        elif report["effective"]["kind"] in ("volatile_in_head", "tools_changed"):
            assert tokens["lost"] > 0
