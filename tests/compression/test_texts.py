"""The texts of a message: found, replaced and added to, while everything else keeps its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.texts import CACHE_MARK, GATEWAY_MARK, MessageTexts, end_of_content, escaped


def read(raw: bytes) -> MessageTexts:
    found = MessageTexts.read(raw)
    assert found is not None
    return found


def test_texts_are_those_of_text_parts() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"text": "b"},
        {"type": "input_text", "text": "c"},
        "d",
        {"type": "image_url", "text": "e"},
        {"type": "refusal", "refusal": "f"},
        {"type": "text", "text": None},
        {"type": "text"},
        7,
        {},
    ]
    message = read(json.dumps({"role": "user", "content": content}).encode())
    assert list(message.texts()) == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert len(message) == 10
    for at in (0, 3):
        message.put(at, "\u20ac")
    content[0], content[3] = {"type": "text", "text": "\u20ac"}, "\u20ac"
    assert json.loads(message.raw()) == {"role": "user", "content": content}


@pytest.mark.parametrize("raw", [b"7", b'"x"', b"[]", b'{"content":[{]}', b"{"])
def test_what_is_no_message_has_no_texts(raw: bytes) -> None:
    assert MessageTexts.read(raw) is None


@pytest.mark.parametrize("raw", [b"{}", b'{"content":null}', b'{"content":5}', b'{"content":{"a":1}}'])
def test_content_of_other_kinds_has_no_text(raw: bytes) -> None:
    message = read(raw)
    assert list(message.texts()) == []
    assert json.loads(message.raw()) == json.loads(raw)


def test_untouched_values_keep_their_spelling() -> None:
    message = read(b'{ "n" : 1.0e0, "content" : "\\u0061", "x": [ 1 , 2 ] }')
    assert message.raw() == b'{"n":1.0e0,"content":"\\u0061","x":[ 1 , 2 ]}'


def test_marks_are_taken_off_the_message_and_its_parts() -> None:
    raw = b'{"content":[{"text":"a","ctxgate":1},{"cache_control":{},"text":"b"},"c"],"ctxgate":null}'
    message = read(raw)
    assert message.unmark(GATEWAY_MARK)
    assert message.raw() == b'{"content":[{"text":"a"},{"cache_control":{},"text":"b"},"c"]}'
    assert not message.unmark(GATEWAY_MARK)
    assert message.unmark(CACHE_MARK)
    assert message.raw() == b'{"content":[{"text":"a"},{"text":"b"},"c"]}'


def with_end(raw: bytes, text: str) -> bytes:
    end = end_of_content(raw)
    assert end is not None
    return raw[: end.start] + end.before + escaped(text) + end.after + raw[end.stop :]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"role":"user","content":"a"}', b'{"role":"user","content":"a\\n\\nN\\"\\u0000"}'),
        (b'{"content":""}', b'{"content":"\\n\\nN\\"\\u0000"}'),
        (
            b'\t{ "co\\"ntent" : "x" ,\n"content" :\t"a\\"\\\\" , "z":{"content":"b"} }',
            b'\t{ "co\\"ntent" : "x" ,\n"content" :\t"a\\"\\\\\\n\\nN\\"\\u0000" , "z":{"content":"b"} }',
        ),
        (b'{"content":[ ]}', b'{"content":[ {"type":"text","text":"N\\"\\u0000"}]}'),
        (
            b'{"content":[{"x":1} ],"role":"tool"}',
            b'{"content":[{"x":1} ,{"type":"text","text":"N\\"\\u0000"}],"role":"tool"}',
        ),
        (b'{"a":1,"content": null }', b'{"a":1,"content": "N\\"\\u0000" }'),
        (b'{ "role":"tool"}', b'{"content":"N\\"\\u0000", "role":"tool"}'),
        (b"{}", b'{"content":"N\\"\\u0000"}'),
    ],
)
def test_text_is_added_to_the_end_of_the_content(raw: bytes, expected: bytes) -> None:
    assert with_end(raw, 'N"\0') == expected


@pytest.mark.parametrize(
    "raw",
    [
        b'{"content":1}',
        b'{"content":"\\ud83d"}',
        b'{"content":null,"role":"user","content":null }',
        b'{"content":"a","role":"user","content":"a"}',
        b'{"role":"user","role":"user"}',
        b'{"content":{"a":"b"}}',
        b'{"content":"a","role":"user","content":"long"}',
        b'{"content":"long","role":"user","content":"a"}',
        b'{"role":"user","role":"u","content":"a"}',
        b"7",
    ],
)
def test_other_content_and_repeated_members_take_no_text(raw: bytes) -> None:
    assert end_of_content(raw) is None


json_texts = st.text(max_size=8)
contents = json_texts | st.lists(
    json_texts | st.builds(lambda text: {"type": "text", "text": text}, json_texts)
)


@given(
    st.lists(st.tuples(json_texts.filter(lambda name: name != "content"), json_texts), max_size=3),
    contents,
    json_texts,
    st.sampled_from([(",", ":"), (" ,\n", " :\t")]),
    st.booleans(),
)
def test_any_message_reads_back_with_the_text_at_its_end(
    members: list[tuple[str, str]], content: Any, text: str, separators: tuple[str, str], ascii_only: bool
) -> None:
    message = {**dict(members), "content": content, "last": "x"}
    raw = json.dumps(message, separators=separators, ensure_ascii=ascii_only).encode()
    found = json.loads(with_end(raw, text))
    added = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    assert found == message | {"content": added}
