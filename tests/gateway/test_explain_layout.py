"""`ctxgate explain` of two requests as they would go out of a layout level."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Explain = Callable[..., str]

EARLY = {"role": "system", "content": "Be brief. " * 20 + "\nCurrent time: 2026-01-05T09:00:00Z"}
LATE = {"role": "system", "content": EARLY["content"].replace("09:00:00Z", "09:00:47Z")}
TALK = [{"role": "user", "content": "What is on the table? " * 20}]
MORE = [{"role": "assistant", "content": "A cup."}, {"role": "user", "content": "And under it?"}]


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Explain:
    """Runs the command over two lists of messages."""

    def run(before: list[Any], after: list[Any], *options: str, **fields: tuple[Any, Any]) -> str:
        command = ["explain"]
        for at, (option, messages) in enumerate((("--request", before), ("--after", after))):
            path = tmp_path / f"{'ab'[at]}.json"
            more = {name: values[at] for name, values in fields.items()}
            path.write_text(json.dumps({"model": "m", "messages": messages, **more}))
            command += [option, str(path)]
        assert main([*command, *options]) == 0
        return capsys.readouterr().out

    return run


def test_both_can_be_compared_as_they_go_out_of_a_layout_level(explain: Explain) -> None:
    """The clock goes to a note behind the history: of all that the first request said, nothing is lost."""
    before, after = [EARLY, *TALK], [LATE, *TALK, *MORE]
    came = json.loads(explain(before, after, "--json"))
    report = json.loads(explain(before, after, "--json", "--layout", "declared", "--volatile", "clock"))
    assert (came["layout"], report["layout"]) == (None, "declared")
    assert came["tokens"]["lost"] > 16
    assert (report["effective"]["kind"], report["tokens"]["lost"]) == ("extends", 0)
    safe = explain(before, after, "--layout", "safe")
    assert safe.startswith("What b.json would miss, sent after a.json, both laid out at the level safe:\n")
    assert "holds the time of day, which changed" in safe
    other = json.loads(explain(before, after, "--json", "--volatile", "uuid"))
    assert (other["layout"], other["effective"]["volatile"]) == ("declared", "clock")


def test_layout_safe_sends_tools_in_their_first_order(explain: Explain) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]
    kinds = [
        json.loads(explain(TALK, TALK, "--json", *options, tools=(tools, tools[::-1])))["effective"]["kind"]
        for options in ([], ["--layout", "off"], ["--layout", "safe"])
    ]
    assert kinds == ["tools_reordered", "tools_reordered", "extends"]
