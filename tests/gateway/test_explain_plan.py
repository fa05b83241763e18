"""`ctxgate explain` of one request: what the layout would make of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.gateway.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Explain = Callable[..., tuple[int, str, str]]

NOW = "2026-01-05T09:00:00Z"
ID = "123e4567-e89b-42d3-a456-426614174000"
SYSTEM = {"role": "system", "content": f"Be brief.\nCurrent time: {NOW}\nSession id: {ID}"}
USER = {"role": "user", "content": "Go."}


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Explain:
    def run(messages: list[Any], *options: str) -> tuple[int, str, str]:
        path = tmp_path / "a.json"
        path.write_text(json.dumps({"model": "m", "messages": messages}))
        try:
            code = main(["explain", "--request", str(path), *options])
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_each_move_and_its_note_are_shown(explain: Explain) -> None:
    code, out, _ = explain([SYSTEM, USER], "--volatile", "clock")
    before = len(json.dumps({"model": "m", "messages": [SYSTEM, USER]}, separators=(",", ":")))
    after = before - len(NOW) + len(PLACEHOLDER) + len(f"\\n\\n{HEADING}\\nCurrent time: {NOW}")
    assert code == 0
    assert out == (
        "What the layout level declared makes of a.json, as the first request of its team:\n\n"
        "messages[0]: volatile text (clock) moved to the note of the last user turn\n"
        f'  takes "{NOW}"\n'
        "messages[1]: a note of what the moved text says now\n"
        f"  | {HEADING}\n"
        f"  | Current time: {NOW}\n"
        f"\n{before} bytes come in, {after} go out.\n"
    )


def test_every_kind_is_declared_unless_some_are_named(explain: Explain) -> None:
    _, out, _ = explain([SYSTEM, USER], "--json")
    document = json.loads(out)
    assert [moved["words"] for moved in document["moved"]] == [[NOW], [ID]]
    assert document["outgoing"]["messages"] == [
        {"role": "system", "content": f"Be brief.\nCurrent time: {PLACEHOLDER}\nSession id: {PLACEHOLDER}"},
        {"role": "user", "content": f"Go.\n\n{HEADING}\nCurrent time: {NOW}\nSession id: {ID}"},
    ]
    assert document["level"] == "declared"
    assert document["bytes_out"] > document["bytes_in"]


@pytest.mark.parametrize("options", [("--layout", "off"), ("--layout", "safe"), ("--volatile", "pid")])
def test_a_request_that_stays_as_it_is(explain: Explain, options: tuple[str, ...]) -> None:
    code, out, _ = explain([SYSTEM, USER], *options)
    assert code == 0
    assert out.endswith("\n\nNothing: it goes upstream as it came.\n")


def test_why_volatile_text_stays(explain: Explain) -> None:
    jobs = "\n".join(f"Job {at} ran at 2026-01-05T09:00:{at:02}Z" for at in range(60))
    code, out, _ = explain([{"role": "system", "content": jobs}, USER], "--volatile", "clock")
    assert code == 0
    assert out.endswith(
        "\n\nVolatile text stays in its place: the placeholders and labels of so much of it would make the "
        "prompt too long.\nNothing: it goes upstream as it came.\n"
    )
    _, out, _ = explain([{"role": "system", "content": jobs}, USER], "--volatile", "clock", "--json")
    assert json.loads(out)["dropped"] == "longer"


def test_a_note_in_parts_and_a_marked_block(explain: Explain) -> None:
    block = {"type": "text", "text": "Mood: calm", "ctxgate": {"stability": "volatile"}}
    code, out, _ = explain([{"role": "user", "content": [block, {"type": "text", "text": "Go."}]}])
    assert code == 0
    assert 'takes "Mood: calm"' in out
    assert f"  | {HEADING}\n  | Mood: calm\n" in out


@pytest.mark.parametrize(
    ("messages", "options", "problem"),
    [
        ([USER | {"ctxgate": 7}], (), "'messages[0].ctxgate' must be an object"),
        ([USER], ("--volatile", "clok"), "unknown kind 'clok'; known: clock, date"),
        ([USER], ("--layout", "all"), "invalid choice: 'all'"),
        ([7], (), "`messages[0]` must be an object"),
    ],
)
def test_what_cannot_be_explained_is_told(
    explain: Explain, messages: list[Any], options: tuple[str, ...], problem: str
) -> None:
    code, out, err = explain(messages, *options)
    assert (code, out) == (2, "")
    assert problem in err
