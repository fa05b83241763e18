"""The checker of moved text: it undoes the moves from the bytes, and believes nothing it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.compression.layout import Memory, look
from ctxgate.compression.moved import HEADING, PLACEHOLDER, Passage
from ctxgate.compression.reverting import Reverting, Side
from ctxgate.compression.validity import Invalid, check_same
from ctxgate.inference import wire
from support.forms import TENANT

SYSTEM = {"role": "system", "content": "One\nTime: 10:00\nTwo"}
USER = {"role": "user", "content": "Go."}
MOVED = {"role": "system", "content": f"One\nTime: {PLACEHOLDER}\nTwo"}
NOTED = {"role": "user", "content": f"Go.\n\n{HEADING}\nTime: 10:00"}
CLOCK = (Passage(0, ("10:00",), "Time: 10:00"),)


def side(messages: list[Any]) -> Side:
    body = wire.parse(json.dumps({"messages": messages}).encode())
    items = body.items("messages")
    return Side(look(body, items, TENANT, Memory()), items)


def reason(
    before: list[Any], after: list[Any], moved: tuple[Passage, ...] = CLOCK, *, reordered: bool = False
) -> str | None:
    """Why an edited prompt is refused; asked twice, for what is remembered must not change it."""
    reverting = Reverting()
    found: set[str | None] = set()
    for _ in range(2):
        try:
            check_same(*reverting.revert(side(before), side(after), moved, reordered=reordered))
            found.add(None)
        except Invalid as invalid:
            found.add(invalid.reason)
    (one,) = found
    return one


def test_a_move_with_its_note_is_valid() -> None:
    assert reason([SYSTEM, USER], [MOVED, NOTED]) is None


@pytest.mark.parametrize(
    ("after", "moved", "expected"),
    [
        ([MOVED, USER], CLOCK, "words"),
        ([MOVED, NOTED], (), "messages"),
        ([SYSTEM, NOTED], CLOCK, "words"),
        ([MOVED, NOTED], (Passage(0, ("10:01",), "Time: 10:01"),), "words"),
        ([MOVED, NOTED], (Passage(0, ("10:00", "10:00"), ""),), "words"),
        ([MOVED, NOTED], (*CLOCK, Passage(1, ("Go.",), "")), "moved"),
        ([MOVED | {"content": f"One\nTime: {PLACEHOLDER}"}, NOTED], CLOCK, "messages"),
        ([MOVED | {"content": f"Two\nTime: {PLACEHOLDER}\nOne"}, NOTED], CLOCK, "messages"),
        ([MOVED | {"name": "x"}, NOTED], CLOCK, "messages"),
        ([MOVED | {"role": "developer"}, NOTED], CLOCK, "roles"),
        ([MOVED, NOTED | {"content": f"Go!\n\n{HEADING}\nTime: 10:00"}], CLOCK, "messages"),
        ([MOVED, NOTED | {"content": f"Go.\n{HEADING}\nTime: 10:00"}], CLOCK, "words"),
        ([MOVED, NOTED | {"content": f"Go.\n\n{HEADING}\nTime: 10:0"}], CLOCK, "words"),
        ([MOVED, NOTED | {"content": [{"type": "text", "text": "Go."}]}], CLOCK, "messages"),
        ([MOVED], CLOCK, "count"),
        ([NOTED, MOVED], CLOCK, "messages"),
    ],
)
def test_anything_else_is_refused(after: list[Any], moved: tuple[Passage, ...], expected: str) -> None:
    found = reason([SYSTEM, USER], after, moved)
    assert found is not None
    assert found == expected or {found, expected} <= {"messages", "words", "roles", "moved"}


def test_notes_stand_in_user_and_tool_messages_alone() -> None:
    answer = {"role": "assistant", "content": "Yes."}
    noted = answer | {"content": f"Yes.\n\n{HEADING}\nTime: 10:00"}
    assert reason([SYSTEM, USER, answer], [MOVED, USER, noted]) == "note"
    assert (
        reason([SYSTEM, USER], [MOVED | {"content": f"{MOVED['content']}\n\n{HEADING}\nTime: 10:00"}, USER])
        == "note"
    )
    result = {"role": "tool", "tool_call_id": "c", "content": "Go."}
    assert (
        reason([SYSTEM, USER, result], [MOVED, USER, NOTED | result | {"content": NOTED["content"]}]) is None
    )


@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_a_note_may_be_the_content_of_a_message_that_has_none(content: dict[str, Any]) -> None:
    empty, result = {"role": "user"} | content, {"role": "tool", "tool_call_id": "c"}
    note = f"{HEADING}\nTime: 10:00"
    assert reason([SYSTEM, empty], [MOVED, {"role": "user", "content": note}]) is None
    assert reason([SYSTEM, USER, result | content], [MOVED, USER, result | {"content": note}]) is None
    for wrong in (f"\n\n{note}", f"x\n\n{note}", "x", [{"type": "text", "text": note}], ""):
        assert reason([SYSTEM, empty], [MOVED, {"role": "user", "content": wrong}]) is not None
    assert reason([SYSTEM, USER], [MOVED, {"role": "user", "content": note}]) is not None


def test_what_waits_needs_a_note_of_an_earlier_turn_and_its_own_place() -> None:
    (passage,) = CLOCK
    late = (Passage(0, ("10:01",), "Time: 10:01").waiting(),)
    answer, last = {"role": "assistant", "content": "Yes."}, {"role": "system", "content": "Be quick."}
    before = [SYSTEM | {"content": "One\nTime: 10:01\nTwo"}, USER, answer, last]
    assert reason(before, [MOVED, NOTED, answer, last], late) is None
    assert reason(before, [MOVED, USER, answer, last], late) == "words"
    assert reason(before, [MOVED, NOTED, answer, last], (passage.waiting(),)) == "messages"


def test_text_of_other_messages_moves_only_where_the_client_marked_it() -> None:
    moved = (Passage(1, ("Go.",), "Go."),)
    gone = {"role": "user", "content": PLACEHOLDER}
    noted = {"role": "user", "content": f"On.\n\n{HEADING}\nGo."}
    last = {"role": "user", "content": "On."}
    before = [SYSTEM, USER, last]
    assert reason(before, [SYSTEM, gone, noted], moved) == "moved"
    marked = USER | {"ctxgate": {"stability": "volatile"}}
    assert reason([SYSTEM, marked, last], [SYSTEM, gone, noted], moved) is None


def test_marks_of_ours_never_go_upstream_with_an_edited_message() -> None:
    marked = SYSTEM | {"ctxgate": {"stability": "stable"}}
    assert reason([marked, USER], [SYSTEM, USER], ()) is None
    assert reason([marked, USER], [MOVED | {"ctxgate": {"stability": "stable"}}, NOTED]) == "marks"


def test_lines_of_the_head_may_change_places_where_that_is_allowed() -> None:
    turned = MOVED | {"content": f"Two\nOne\nTime: {PLACEHOLDER}"}
    assert reason([SYSTEM, USER], [turned, NOTED], reordered=True) is None
    assert reason([SYSTEM, USER], [turned, NOTED]) == "messages"
    doubled = MOVED | {"content": f"Two\nTwo\nTime: {PLACEHOLDER}"}
    assert reason([SYSTEM, USER], [doubled, NOTED], reordered=True) == "messages"
    assert reason([USER, USER], [USER | {"content": ".oG"}, USER], (), reordered=True) == "messages"


def test_a_clients_own_constants_are_its_own() -> None:
    fake = {"role": "user", "content": f"{PLACEHOLDER}\n\n{HEADING}\nx"}
    noted = {"role": "user", "content": f"{fake['content']}\n\n{HEADING}\nTime: 10:00"}
    assert reason([SYSTEM, fake], [MOVED, noted]) is None
    assert reason([SYSTEM, fake], [SYSTEM, USER], ()) == "messages"
