"""Where notes go when the end of a prompt is an odd one: nothing is taken back, and no fact is lost."""

from __future__ import annotations

from typing import Any

import pytest

from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.notes import Place, place_of
from support.declared import CLOCK, HEAD, VOLATILE, Document, call, message, note, raw, sent, system
from support.forms import Forms, Process

GO = message("user", "Go.")
NOTED = message("user", f"Go.\n\n{note(0)}")
TWO: list[Document] = [
    message(
        "assistant",
        None,
        tool_calls=[
            {"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}}
            for id_ in ("a", "b")
        ],
    ),
    message("tool", "one", tool_call_id="a"),
    message("tool", "two", tool_call_id="b"),
]


@pytest.fixture
def process() -> Process:
    return Process(policy=CLOCK)


@pytest.mark.parametrize("content", [{"content": None}, {}])
@pytest.mark.parametrize("role", [{"role": "user"}, {"role": "tool", "tool_call_id": "c0"}])
def test_a_message_without_content_takes_the_note_as_its_content(
    process: Process, content: Document, role: Document
) -> None:
    """vLLM reads null as no text at all, so that the note is all it reads."""
    empty = role | content
    history = [GO, *(call(0)[:1] if role["role"] == "tool" else [message("assistant", "Yes.")])]
    assert sent(process, system(0), GO) == [HEAD, NOTED]
    first = sent(process, system(1), *history, empty)
    assert first[:-1] == [HEAD, NOTED, *history[1:]]
    assert first[-1] == role | {"content": note(1)}
    second = sent(process, system(2), *history, empty, *call(1))
    assert second[: len(first)] == first
    assert second[-1]["content"] == f"result 1\n\n{note(2)}"


def test_the_first_user_message_may_be_the_empty_one(process: Process) -> None:
    empty = message("user", None)
    assert sent(process, system(0), empty) == [HEAD, message("user", note(0))]
    assert sent(process, system(1), empty, *call(0))[:2] == [HEAD, message("user", note(0))]


@pytest.mark.parametrize(
    "last",
    [
        message("function", "result", name="f"),
        message("system", "Be quick."),
        message("developer", "Be quick."),
        message("critic", "?"),
    ],
)
def test_what_changes_in_a_turn_that_takes_no_note_waits_for_the_next(
    process: Process, last: Document
) -> None:
    """The head stays moved; the model reads what was true one turn ago, as it did then."""
    assert sent(process, system(0), GO) == [HEAD, NOTED]
    history = [GO, message("assistant", "Yes."), last]
    result = process.result(raw(system(1), *history))
    assert [passage.waits for passage in result.moved] == [True]
    assert "wait for the next turn" in result.reasons[0].reason
    waited = sent(process, system(1), *history)
    assert waited == [HEAD, NOTED, *history[1:]]
    history += [message("assistant", "Done."), message("user", "On.")]
    later = sent(process, system(2), *history)
    assert later[: len(waited)] == waited
    assert later[-1]["content"] == f"On.\n\n{note(2)}"


def test_a_turn_that_takes_no_note_and_changes_nothing_waits_for_nothing(process: Process) -> None:
    sent(process, system(0), GO)
    last = message("system", "Be quick.")
    result = process.result(raw(system(0), GO, message("assistant", "Yes."), last))
    assert [passage.waits for passage in result.moved] == [False]


def test_what_no_note_has_said_yet_goes_to_the_last_message_that_takes_one() -> None:
    """A conversation that began elsewhere, or a marked text in a message that is no user's: never lost."""
    process = Process(policy=CLOCK)
    history = [GO, message("assistant", "Yes."), message("function", "1", name="f")]
    assert sent(process, system(0), *history) == [HEAD, NOTED, *history[1:]]
    history += [message("assistant", "Yes."), message("user", "On.")]
    assert sent(process, system(0), *history)[-1]["content"] == f"On.\n\n{note(0)}"

    process = Process(policy=CLOCK)
    sent(process, system(0), GO)
    marked = message("system", "Env: x", **VOLATILE)
    out = sent(process, system(1), GO, message("assistant", "Yes."), marked)
    assert out[1]["content"] == f"Go.\n\n{note(0)}\nEnv: x"
    assert out[3]["content"] == PLACEHOLDER
    out = sent(process, system(1), GO, message("assistant", "Yes."), marked, message("user", "On."))
    assert out[1] == NOTED
    assert out[4]["content"] == f"On.\n\n{note(1)}\nEnv: x"


@pytest.mark.parametrize("restarts", [False, True])
def test_results_of_one_batch_that_come_one_by_one_keep_their_notes(restarts: bool) -> None:
    forms = Forms()
    process = Process(forms, policy=CLOCK)
    requests = [[GO], [GO, *TWO[:2]], [GO, *TWO], [GO, *TWO, message("assistant", "Done."), GO]]
    before: list[Document] = []
    for minute, each in enumerate(requests):
        out = sent(Process(forms, policy=CLOCK) if restarts else process, system(minute), *each)
        assert out[: len(before)] == before
        assert out[-1]["content"].endswith(f"\n\n{note(minute)}")
        before = out
    assert before[3]["content"] == f"one\n\n{note(1)}"


def test_results_of_one_batch_that_come_together_have_one_note(process: Process) -> None:
    sent(process, system(0), GO)
    out = sent(process, system(1), GO, *TWO)
    assert [each["content"] for each in out[2:]] == [None, "one", f"two\n\n{note(1)}"]


def test_a_note_stays_as_it_was_where_something_else_came_behind_its_message(process: Process) -> None:
    """A batch whose first result was sent, and then a message that takes no note."""
    late = message("system", "Be quick.")
    first = sent(process, system(0), GO, *TWO[:2])
    waited = sent(process, system(1), GO, *TWO[:2], late)
    assert waited == [*first, late]
    fresh = Process(policy=CLOCK)
    assert sent(fresh, system(1), GO, *TWO[:2], late)[-2:] == [
        message("tool", f"one\n\n{note(1)}", tool_call_id="a"),
        late,
    ]


def test_a_result_that_had_no_note_gets_none_later(process: Process) -> None:
    late = message("system", "Be quick.")
    sent(process, system(0), GO)
    first = sent(process, system(0), GO, *TWO[:2])
    assert HEADING not in first[-1]["content"]
    assert sent(process, system(1), GO, *TWO[:2], late) == [*first, late]


@pytest.mark.parametrize(
    ("roles", "place"),
    [
        ("su", Place(1, 1)),
        ("suatt", Place(4, 4)),
        ("suats", Place(3, 3, ends=False)),
        ("suasu", Place(4, 4)),
        ("suaus", Place(3, 3, ends=False)),
        ("sua", Place(1, 1)),  # an answer that the client has begun
        ("suaa", Place(1, 1)),
        ("suas", Place(None, 1)),
        ("suafa", Place(None, 1)),
        ("suaT", Place(None, 1)),
        ("suatT", Place(3, 3, ends=False)),
        ("sUau", None),
        ("sa", None),
        ("s", None),
    ],
)
def test_the_place_of_a_note(roles: str, place: Place | None) -> None:
    """Roles by their first letter; a message in capitals has no place for a note."""
    names: dict[str, Any] = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "f": "function"}
    process = Process()
    facts = process.memory.views.messages("t", [b'{"role":"%s"}' % names[x].encode() for x in roles.lower()])
    assert place_of(facts, lambda at: roles[at].islower()) == place
