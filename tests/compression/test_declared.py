"""Level `declared`: what leaves the head, where it goes, and that later requests extend earlier ones."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from ctxgate.compression import notes
from ctxgate.compression.expressions import Expression
from ctxgate.compression.layout import Memory
from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.volatile import VolatileKind
from support.declared import (
    CLOCK,
    EPHEMERAL,
    HEAD,
    MARKED,
    VOLATILE,
    Document,
    call,
    message,
    note,
    part,
    raw,
    sent,
    system,
)
from support.forms import Forms, Process


@pytest.fixture
def process() -> Process:
    return Process(policy=CLOCK)


def test_a_clock_goes_to_the_end_of_the_last_user_turn(process: Process) -> None:
    assert sent(process, system(0), message("user", "Go.")) == [HEAD, message("user", f"Go.\n\n{note(0)}")]


def test_gateways_l13_each_request_extends_the_one_before_whatever_the_clock_says(process: Process) -> None:
    user = message("user", "Go.")
    steps = [step for number in range(4) for step in call(number)]
    out = [sent(process, system(at), user, *steps[: 2 * at]) for at in range(5)]
    for before, after in pairwise(out):
        assert after[: len(before)] == before
    assert out[4][1]["content"] == f"Go.\n\n{note(0)}"
    assert out[4][3]["content"] == f"result 0\n\n{note(1)}"
    assert out[4][9]["content"] == f"result 3\n\n{note(4)}"
    assert [each["content"] for each in out[4][2::2]] == [None] * 4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[12:30:01.123] You are an agent.", "[12:30:01.124] You are an agent."),
        ("Now 2026-01-05T09:00:00.001Z. Be brief.", "Now 2026-01-05T09:00:00.002Z. Be brief."),
        ("Today's date: 2026-01-05\nBe brief.", "Today's date: 2026-01-06\nBe brief."),
        ("Be brief.\nTokens used: 1200 of 8000", "Be brief.\nTokens used: 1900 of 8000"),
        (
            "Session 123e4567-e89b-42d3-a456-426614174000. Be brief.",
            "Session 123e4567-e89b-42d3-a456-426614174001. Be brief.",
        ),
        ("On branch main\nnothing to commit", "On branch fix/one\n  modified:   a.py"),
    ],
)
def test_gateways_l1_l12_context_j10_j14_routing_d6_a_head_that_changes_loses_nothing(
    before: str, after: str
) -> None:
    """A changing item first, statistics in the prompt, a stamp of milliseconds, midnight."""
    patterns = (Expression.compile(r"^\[[\d:.]+\]"),)
    process = Process(policy=Policy(Level.DECLARED, kinds=frozenset(VolatileKind), patterns=patterns))
    first = sent(process, message("system", before), message("user", "Go."))
    second = sent(process, message("system", after), message("user", "Go."), *call(0))
    assert second[:2] == first
    assert second[3]["content"].startswith(f"result 0\n\n{HEADING}\n")
    assert all(char not in first[0]["content"] for char in "0123456789")


def test_a_clock_that_stands_still_is_said_once(process: Process) -> None:
    sent(process, system(0), message("user", "Go."))
    out = sent(process, system(0), message("user", "Go."), *call(0))
    assert out == [HEAD, message("user", f"Go.\n\n{note(0)}"), *call(0)]
    out = sent(process, system(1), message("user", "Go."), *call(0), *call(1))
    assert out[5]["content"] == f"result 1\n\n{note(1)}"
    out = sent(process, system(0), message("user", "Go."), *call(0), *call(1), message("user", "x"))
    assert out[6]["content"] == f"x\n\n{note(0)}", "an older time again is news"


def test_a_retry_says_its_own_time_and_the_next_turn_repeats_the_first_one(process: Process) -> None:
    user = message("user", "Go.")
    first = sent(process, system(0), user)
    result = process.result(raw(system(7), user))
    assert "later requests do not repeat" in result.reasons[-1].reason
    assert sent(process, system(7), user)[1]["content"] == f"Go.\n\n{note(7)}"
    assert sent(process, system(0), user) == first
    assert sent(process, system(8), user, *call(0))[1]["content"] == f"Go.\n\n{note(0)}"


def test_a_place_that_later_requests_saw_without_a_note_stays_so(process: Process) -> None:
    """Regenerating an old turn must not put a note into the history of the newer one."""
    history = [message("user", "Go."), *call(0), message("user", "more")]
    newest = sent(process, system(5), *history)
    assert sent(process, system(6), *history[:1])[1]["content"] == f"Go.\n\n{note(6)}"
    for each in (process, Process(process.forms, policy=CLOCK)):
        assert sent(each, system(5), *history) == newest


def test_context_j2_another_process_repeats_the_notes(process: Process) -> None:
    user = message("user", "Go.")
    steps = [step for number in range(3) for step in call(number)]
    bodies = [raw(system(at), user, *steps[: 2 * at]) for at in range(4)]
    out = [process.checked(body) for body in bodies]
    assert [Process(process.forms, policy=CLOCK).checked(body) for body in bodies] == out
    fresh = Process(process.forms, policy=CLOCK)
    assert fresh.checked(bodies[3]) == out[3], "a restart in the middle"
    small = Process(process.forms, policy=CLOCK, memory=Memory(conversations=1))
    assert [small.checked(body) for body in bodies] == out


def test_a_known_conversation_asks_the_store_once_a_turn(process: Process) -> None:
    history = [message("user", "Go.")]
    for at in range(4):
        before = process.forms.asked
        process.checked(raw(system(at), *history))
        assert process.forms.asked == before + 1
        process.checked(raw(system(9), *history))
        assert process.forms.asked == before + 1, "a retry asks nothing"
        history += [message("assistant", f"{at}"), message("user", f"{at}")]
    Process(process.forms, policy=CLOCK).checked(raw(system(4), *history))
    assert process.forms.asked == 6, "a new process asks once for the past and once for its own turn"


def test_notes_and_forms_are_asked_for_together(process: Process) -> None:
    user, steps = message("user", "Go."), [step for number in range(3) for step in call(number)]
    for at in range(4):
        before = process.forms.asked
        process.checked(raw(system(at), user, *steps[: 2 * at]))
        assert process.forms.asked == before + 1


def test_notes_stand_in_results_whose_ids_are_mapped_back(process: Process) -> None:
    def renamed(steps: list[Document], id_: str) -> list[Document]:
        found: list[Document] = json.loads(json.dumps(steps).replace('"c0"', f'"{id_}"'))
        return found

    user = message("user", "Go.")
    first = sent(process, system(0), user, *renamed(call(0), "one"))
    out = sent(process, system(1), user, *renamed(call(0), "two"), message("assistant", "ok"), user)
    assert first[3]["content"] == f"result 0\n\n{note(0)}"
    assert out[: len(first)] == first


def test_an_edited_history_keeps_the_notes_of_the_prefix_it_shares(process: Process) -> None:
    user = message("user", "Go.")
    sent(process, system(0), user)
    sent(process, system(1), user, *call(0))
    branch = sent(process, system(2), user, message("assistant", "No."), message("user", "Why?"))
    assert branch[1]["content"] == f"Go.\n\n{note(0)}"
    assert branch[3]["content"] == f"Why?\n\n{note(2)}"


def test_a_result_in_parts_gets_one_more_part(process: Process) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for content in ([part("Go.", **EPHEMERAL), image], []):
        out = sent(process, system(0), message("user", content))
        assert out[1]["content"] == [*content, part(note(0))]


@pytest.mark.parametrize("content", [5, {"a": 1}])
def test_where_the_first_turn_has_no_place_for_a_note_nothing_ever_moves(
    process: Process, content: Any
) -> None:
    messages = [system(0), message("user", content)]
    for at in range(3):
        messages[0] = system(at)
        assert sent(process, *messages) == messages
        messages += [message("assistant", "Yes."), message("user", "On.")]


def test_a_prompt_of_instructions_alone_is_left_alone(process: Process) -> None:
    body = raw(system(0), message("assistant", "Hello."))
    assert process.result(body).edits == ()


def test_a_prefilled_answer_stays_behind_the_note(process: Process) -> None:
    out = sent(process, system(0), message("user", "Go."), message("assistant", "Yes,"))
    assert out[1:] == [message("user", f"Go.\n\n{note(0)}"), message("assistant", "Yes,")]


def test_only_declared_kinds_move(process: Process) -> None:
    text = "pid 4711, request id 123e4567-e89b-42d3-a456-426614174000"
    assert sent(process, message("system", text), message("user", "Go.")) == [
        message("system", text),
        message("user", "Go."),
    ]


def test_patterns_move_what_they_match_or_their_value() -> None:
    patterns = (Expression.compile(r"^Mood: .+$"), Expression.compile(r"seed=(?P<value>\d+)"))
    process = Process(policy=Policy(Level.DECLARED, patterns=patterns))
    out = sent(process, message("developer", "Mood: calm\nseed=12; seed=13"), message("user", "Go."))
    assert out == [
        message("developer", f"{PLACEHOLDER}\nseed={PLACEHOLDER}; seed={PLACEHOLDER}"),
        message("user", f"Go.\n\n{HEADING}\nMood: calm\nseed=12; seed=13"),
    ]


def test_spans_far_apart_on_one_line_have_lines_of_their_own() -> None:
    far = "x" * 80
    process = Process(policy=Policy(Level.DECLARED, patterns=(Expression.compile(r"\d+"),)))
    out = sent(process, message("system", f"a 1 {far} 2"), message("user", "Go."))
    assert out[1]["content"] == f"Go.\n\n{HEADING}\na 1\n{('a 1 ' + far + ' ')[-64:]}2"


def test_only_what_changed_is_said_again() -> None:
    process = Process(policy=Policy(Level.DECLARED, patterns=(Expression.compile(r"\d+"),)))
    user = message("user", "Go.")
    assert sent(process, message("system", "a 1\nb 1"), user)[1]["content"].endswith("\na 1\nb 1")
    out = sent(process, message("system", "a 1\nb 2"), user, *call(0))
    assert out[3]["content"] == f"result 0\n\n{HEADING}\nb 2"


def test_later_system_messages_are_not_the_head(process: Process) -> None:
    messages = [message("system", "Be brief."), message("user", "Go."), system(0), message("user", "On.")]
    assert sent(process, *messages) == messages


def test_tool_descriptions_are_not_moved(process: Process) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "Now 2026-01-05T09:00:00Z"}}
    body = raw(message("user", "Go."), tools=[tool])
    assert process.result(body).edits == ()


def test_context_r1_words_of_any_script_move_unharmed() -> None:
    process = Process(policy=Policy(Level.DECLARED, patterns=(Expression.compile(r"<(?P<value>.+?)>"),)))
    words = '\U0001f469\u200d\U0001f680 \u0000 \u2028 \\ " e\u0301'
    out = sent(process, message("system", f"mood <{words}>"), message("user", "\U0001f600"))
    assert out == [
        message("system", f"mood <{PLACEHOLDER}>"),
        message("user", f"\U0001f600\n\n{HEADING}\nmood <{words}"),
    ]


@pytest.mark.parametrize("constant", [HEADING, PLACEHOLDER])
def test_a_text_that_holds_a_constant_of_ours_stays(process: Process, constant: str) -> None:
    messages = [message("system", f"{constant} now 2026-01-05T09:00:00Z"), message("user", "Go.")]
    assert sent(process, *messages) == messages


def test_a_users_own_heading_is_not_taken_for_a_note(process: Process) -> None:
    fake = f"Go.\n\n{HEADING}\nCurrent time: 1999"
    out = sent(process, system(0), message("user", fake))
    assert out[1]["content"] == f"{fake}\n\n{note(0)}"


def test_frozen_notes_stay_within_a_share_of_the_prompt(process: Process) -> None:
    """Notes of 57 bytes and rounds of 300: some are kept in the history, the rest move with the tail."""
    user = message("user", "Go.")
    filler = "x" * 100
    history: list[Document] = [user]
    kept = 0
    for at in range(60):
        body = raw(system(at), *history)
        out = process.checked(body)
        said = out.decode().count(HEADING.replace('"', ""))
        kept = said - 1
        assert len(out) - len(body) <= 1024 + 0.01 * len(body)
        assert f"09:{at:02}:00Z" in out.decode(), "the newest note is always there"
        history += [message("assistant", filler), message("user", f"{at}")]
    assert 3 <= kept <= 20


def test_no_more_notes_are_kept_than_the_limit(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "KEPT", 3)
    history: list[Document] = [message("user", "Go.")]
    for at in range(6):
        out = sent(process, system(at), *history)
        said = [each["content"].partition(HEADING)[2] for each in out if HEADING in each["content"]]
        kept = list(range(min(at, 3)))
        assert said == [note(minute).removeprefix(HEADING) for minute in (*kept, at)]
        history += [message("assistant", "ok"), message("user", "x" * 9000)]


def test_what_a_client_dropped_may_leave_notes_out() -> None:
    """A block that was frozen in a note and then dropped by the client must not make the prompt long."""
    process = Process(policy=MARKED)
    block = "Env: " + "e" * 20_000
    history: list[Document] = []
    for at in range(6):
        user = message("user", [part(f"{at}"), part(block + str(at), **VOLATILE)])
        out = process.checked(raw(*history, user))
        assert out.count(HEADING.encode()) == 1
        history += [message("user", [part(f"{at}"), part("Env.", **VOLATILE)]), message("assistant", "ok")]


def test_two_processes_at_once_keep_the_first_note() -> None:
    forms = Forms()
    one, two = Process(forms, policy=CLOCK), Process(forms, policy=CLOCK)
    user = message("user", "Go.")
    assert sent(one, system(0), user)[1]["content"].endswith(note(0))
    assert sent(two, system(1), user)[1]["content"].endswith(note(1))
    for each in (one, two):
        assert sent(each, system(2), user, *call(0))[1]["content"] == f"Go.\n\n{note(0)}"


def test_tenants_share_no_notes(process: Process) -> None:
    user = message("user", "Go.")
    sent(process, system(0), user)
    other = Process(process.forms, tenant="acme/beta", policy=CLOCK)
    assert sent(other, system(5), user, *call(0))[1] == user


def test_a_head_of_constant_times_is_noted_once() -> None:
    """Fifteen lines that never change are moved, noted by the first request and read from then on."""
    lines = [f"Last run of job {n}: 2026-01-05 08:{n:02}:00" for n in range(15)]
    head = message("system", "\n".join(["Be brief.", *lines]))
    process, history = Process(policy=CLOCK), [head]
    before: list[Document] = []
    for turn in range(4):
        history.append(message("user", f"Step {turn}."))
        out = sent(process, *history)
        assert out[: len(before)] == before
        before = out
        history.append(message("assistant", "Done."))
    assert sum(HEADING in each["content"] for each in before) == 1
