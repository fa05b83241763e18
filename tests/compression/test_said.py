"""Messages are read as texts, whatever form their content has."""

from __future__ import annotations

import json

import pytest

from ctxgate.compression.clusters import cut_after, cut_before, head_of, is_border, tail_of
from ctxgate.compression.said import Call, Said, read_said, repaired, with_text


def said(**members: object) -> Said:
    return read_said(json.dumps(members).encode())


def test_texts_calls_and_answers() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert said(role="assistant", content=None, tool_calls=[call]) == Said(
        "assistant", "", (Call("c", "f", '{"a":1}'),)
    )
    assert said(role="tool", tool_call_id="c", content="x") == Said("tool", "x", answers="c")
    call["function"] = {"name": "f", "arguments": {"a": 1}}
    assert said(role="assistant", tool_calls=[call, 7]).calls == (Call("c", "f", '{"a": 1}'),)


def test_context_n1_n5_parts_that_are_no_text_have_a_placeholder() -> None:
    """The same image gives the same placeholder, another image another one."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
    parts = [{"type": "text", "text": "look"}, image, "bare", image, other, 5]
    lines = said(role="user", content=parts).text.split("\n")
    assert lines[0] == "look"
    assert lines[2] == "bare"
    assert lines[1] == lines[3] != lines[4]
    assert lines[1].startswith("[image_url ")


@pytest.mark.parametrize("raw", [b"", b"[]", b"7", b"{", b'"x"', b"[" * 100_000, b"\xff"])
def test_what_is_no_message_is_empty(raw: bytes) -> None:
    assert read_said(raw) == Said()


def test_context_r3_lone_surrogates_are_repaired_and_counted() -> None:
    found = read_said(rb'{"role":"user","content":"a\ud83d b \ud83d\ude00"}')
    assert (found.text, found.repaired) == ("a\ufffd b \U0001f600", 1)
    assert repaired("plain") == ("plain", 0)
    assert repaired("\ude00\ud83d") == ("\ufffd\ufffd", 2)


def test_new_text_leaves_other_members_alone() -> None:
    raw = b'{"role":"tool","x":1.50,"content":[{"type":"text","text":"a"}]}'
    assert with_text(raw, "n\u00e9w") == '{"role":"tool","x":1.50,"content":"n\u00e9w"}'.encode()
    assert json.loads(with_text(rb'{"role":"tool","content":"\ud83d"}', "b")) == {
        "role": "tool",
        "content": "b",
    }
    with pytest.raises(ValueError, match="not a message"):
        with_text(b"7", "x")


def test_borders_of_characters() -> None:
    text = "ae\u0301\r\n\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7z"
    assert [at for at in range(len(text) + 1) if is_border(text, at)] == [0, 1, 3, 5, 7, 9, 10]
    assert [cut_before(text, at) for at in range(11)] == [0, 1, 1, 3, 3, 5, 5, 7, 7, 9, 10]
    assert [cut_after(text, at) for at in range(11)] == [0, 1, 3, 3, 5, 5, 7, 7, 9, 9, 10]


def test_heads_and_tails_by_bytes() -> None:
    assert head_of("h\u00e9llo", 2) == "h"
    assert head_of("h\u00e9llo", 3) == "h\u00e9"
    assert tail_of("hell\u00f6", 1) == ""
    assert tail_of("hell\u00f6", 2) == "\u00f6"
    assert head_of("abc", 9) == tail_of("abc", 9) == "abc"
    assert head_of("abc", 0) == tail_of("abc", -1) == ""


def test_a_pile_of_marks_is_cut_somewhere() -> None:
    text = "a" + "\u0301" * 10_000
    assert 4_000 <= len(head_of(text, 10_001)) <= 5_001
    assert 4_000 <= len(tail_of(text, 10_000)) <= 5_000
