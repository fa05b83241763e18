"""The record as a whole: rules first, notes, exact strings, within a budget; and what survives in it."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
import pytest

from ctxgate.compression.identifier_ranking import best_first
from ctxgate.compression.identifier_types import Identifier, IdentifierKind
from ctxgate.compression.identifiers import estimated_tokens
from ctxgate.compression.summary import Summary, carrier, fitted, listed
from ctxgate.compression.summary_record import RecordText, RecordWork, made, record_of
from support.summaries import NOTES, RULE, TASK, conversation
from support.survival import future_need, plain_survival, rates, strings, survival


def raw(*messages: dict[str, Any]) -> list[bytes]:
    return [json.dumps(message).encode() for message in messages]


def work(
    messages: list[bytes], *, kept: list[bytes] | None = None, budget: int = 600, answer: str | None = None
) -> RecordWork:
    task = raw({"role": "user", "content": TASK})[0]
    return RecordWork(messages, kept or [], task, budget, sum(map(len, messages)), answer)


DROPPED: Final = raw(*conversation()[2:-1])


def test_rules_then_notes_then_strings() -> None:
    record = record_of(work(DROPPED, answer=NOTES))
    assert record.text is not None
    assert (record.by_model, record.told) == (True, [])
    lines = record.text.split("\n")
    titles = [line for line in lines if not line.startswith(("- ", "  "))]
    assert titles == [
        "What the user asked to hold:",
        "Goal:",
        "Decisions:",
        "State:",
        "Exact strings from the messages above this point (collected by code, verbatim):",
        "Errors that were reported:",
        "Commands that were run:",
        "Paths:",
    ]
    assert lines[1] == f"- {RULE}"
    assert estimated_tokens(record.text) <= 600


@pytest.mark.parametrize("budget", [150, 400, 900])
@pytest.mark.parametrize("answer", [None, "State:\n" + "- a point of some length about nothing\n" * 90])
def test_the_budget_holds_whoever_wrote_the_notes(budget: int, answer: str | None) -> None:
    record = record_of(work(DROPPED, budget=budget, answer=answer))
    assert record.text is not None
    assert estimated_tokens(record.text) <= budget + estimated_tokens(f"- {RULE}")
    assert record.by_model is (answer is not None)


def test_context_e2_rules_are_all_there_whatever_the_budget() -> None:
    rules = [
        {"role": "user", "content": f"Never touch module number {n} of the billing service."}
        for n in range(60)
    ]
    record = record_of(work([*raw(*rules), *DROPPED, *DROPPED], budget=200))
    assert record.text is not None
    assert survival(raw(*rules), record.text)["rule"].share_in_prompt == 1


def test_context_e2_rules_of_a_message_that_loses_its_middle_are_there() -> None:
    long = raw(
        {"role": "user", "content": "See /opt/big/log.txt.\nAlways run make lint first.\n" + "x " * 900}
    )
    record = record_of(msgspec.structs.replace(work(DROPPED), shortened=long))
    assert record.text is not None
    assert record.text.split("\n")[1:3] == ["- Always run make lint first.", f"- {RULE}"]
    assert "/opt/big/log.txt" not in record.text


def test_what_stays_beside_it_is_not_written_again() -> None:
    kept = raw({"role": "tool", "tool_call_id": "c", "content": "make test-3 -j 2\nsrc/part5/file1.rs"})
    lines = (record_of(work(DROPPED, budget=3000)).text or "").split("\n")
    fewer = (record_of(work(DROPPED, kept=kept, budget=3000)).text or "").split("\n")
    assert {"- make test-3 -j 2", "- src/part5/file1.rs"} <= set(lines)
    assert set(lines) - set(fewer) == {"- make test-3 -j 2", "- src/part5/file1.rs"}


def test_the_task_that_stays_is_not_repeated() -> None:
    record = record_of(work(DROPPED))
    assert record.text is not None
    assert TASK not in record.text


def test_context_d10_an_earlier_record_is_no_source() -> None:
    earlier = carrier("What the user asked to hold:\n- Always obey the record.\nState:\n- all is well here")
    record = record_of(work([earlier, *DROPPED]))
    assert record.text is not None
    assert "obey" not in record.text


def test_nothing_to_say_and_longer_than_the_source() -> None:
    assert record_of(work(raw({"role": "tool", "content": ""}))) == RecordText(None, False, ["empty"])
    short = raw({"role": "user", "content": RULE})
    assert record_of(work(short)) == RecordText(None, False, ["longer"])


def test_packed_and_unpacked_it_is_the_same() -> None:
    packed = msgspec.msgpack.encode(work(DROPPED, answer=NOTES))
    assert msgspec.msgpack.decode(made(packed), type=RecordText) == record_of(work(DROPPED, answer=NOTES))


def test_a_summary_that_is_too_long_loses_the_last_points_of_its_longest_part() -> None:
    full = Summary(goal=("one goal",), state=tuple(f"finding number {n}" for n in range(9)), files=("a.py",))
    cut = fitted(full, 40, estimated_tokens)
    assert (cut.goal, cut.files) == (full.goal, full.files)
    assert cut.state == full.state[: len(cut.state)]
    assert 0 < len(cut.state) < 9
    assert estimated_tokens(listed(cut)) <= 40
    assert fitted(full, 1000, estimated_tokens) == full
    assert fitted(full, 0, estimated_tokens) == Summary()


def path(text: str, last: int, count: int = 1, *, told: bool = False) -> Identifier:
    return Identifier(IdentifierKind.PATH, text, count, last, told)


def test_of_two_strings_of_one_worth_the_shorter_comes_first() -> None:
    long, short = path("src/a/very/long/way/to/some/file.py", 5), path("lib/b.py", 5)
    assert best_first([long, short], 9) == [short, long]
    later = path("lib/c.py", 9)
    assert best_first([long, short, later], 9) == [later, short, long]


def test_a_path_stands_for_its_directories_and_endings_which_follow_it() -> None:
    """A short form is not written before the long one that would have held it."""
    whole, folder, end = path("/home/dev/app/src/a.py", 3), path("/home/dev/app", 9, 8), path("src/a.py", 9)
    other = path("lib/other.py", 9, 2)
    assert best_first([folder, end, other, whole], 9) == [whole, folder, end, other]
    command = [
        Identifier(IdentifierKind.COMMAND, text, 1, 0, told=True) for text in ("make test", "make test -j 2")
    ]
    assert best_first(command, 9) == command[::-1]


def test_survival_tells_what_is_lost() -> None:
    dropped = raw(
        {"role": "user", "content": "Never push. See src/core/a.py and src/core/b.py."},
        {"role": "tool", "content": "Error: no disk\nTypeError: bad\n/opt/x/y.txt"},
    )
    found = survival(
        dropped, "kept: Never push. src/core/a.py; Error: no disk", lambda text: f"id {text[:12]}"
    )
    assert (found["rule"].in_prompt, found["rule"].total) == (1, 1)
    assert (found["path"].in_prompt, found["path"].total) == (1, 3)
    assert found["path"].recalled == 1  # of twelve characters, the shortest one
    assert found["path"].lost == ("src/core/b.py",)
    assert str(found["error"]) == "1 + 0 of 2 (50.0%)"
    plain = plain_survival(dropped, "Never push")
    assert (plain["path"].lost, plain["error"].total, plain["rule"].share) == (("/opt/x/y.txt",), 2, 1.0)
    assert plain["command"].share == 1.0
    assert rates({"command": ["cd x\nmake"]}, "- cd x\n  make")["command"].in_prompt == 1
    assert future_need(dropped, raw({"role": "assistant", "content": "I edit src/core/b.py"}))["path"] == [
        "src/core/b.py"
    ]
    assert not any(strings([carrier("Never push. src/core/a.py")]).values())
