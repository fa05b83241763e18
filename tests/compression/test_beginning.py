"""A conversation's beginning has one name in all its turns, and another conversation's has another one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression import beginning
from ctxgate.compression.beginning import Beginnings
from ctxgate.compression.expressions import Expression
from support.declared import EPHEMERAL, STABLE, VOLATILE, Document, message, part, raw
from support.seeds import printed

OWNER = "acme/alpha"


def items(*messages: Document) -> list[msgspec.Raw]:
    return [msgspec.Raw(json.dumps(each).encode()) for each in messages]


def name(*messages: Document, owner: str = OWNER, patterns: tuple[Expression, ...] = ()) -> bytes:
    """The name of a prompt, by a process that knows nothing."""
    return Beginnings().of_messages(owner, items(*messages), patterns)


GO = message("user", "Go.")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Now 2026-01-05T09:59:59Z. Be brief.", "Now 2026-01-05T10:00:00.5Z. Be brief."),
        ("Current time: 9:59 AM\nBe brief.", "Current time: 10:00 AM\nBe brief."),
        ("Today's date: 2026-01-05", "Today's date: 2026-01-06"),
        ("id 123e4567-e89b-42d3-a456-426614174000", "id 123e4567-e89b-42d3-a456-426614174001"),
        ("Step 3. Be brief.", "Step 17. Be brief."),
        ("Be brief.\nTokens used: 1200 of 8000", "Be brief.\nTokens used: 900 of 8000"),
        ("In /tmp/run-4711 as pid 4711", "In /tmp/run-4712 as pid 99"),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_volatile_spans_of_the_head_do_not_count(role: str, before: str, after: str) -> None:
    one, two = message(role, before), message(role, after)
    assert name(one, GO) == name(two, GO)
    assert name(message("system", "First."), one, GO) == name(message("system", "First."), two, GO)
    parts = [[part("First."), part(text, **EPHEMERAL)] for text in (before, after)]
    assert name(message(role, parts[0]), GO) == name(message(role, parts[1]), GO)


def test_what_a_team_declares_volatile_does_not_count_either() -> None:
    pattern = Expression.compile(r"mood (?P<value>\S+)")
    heads = [message("system", f"Be brief; mood {mood}.") for mood in ("calm", "sour")]
    assert name(heads[0], GO) != name(heads[1], GO)
    assert name(heads[0], GO, patterns=(pattern,)) == name(heads[1], GO, patterns=(pattern,))


def test_what_a_client_marks_volatile_does_not_count_wherever_it_stands() -> None:
    for one, two in (("a", "b"), ("", "c")):
        assert name(message("system", one, **VOLATILE), GO) == name(message("system", two, **VOLATILE), GO)
        users = [message("user", [part(text, **VOLATILE), part("Go.")]) for text in (one, two)]
        assert name(users[0]) == name(users[1])
    assert name(message("system", "a", **STABLE), GO) != name(message("system", "b", **STABLE), GO)
    wrong = {"ctxgate": {"stability": "voltaile"}}
    assert name(message("system", "a", **wrong), GO) == name(message("system", "a"), GO)


def test_cache_marks_and_spelling_do_not_count() -> None:
    plain = name(message("system", [part("Be brief.")]), message("user", [part("Go.")]))
    assert plain == name(message("system", [part("Be brief.", **EPHEMERAL)]), message("user", [part("Go.")]))
    assert plain == name(message("system", [part("Be brief.")]), message("user", [part("Go.", **EPHEMERAL)]))
    spelled = [
        b'{ "content":[{"text":"Be\\u0020brief.","type":"text"}],"role":"system"}',
        b'{"content": [{"type":"text","text":"Go."}], "role": "user"}',
    ]
    assert Beginnings().of_messages(OWNER, [*map(msgspec.Raw, spelled)]) == plain


def test_conversations_of_one_head_differ_by_their_first_user_message() -> None:
    head = message("system", "Now 2026-01-05T09:00:00Z")
    said = ["Go.", "Stop.", "", "It is 2026-01-05T09:00:00Z", "It is 2026-01-05T09:01:00Z"]
    assert len({name(head, message("user", text)) for text in said}) == len(said)
    assert name(head, GO) != name(GO)
    assert name(head, GO) != name(head, GO, owner="acme/beta")
    later = [message("assistant", "2026-01-05T09:00:00Z"), message("user", "On.")]
    assert name(head, GO, *later) == name(head, GO)


def test_other_words_beside_a_clock_count() -> None:
    heads = ["Be brief. Now {}", "Be kind. Now {}", "Now {}", "{} Now", "ticket 17 {}", "ticket 18 {}"]
    names = [name(message("system", text.format("2026-01-05T09:00:00Z")), GO) for text in heads]
    assert len(set(names)) == len(heads)


def test_messages_between_the_head_and_the_user_count_as_they_are() -> None:
    said = [message("assistant", f"It is 2026-01-05T09:0{minute}:00Z") for minute in range(2)]
    late = [message("system", each["content"]) for each in said]
    assert name(said[0], GO) != name(said[1], GO)
    assert name(said[0], late[0], GO) != name(said[0], late[1], GO)
    assert name(late[0], said[0], GO) == name(late[1], said[0], GO)


def test_text_behind_the_part_that_is_searched_counts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginning, "SEARCHED", 2**10)
    heads = ["x " * 2**9 + f"\n\nNow 2026-01-05T09:0{minute}:00Z" for minute in range(2)]
    assert name(message("system", heads[0]), GO) != name(message("system", heads[1]), GO)
    assert name(message("system", heads[0][4:]), GO) != name(message("system", heads[1][4:]), GO)
    near = [head[100:] for head in heads]
    assert name(message("system", near[0]), GO) == name(message("system", near[1]), GO)


def test_a_completions_prompt_is_known_by_its_start_without_its_clock() -> None:
    def of(prompt: Any) -> bytes:
        return Beginnings().of_text(OWNER, json.dumps(prompt).encode())

    rest = "".join(f" word{number}" for number in range(300))
    assert of(f"Now 2026-01-05T09:59:00Z{rest}") == of(f"Now 2026-01-05T10:00:00.25Z{rest}, and more")
    assert of(f"Now 2026-01-05T09:59:00Z{rest}") != of(f"Then 2026-01-05T09:59:00Z{rest}")
    assert of([1, 2, 3]) != of([1, 2, 4])
    assert of("a") != of("b")


@given(
    st.lists(
        st.lists(
            st.sampled_from(
                [message("system", f"Now 2026-01-05T09:{minute:02}:00Z") for minute in range(3)]
                + [message("assistant", "hi"), message("user", "a"), message("user", "b")]
                + [message("system", "x", **EPHEMERAL), message("tool", "t")]
            ),
            max_size=5,
        ),
        max_size=8,
    )
)
def test_what_is_remembered_changes_no_name(prompts: list[list[Document]]) -> None:
    one, small = Beginnings(3), Beginnings(4, limit=2)
    for prompt in [*prompts, *prompts]:
        expected = name(*prompt)
        assert one.of_messages(OWNER, items(*prompt)) == expected
        assert small.of_messages(OWNER, items(*prompt)) == expected
        assert one.of_messages("other", items(*prompt)) != expected


@pytest.mark.integration
def test_the_hash_seed_of_the_interpreter_changes_nothing() -> None:
    program = """
import sys
from ctxgate.compression.beginning import Beginnings
from ctxgate.inference import wire
body = wire.parse(sys.stdin.read().encode())
print(Beginnings(7).of_messages("o", body.items("messages")).hex())
"""
    prompt = [message("system", "Now 2026-01-05T09:00:00Z, pid 4711"), GO]
    assert printed(program, raw(*prompt).decode(), "1", "2") == {name(*prompt, owner="o").hex() + "\n"}
