"""Level `learned`: what was seen to change leaves its place in later conversations, in all processes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from ctxgate.compression.layout import Memory
from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.volatile import VolatileKind
from support.forms import Forms, Process

LEARNED = Policy(level=Level.LEARNED)
AGENT = "You are an agent.\n\nRules: be brief."
MOVED = f"{AGENT}\nCurrent time: {PLACEHOLDER}"

Message = dict[str, Any]


def clock(number: int) -> str:
    return f"2025-06-01T10:{number // 60:02}:{number % 60:02}Z"


def timed(number: int) -> str:
    """A head whose last line is a clock."""
    return f"{AGENT}\nCurrent time: {clock(number)}"


def used_by(number: int, user: int) -> str:
    """The same with a line about its user before the rules."""
    return timed(number).replace("Rules", f"User: u{user}\n\nRules")


def remembering(number: int) -> str:
    """A head with a user's memory before the rules: as long as its user is old."""
    facts = "\n\n".join(f"Fact {number} {at}" for at in range(number % 3 + 1))
    return f"You are an agent.\n\n# Memory\n\n{facts}\n\n# Rules\n\nBe brief."


def body(head: Any, turn: int, task: str = "Go.", **more: Any) -> bytes:
    """Request `turn` of a conversation, which has so many answers."""
    messages: list[Message] = [{"role": "system", "content": head}, {"role": "user", "content": task}]
    for number in range(turn):
        messages += [
            {"role": "assistant", "content": f"{task} answer {number}"},
            {"role": "user", "content": f"more {number}"},
        ]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def head_of(raw: bytes) -> Any:
    return json.loads(raw)["messages"][0]["content"]


def extends(before: bytes, after: bytes) -> bool:
    """Whether the messages of a request are those of another one and more."""
    known = json.loads(before)["messages"]
    return bool(json.loads(after)["messages"][: len(known)] == known)


def play(process: Process, heads: list[Any], task: str, **more: Any) -> list[bytes]:
    """One conversation: its requests as they went out, each found valid."""
    return [process.checked(body(head, turn, task, **more)) for turn, head in enumerate(heads)]


def taught(forms: Forms | None = None, **more: Any) -> Process:
    """A process that has seen two conversations of three requests, with a clock."""
    process = Process(forms or Forms(), policy=LEARNED)
    for number in range(2):
        heads = [timed(10 * number + turn) for turn in range(3)]
        assert [head_of(raw) for raw in play(process, heads, f"Task {number}", **more)] == heads
    return process


@pytest.fixture
def process() -> Process:
    return taught()


def test_gateways_l13_a_clock_leaves_the_head_from_the_third_conversation_on(process: Process) -> None:
    out = play(process, [timed(30), timed(31), timed(32)], "Third")
    assert [head_of(raw) for raw in out] == [MOVED] * 3
    assert all(extends(*pair) for pair in pairwise(out))
    for number, raw in enumerate(out):
        assert json.loads(raw)["messages"][-1]["content"].endswith(
            f"\n\n{HEADING}\nCurrent time: {clock(30 + number)}"
        )
    again = play(process, [timed(40)], "Fourth")
    assert head_of(again[0]) == MOVED


def assert_learned(line: str, sent: str) -> None:
    """A first line that changes with each request leaves its place in the third conversation."""
    process = Process(policy=LEARNED)
    number = iter(range(100, 200))
    for task in ("one", "two"):
        play(process, [f"{line.format(next(number))}\n\n{AGENT}" for _ in range(3)], task)
    out = play(process, [f"{line.format(next(number))}\n\n{AGENT}" for _ in range(3)], "three")
    assert [head_of(raw) for raw in out] == [f"{sent}\n\n{AGENT}"] * 3
    assert all(extends(*pair) for pair in pairwise(out))


def test_routing_d9_a_billing_header_leaves_the_head() -> None:
    assert_learned("x-agent-billing-header: v=2; cch={}", f"x-agent-billing-header: {PLACEHOLDER}")


def test_context_j10_a_stamp_of_milliseconds_leaves_the_head() -> None:
    assert_learned("Now: 2025-06-01T10:00:00.{:03}Z", f"Now: {PLACEHOLDER}")


def test_gateways_l12_usage_statistics_leave_the_head() -> None:
    assert_learned("Context usage: {} tokens used", f"Context usage: {PLACEHOLDER}")


def test_what_no_detector_knows_leaves_the_head() -> None:
    assert_learned("Mood: calm {}", f"Mood: {PLACEHOLDER}")


def test_gateways_l1_what_changes_between_conversations_goes_behind_what_does_not() -> None:
    process = Process(policy=LEARNED)
    for number in (1, 2):
        heads = [remembering(number)] * 3
        assert [head_of(raw) for raw in play(process, heads, f"Task {number}")] == heads
    for number in (3, 4, 5):
        out = play(process, [remembering(number)] * 3, f"Task {number}")
        facts = "\n\n".join(f"Fact {number} {at}" for at in range(number % 3 + 1))
        expected = f"You are an agent.\n\n# Rules\n\nBe brief.\n\n# Memory\n\n{facts}"
        assert [head_of(raw) for raw in out] == [expected] * 3
        assert all(extends(*pair) for pair in pairwise(out))


def test_routing_d6_context_j14_a_date_that_is_new_each_day_goes_behind() -> None:
    """Conversations of one day each: the date does not change inside them."""
    process = Process(policy=LEARNED)
    for day in (1, 2):
        play(process, [f"Today's date: 2025-06-0{day}\n\n{AGENT}"] * 2, f"Task {day}")
    out = play(process, [f"Today's date: 2025-06-03\n\n{AGENT}"] * 2, "Task 3")
    assert [head_of(raw) for raw in out] == [f"{AGENT}\n\nToday's date: 2025-06-03"] * 2


def test_a_prompt_that_does_not_change_is_never_touched() -> None:
    process = Process(policy=LEARNED)
    for number in range(5):
        for turn in range(4):
            raw = body(AGENT, turn, f"Task {number}")
            assert process.result(raw).edits == ()


def test_one_edit_of_the_prompt_moves_nothing() -> None:
    process = Process(policy=LEARNED)
    for number, rules in enumerate(("brief", "brief", "kind", "kind", "kind")):
        head = f"Rules: be {rules}.\n\nYou are an agent."
        assert [head_of(raw) for raw in play(process, [head] * 2, f"Task {number}")] == [head] * 2


def test_the_second_request_claims_the_order_for_good(process: Process) -> None:
    """A new conversation that begins and goes on exactly like an old one is that one to every process."""
    out = play(process, [timed(60), timed(61)], "Task 1")  # which went on without an order
    assert [head_of(raw) for raw in out] == [MOVED, timed(61)]


def test_what_began_without_an_order_goes_on_without_it() -> None:
    process = Process(policy=LEARNED)
    play(process, [timed(1)], "Early")
    for number in range(2):
        play(process, [timed(10 * number + turn) for turn in (2, 3, 4)], f"Task {number}")
    assert head_of(process.checked(body(timed(30), 0, "Third"))) == MOVED
    out = [process.checked(body(timed(31 + turn), turn, "Early")) for turn in (1, 2, 3)]
    assert [head_of(raw) for raw in out] == [timed(32), timed(33), timed(34)]


def test_a_restart_in_the_middle_changes_nothing(process: Process) -> None:
    heads = [timed(30 + turn) for turn in range(4)]
    expected = [process.checked(body(head, turn, "Third")) for turn, head in enumerate(heads)]
    for turn, head in enumerate(heads):
        assert Process(process.forms, policy=LEARNED).checked(body(head, turn, "Third")) == expected[turn]
    small = Process(process.forms, policy=LEARNED, memory=Memory(conversations=1))
    assert [small.checked(body(head, turn, "Third")) for turn, head in enumerate(heads)] == expected


def test_a_process_that_has_seen_nothing_uses_the_adopted_order(process: Process) -> None:
    play(process, [timed(30)], "Third")
    other = Process(process.forms, policy=LEARNED)
    assert [head_of(raw) for raw in play(other, [timed(40), timed(41)], "Fourth")] == [MOVED] * 2


def test_the_order_claimed_first_counts() -> None:
    """Two processes have seen other things; the second takes the first one's order."""
    forms = Forms()
    one, two = taught(forms), Process(forms, policy=LEARNED)
    for number in (1, 2):
        play(two, [used_by(1, number)] * 2, f"Memory {number}")
    assert head_of(play(one, [timed(30)], "Third")[0]) == MOVED
    assert head_of(play(two, [used_by(1, 3)], "Memory 3")[0]) == used_by(1, 3).replace(clock(1), PLACEHOLDER)
    # What the second one knows makes the next order, after as many conversations as that takes.
    assert head_of(play(two, [used_by(1, 4)], "Memory 4")[0]) == used_by(1, 4).replace(clock(1), PLACEHOLDER)
    assert head_of(play(two, [used_by(1, 5)], "Memory 5")[0]) == f"{MOVED}\n\nUser: u5"


def test_a_later_order_is_for_later_conversations() -> None:
    """Version 2 adds the memory; the conversation under version 1 keeps version 1."""
    forms = Forms()
    process = taught(forms)
    began = process.checked(body(timed(30), 0, "Third"))

    for number in range(6):
        play(process, [used_by(40 + number, number)] * 2, f"User {number}")
    late = process.checked(body(used_by(60, 9), 0, "Last"))
    assert head_of(late) == f"{MOVED}\n\nUser: u9"
    went_on = process.checked(body(used_by(61, 9), 1, "Third"))
    assert head_of(went_on) == used_by(61, 9).replace(clock(61), PLACEHOLDER)
    assert head_of(began) == MOVED


def test_of_several_orders_used_with_one_beginning_the_newest_counts(process: Process) -> None:
    """Nothing in the two requests tells which of them a second request goes on from."""
    under_1 = process.checked(body(used_by(1, 0), 0, "Same"))
    for number in range(6):
        play(process, [used_by(40 + number, number)] * 2, f"User {number}")
    under_2 = process.checked(body(used_by(2, 9), 0, "Same"))
    went_on = process.checked(body(used_by(3, 9), 1, "Same"))
    assert head_of(under_1) == used_by(1, 0).replace(clock(1), PLACEHOLDER)
    assert head_of(under_2) == head_of(went_on) == f"{MOVED}\n\nUser: u9"


def test_a_conversation_from_elsewhere_is_left_alone(process: Process) -> None:
    play(process, [timed(30)], "Third")
    out = [process.checked(body(timed(40 + turn), turn, "Imported")) for turn in (3, 4)]
    assert [head_of(raw) for raw in out] == [timed(43), timed(44)]


def test_once_a_conversation_is_known_nothing_is_asked() -> None:
    process = Process(policy=LEARNED)
    asked = []
    for turn in range(4):
        before = process.forms.asked
        process.result(body(AGENT, turn))
        asked.append(process.forms.asked - before)
    # The newest order; what this conversation began with, and a claim of it; nothing any more.
    assert asked == [1, 2, 0, 0]
    fresh = Process(process.forms, policy=LEARNED)
    before = process.forms.asked
    fresh.result(body(AGENT, 4))
    assert process.forms.asked - before == 1


def test_a_store_that_was_replaced_knows_no_order(process: Process) -> None:
    assert [head_of(raw) for raw in play(process, [timed(30), timed(31)], "Third")] == [MOVED] * 2
    process.forms.by_key.clear()
    process.memory.learned.orders = type(process.memory.learned.orders)(10)
    assert head_of(process.checked(body(timed(32), 2, "Third"))) == timed(32)


def test_nothing_is_asked_without_a_head_or_without_a_conversation() -> None:
    process = Process(policy=LEARNED)
    for messages in ([{"role": "user", "content": "x"}], [{"role": "system", "content": "x"}]):
        assert process.result(json.dumps({"model": "m", "messages": messages}).encode()).edits == ()
    for head in (None, "", " \n", 5, {"a": 1}, [], [{"type": "image_url", "image_url": {"url": "x"}}]):
        assert process.result(body(head, 0)).edits == ()
    assert process.forms.asked == 0


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_gateways_l12_a_late_tool_does_not_change_the_order() -> None:
    tools = [tool("a"), tool("b")]
    process = taught(tools=tools)
    out = play(process, [timed(30), timed(31)], "Third", tools=tools)
    late = process.checked(body(timed(32), 2, "Third", tools=[*tools, tool("late")]))
    assert [head_of(raw) for raw in (*out, late)] == [MOVED] * 3
    assert extends(out[1], late)


def test_agents_with_other_tools_have_orders_of_their_own() -> None:
    process = taught(tools=[tool("a")])
    assert head_of(play(process, [timed(30)], "Third", tools=[tool("b")])[0]) == timed(30)
    assert head_of(play(process, [timed(31)], "Fourth", tools=[tool("a")])[0]) == MOVED


def test_agents_with_another_beginning_have_orders_of_their_own(process: Process) -> None:
    other = timed(30).replace("an agent", "another agent")
    assert head_of(play(process, [other], "Third")[0]) == other


def test_tenants_share_nothing(process: Process) -> None:
    play(process, [timed(30)], "Third")
    other = Process(process.forms, tenant="acme/beta", policy=LEARNED, memory=process.memory)
    assert head_of(play(other, [timed(40)], "Fourth")[0]) == timed(40)


@pytest.mark.parametrize(
    "mark", [{"ctxgate": {"stability": "stable"}}, {"cache_control": {"type": "ephemeral"}}]
)
def test_what_is_marked_stable_never_moves(mark: dict[str, Any]) -> None:
    process = Process(policy=LEARNED)
    for number in range(4):
        for turn in range(3):
            part = {"type": "text", "text": timed(10 * number + turn), **mark}
            rest = {"type": "text", "text": timed(100 + 10 * number + turn)}
            out = head_of(process.checked(body([part, rest], turn, f"Task {number}")))
            assert out[0]["text"] == part["text"]
            assert out[1]["text"] == (rest["text"] if number < 2 else MOVED)


def test_parts_are_texts_of_their_own() -> None:
    process = Process(policy=LEARNED)
    for number in range(4):
        for turn in range(2):
            line = f"Current time: {clock(10 * number + turn)}"
            parts = [{"type": "text", "text": AGENT}, {"type": "text", "text": line}]
            out = head_of(process.checked(body(parts, turn, f"Task {number}")))
            assert out[0] == parts[0]
            assert out[1]["text"] == (line if number < 2 else f"Current time: {PLACEHOLDER}")


def test_a_second_system_message_is_part_of_the_head() -> None:
    process = Process(policy=LEARNED)
    for number in range(3):
        for turn in range(2):
            document = json.loads(body(AGENT, turn, f"Task {number}"))
            line = f"Time: {clock(10 * number + turn)}"
            document["messages"].insert(1, {"role": "developer", "content": line})
            out = json.loads(process.checked(json.dumps(document).encode()))["messages"]
            assert out[0]["content"] == AGENT
            assert out[1]["content"] == (line if number < 2 else f"Time: {PLACEHOLDER}")


def test_a_text_that_holds_the_placeholder_is_left_alone() -> None:
    process = Process(policy=LEARNED)
    for number in range(4):
        heads = [f"{PLACEHOLDER}\n{timed(10 * number + turn)}" for turn in range(2)]
        assert [head_of(raw) for raw in play(process, heads, f"Task {number}")] == heads


def test_what_is_declared_is_taken_first_and_what_remains_is_learned() -> None:
    """The clock is declared, the mood and the user are learned; all words come back at the tail in order."""
    process = Process(policy=Policy(level=Level.LEARNED, kinds=frozenset({VolatileKind.CLOCK})))

    def head(number: int, user: int) -> str:
        about = f"Mood: m{number}\n\nUser: u{user}, since {clock(user)}"
        return f"Hi.\n\n{about}\n\nRules: be brief.\nNow: {clock(number)}"

    for user in range(2):
        play(process, [head(10 * user + turn, user) for turn in range(2)], f"Task {user}")
    out = play(process, [head(30 + turn, 7) for turn in range(2)], "Third")
    about = f"User: u7, since {PLACEHOLDER}"
    expected = f"Hi.\n\nMood: {PLACEHOLDER}\n\nRules: be brief.\nNow: {PLACEHOLDER}\n\n{about}"
    assert [head_of(raw) for raw in out] == [expected] * 2
    note = json.loads(out[0])["messages"][1]["content"].partition(HEADING)[2]
    assert note.splitlines()[1:] == [
        "Mood: m30",
        f"Now: {clock(30)}",
        f"User: u7, since {clock(7)}",
    ]
    assert extends(*out)


def test_examples_that_a_client_sends_along_pin_the_order(process: Process) -> None:
    """Assistant messages from the start: all conversations share them, and none ever changes its order."""
    play(process, [timed(30)], "Third")
    examples = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    for number in range(4):
        for turn in range(3):
            document = json.loads(body(timed(10 * number + turn), turn, f"Task {number}"))
            document["messages"][1:1] = examples
            raw = json.dumps(document).encode()
            assert process.checked(raw) == raw


def test_each_move_is_told(process: Process) -> None:
    result = process.result(body(timed(30), 0, "Third"))
    assert [(each.field, each.reason) for each in result.reasons[:1]] == [
        ("messages[0]", "blocks that change within conversations moved to the note: 1")
    ]
    other = Process(policy=LEARNED)
    for number in (1, 2):
        play(other, [remembering(number)], f"Task {number}")
    result = other.result(body(remembering(3), 0, "Task 3"))
    assert [(each.field, each.reason) for each in result.reasons] == [
        ("messages[0]", "blocks that change between conversations moved behind the others: 2")
    ]
