"""The shortcut for ordinary text changes nothing but the work: same bytes, same facts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference.chat_stream import StreamReader, StreamTerms, ending
from ctxgate.inference.chunk_shape import shape_of
from streams import DONE, FINISH, KEEP_ALIVE, ROLE, TALK, USAGE, choice, content, event, usage

TEXTS = st.text(max_size=12) | st.sampled_from(
    ['"usage":{}', '"finish_reason":null', "[DONE]", "data: {", "\n\n", '"error":{"message":"x"}', "event: e"]
)
EVENTS = st.one_of(
    TEXTS.map(content),
    st.builds(lambda text: event(choices=[choice("stop", content=text)]), TEXTS),
    st.builds(lambda text: event(choices=[choice(reasoning=text)]), TEXTS),
    st.builds(lambda n: event(choices=[choice(content="x")], usage=usage(9, n)), st.integers(1, 9)),
    st.builds(lambda n: event(choices=[], usage=usage(9, n)), st.integers(1, 9)),
    st.builds(lambda text: event(choices=[choice(content=text)], error={"message": text}), TEXTS),
    st.builds(lambda text: b"event: error\n" + content(text), TEXTS),
    st.sampled_from([KEEP_ALIVE, b'data: {"broken\n\n', b"data: {}\n\n", content("x", usage=None), DONE]),
)
TERMS = st.builds(
    StreamTerms,
    client_wants_usage=st.booleans(),
    injected_continuous=st.booleans(),
    fingerprint=st.none() | st.just("vllm-1"),
)


def facts(reader: StreamReader) -> tuple[object, ...]:
    return (
        reader.finish_reasons,
        reader.done,
        reader.error,
        reader.events,
        reader.usage(),
        ending(reader, True),
        reader.system_fingerprint,
    )


def whole_events(chunk: bytes) -> list[bytes]:
    return [part + b"\n\n" for part in chunk.split(b"\n\n")[:-1]]


@given(st.lists(st.lists(EVENTS, min_size=1, max_size=4), max_size=8), TERMS)
def test_the_shortcut_forwards_and_learns_what_reading_every_event_does(
    reads: list[list[bytes]], terms: StreamTerms
) -> None:
    slow, fast = StreamReader(terms), StreamReader(terms)
    expected: list[bytes] = []
    forwarded: list[bytes] = []
    for events in [[ROLE], [TALK[1]], *reads]:
        expected += [out for one in events if (out := slow.on_event(one)) is not None]
        chunk = b"".join(events)
        length = fast.skim(chunk)
        forwarded.append(chunk[:length])
        left = whole_events(chunk[length:])
        assert left == [] or left == events[-len(left) :]  # cut between events
        forwarded += [out for one in left if (out := fast.on_event(one)) is not None]
    assert b"".join(forwarded) == b"".join(expected)
    assert facts(fast) == facts(slow)


def test_ordinary_text_takes_the_shortcut_and_is_counted() -> None:
    reader = StreamReader()
    assert reader.skim(content("before any text: the time of the first one is measured")) == 0
    reader.on_event(content("four"))
    ordinary = content("five!") + content("six...")
    assert reader.skim(ordinary) == len(ordinary)
    assert (reader.content_events, reader.text_bytes) == (3, 4 + 5 + 6)


def test_the_shortcut_ends_before_what_has_to_be_read() -> None:
    reader = StreamReader()
    reader.on_event(content("four"))
    for special in (FINISH, USAGE, DONE, event(choices=[choice(content="x")], error={"message": "no"})):
        assert reader.skim(content("five") + special) == len(content("five"))
        assert reader.skim(special + content("five")) == 0


def test_half_an_event_is_left_over() -> None:
    reader = StreamReader()
    reader.on_event(content("four"))
    assert reader.skim(content("five")[:-1]) == 0
    assert reader.skim(content("five") + content("six")[:-1]) == len(content("five"))


PLAIN = st.text(alphabet="ab {}[]:,é", max_size=8)
SPECIAL = st.sampled_from(
    [
        FINISH,
        USAGE,
        DONE,
        KEEP_ALIVE,
        content('a"b'),
        content("a\\b"),
        content("a\nb"),
        event(choices=[choice(content="x")], error={"message": "no"}),
        event(choices=[choice(content="x")], usage=usage(9, 1)),
        event(choices=[choice(reasoning="x")]),
        content("x").replace(b"\n\n", b"\r\n\r\n"),
        b"event: error\n" + content("x"),
        b'data: {"broken\n\n',
    ]
)


@given(
    st.lists(
        st.one_of(PLAIN.map(lambda text: (content(text), True)), SPECIAL.map(lambda one: (one, False))),
        min_size=1,
        max_size=6,
    )
)
def test_a_run_of_one_shape_is_ordinary_text_to_its_end(drawn: list[tuple[bytes, bool]]) -> None:
    events = [one for one, _ in drawn]
    shape = shape_of(content("text"), 4, (b'"usage"', b'"error"'))
    assert shape is not None
    length, count = shape.run(b"".join(events))
    covered = events[:count]
    assert b"".join(covered) == b"".join(events)[:length]
    for one in covered:
        text = json.loads(one[6:])["choices"][0]["delta"]["content"]
        assert content(text) == one
        assert len(text.encode()) == len(one) - shape.envelope
    if all(plain for _, plain in drawn):
        assert count == len(events)


@pytest.mark.parametrize("texts", [["one"], ["one", "", "two", "é"]])
def test_text_of_one_shape_is_counted_to_the_byte(texts: list[str]) -> None:
    reader = StreamReader()
    reader.on_event(content("four"))
    read = b"".join(map(content, texts))
    assert reader.skim(read + FINISH) == len(read)
    assert reader.text_bytes == 4 + len("".join(texts).encode())
    assert reader.content_events == reader.events == 1 + len(texts)


@pytest.mark.parametrize(
    "unlike",
    [
        content("a\\b"),
        content("text", usage=None),
        event(choices=[choice("stop", content="text")]),
        content("text").replace(b"data: ", b"data:"),
        content("text")[:-1],
        KEEP_ALIVE + content("text"),
        content("longer text"),
    ],
)
def test_only_an_ordinary_event_has_a_shape(unlike: bytes) -> None:
    assert shape_of(content("text"), 4, (b'"usage"',)) is not None
    assert shape_of(unlike, 4, (b'"usage"',)) is None


def test_the_shape_follows_a_stream_from_its_reasoning_to_its_answer() -> None:
    thought = event(choices=[choice(reasoning="hm")])
    reader = StreamReader()
    reader.on_event(thought)
    read = thought * 3 + content("four") * 2
    assert reader.skim(read) == len(read)  # two shapes: told by what they do not hold
    assert reader.skim(content("four") * 2) == 2 * len(content("four"))
    assert reader.content_events == 8
