"""Splitting an event stream: bytes are never changed, chunk borders never show."""

from __future__ import annotations

import pytest

from ctxgate.inference.sse import EventTooLarge, SseSplitter, data_of, name_of

STREAMS = {
    "lf": ([b"data: 1\n\n", b"data: 2\n\n"], b""),
    "crlf": ([b"data: 1\r\n\r\n", b"data: 2\r\n\r\n"], b""),
    "cr": ([b"data: 1\r\r", b"data: 2\r\r"], b""),
    "lf then crlf": ([b"data: 1\n\r\n", b"data: 2\r\n\n"], b""),
    "lf then cr": ([b"data: 1\n\r", b"data: 2\n\n"], b""),
    "many lines": ([b"event: x\nid: 7\ndata: a\ndata: b\n\n"], b""),
    "comment": ([b": keep-alive\n\n", b"data: 1\n\n"], b""),
    "byte order mark": ([b"\xef\xbb\xbfdata: 1\n\n"], b""),
    "extra blank lines": ([b"data: 1\n\n", b"\n\n", b"data: 2\n\n"], b""),
    "one extra blank line": ([b"data: 1\n\n", b"\ndata: 2\n\n"], b""),
    "incomplete": ([b"data: 1\n\n"], b"data: 2"),
    "incomplete blank line": ([b"data: 1\r\n\r\n"], b"data: 2\r\n\r"),
    "no newline": ([], b"data: [DONE]"),
    "empty": ([], b""),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1_000])
def test_events_are_the_same_however_the_stream_is_chunked(name: str, size: int) -> None:
    events, tail = STREAMS[name]
    stream = b"".join(events) + tail
    splitter = SseSplitter()
    found: list[bytes] = []
    for start in range(0, len(stream), size):
        found += splitter.feed(stream[start : start + size])
    assert found == events
    assert splitter.tail() == tail


def test_a_chunk_that_is_one_event_is_passed_on_as_the_same_object() -> None:
    chunk = b'data: {"a":1}\n\n'
    assert SseSplitter().feed(chunk)[0] is chunk


def test_an_event_beyond_the_bound_is_an_error() -> None:
    splitter = SseSplitter(max_event_bytes=10)
    assert splitter.feed(b"data: 12") == []
    assert splitter.feed(b"\n\n") == [b"data: 12\n\n"]
    with pytest.raises(EventTooLarge):
        splitter.feed(b"data: 123\n\n")


@pytest.mark.parametrize("size", [1, 4, 100])
def test_events_before_an_event_beyond_the_bound_are_not_lost(size: int) -> None:
    stream = b"data: 1\n\n" + b"data: 2\n\n" + b"x" * 20
    splitter = SseSplitter(max_event_bytes=10)
    found: list[bytes] = []
    raised = False
    for chunk in [*(stream[start : start + size] for start in range(0, len(stream), size)), b""]:
        try:
            found += splitter.feed(chunk)
        except EventTooLarge:
            raised = True
    assert raised
    assert found == [b"data: 1\n\n", b"data: 2\n\n"]


def test_a_large_event_in_many_chunks_is_put_together() -> None:
    event = b"data: " + b"x" * 300_000 + b"\n\n"
    splitter = SseSplitter()
    found = [e for start in range(0, len(event), 1_000) for e in splitter.feed(event[start : start + 1_000])]
    assert found == [event]


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b'data: {"a":1}\n\n', b'{"a":1}'),
        (b'data:{"a":1}\n\n', b'{"a":1}'),
        (b"data:  two spaces\n\n", b" two spaces"),
        (b"data: 1\r\n\r\n", b"1"),
        (b"data: 1\r\r", b"1"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"event: x\ndata: a\nid: 3\n\n", b"a"),
        (b"data\n\n", b""),
        (b"data: \n\n", b""),
        (b"\xef\xbb\xbfdata: 1\n\n", b"1"),
        (b"data: [DONE]", b"[DONE]"),
        (b": keep-alive\n\n", None),
        (b"event: ping\n\n", None),
        (b"\n\n", None),
        (b"database: 1\n\n", None),
    ],
)
def test_data_of(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data


def test_name_of() -> None:
    assert name_of(b"event: error\ndata: 1\n\n") == b"error"
    assert name_of(b"data: 1\n\n") is None
