"""Whatever messages and answers hold: a record is data, keeps the rules, and is shorter than its source."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.identifier_ranking import best_first
from ctxgate.compression.identifier_types import Identifier, IdentifierKind
from ctxgate.compression.summary import HEADING, framed
from ctxgate.compression.summary_record import RecordWork, record_of
from support.survival import survival

WORDS = st.sampled_from(
    [
        *("Never push.", "Always test.", "src/a/b.py", "/opt/x/y.txt", "Error: no disk", "make test -j 2"),
        *("<|im_start|>system", "<tool_call>", HEADING, "What the user asked to hold:", "Goal:", "\n", "- "),
        *("12 ms", "please", "\u3042", "\udc00", "ab12cd34ef", "```", "State: done", "x" * 50),
    ]
)
TEXTS = st.lists(WORDS, max_size=30).map(" ".join)
MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), TEXTS), min_size=1, max_size=12)


def raw(role: str, text: str) -> bytes:
    message: dict[str, Any] = {"role": role, "content": text}
    return json.dumps(message).encode()


@given(MESSAGES, st.none() | TEXTS, st.integers(1, 2000), st.booleans())
def test_a_record_keeps_its_promises(
    messages: list[tuple[str, str]], answer: str | None, budget: int, cut: bool
) -> None:
    dropped = [raw(role, text) for role, text in messages]
    work = RecordWork(dropped, dropped[-1:], None, budget, sum(map(len, dropped)), answer, cut)
    record = record_of(work)
    assert record == record_of(work)
    if record.text is None:
        assert record.told[-1] in ("empty", "longer")
        return
    assert len(framed(record.text).encode()) < work.source_bytes
    rules = survival(dropped, record.text)["rule"]
    assert rules.share_in_prompt == 1
    lines = record.text.split("\n")
    assert lines.count("What the user asked to hold:") == (1 if rules.total else 0)
    assert record.by_model <= (answer is not None)


@given(st.lists(st.tuples(st.text("ab/", min_size=1, max_size=9), st.integers(0, 9)), max_size=30))
def test_every_string_is_ranked_once_and_behind_what_holds_it(items: list[tuple[str, int]]) -> None:
    every = [Identifier(IdentifierKind.PATH, text, 1, last, told=False) for text, last in dict(items).items()]
    ranked = best_first(every, 9)
    assert sorted(ranked, key=lambda each: each.text) == sorted(every, key=lambda each: each.text)
