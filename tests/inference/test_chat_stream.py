"""Streams of chat/completions and completions: what the client gets to see."""

from __future__ import annotations

import gc
import json
import weakref

import pytest

from ctxgate.inference.chat_relay import StreamRelay
from ctxgate.inference.chat_stream import (
    Ending,
    StreamReader,
    StreamTerms,
    ending,
)
from ctxgate.inference.sse import data_of
from ctxgate.inference.usage import Usage, measured
from streams import (
    DONE,
    FINGERPRINT,
    FINISH,
    KEEP_ALIVE,
    ROLE,
    TALK,
    USAGE,
    choice,
    content,
    event,
    metered,
    play,
    usage,
)


def test_gateways_b1_the_usage_chunk_the_gateway_asked_for_is_read_and_withheld() -> None:
    reader, out = play([*TALK, FINISH, USAGE, DONE])
    assert out == [*TALK, FINISH, DONE]
    assert metered(reader) == Usage(measured(32), measured(64), measured(3))


def test_gateways_b2_a_client_that_asked_gets_the_usage_chunk_unchanged() -> None:
    reader, out = play([*TALK, FINISH, USAGE, DONE], StreamReader(StreamTerms(client_wants_usage=True)))
    assert out == [*TALK, FINISH, USAGE, DONE]
    assert metered(reader).cached == measured(64)


def test_gateways_b2_metering_does_not_depend_on_the_clients_wish() -> None:
    events = [*TALK, FINISH, USAGE, DONE]
    asked, _ = play(events, StreamReader(StreamTerms(client_wants_usage=True)))
    declined, _ = play(events, StreamReader(StreamTerms(client_wants_usage=False)))
    assert asked.usage() == declined.usage()


def test_gateways_b2_a_client_that_declined_sees_no_usage_even_from_an_engine_that_forces_it() -> None:
    forced = [
        event(choices=[choice(role="assistant", content="")], usage=usage(96, 0)),
        event(choices=[choice(content="Hello")], usage=usage(96, 1)),
        event(choices=[choice("stop", content="")], usage=usage(96, 2)),
    ]
    plain = [ROLE, content("Hello"), FINISH]
    _, out = play([*forced, USAGE, DONE])
    assert out == [*plain, DONE]


def test_injected_running_usage_is_cut_out_of_every_chunk() -> None:
    terms = StreamTerms(client_wants_usage=True, injected_continuous=True)
    running = [
        event(choices=[choice(role="assistant", content="")], usage=usage(96, 0)),
        event(choices=[choice(content="Hello")], usage=usage(96, 1)),
        event(choices=[choice("stop", content="")], usage=usage(96, 2)),
    ]
    reader, out = play([*running, USAGE, DONE], StreamReader(terms))
    assert out == [ROLE, content("Hello"), FINISH, USAGE, DONE]
    assert metered(reader) == Usage(measured(32), measured(64), measured(3))


def test_running_usage_the_client_asked_for_stays() -> None:
    terms = StreamTerms(client_wants_usage=True, client_wants_continuous=True, injected_continuous=True)
    chunk = content("Hello", usage=usage(96, 1))
    assert StreamReader(terms).on_event(chunk) is chunk


@pytest.mark.parametrize(
    ("chunk", "shown"),
    [
        (b'{"choices":[{"index":0}], "usage": {"prompt_tokens": 1}}', b'{"choices":[{"index":0}]}'),
        (b'{"usage":{"prompt_tokens":1},"choices":[{"index":0}]}', b'{"choices":[{"index":0}]}'),
        (b'{ "usage" : {"a":1} , "choices":[{}], "z":1 }', b'{ "choices":[{}], "z":1 }'),
        (b'{"choices":[{"usage":2}],"usage":{"a":1},"z":"usage"}', b'{"choices":[{"usage":2}],"z":"usage"}'),
        (b'{"choices":[{}],"\\u0075sage":{"a":1}}', b'{"choices":[{}]}'),
        (b'{"choices":[{}],"usage":{"a":1},"usage":{"a":2}}', b'{"choices":[{}]}'),
        (
            b'{"choices":[{"delta":{"content":"\\"usage\\":{\\"a\\":1}"}}],"usage":{"a":1}}',
            b'{"choices":[{"delta":{"content":"\\"usage\\":{\\"a\\":1}"}}]}',
        ),
    ],
)
def test_cutting_usage_leaves_every_other_byte(chunk: bytes, shown: bytes) -> None:
    reader = StreamReader(StreamTerms(injected_continuous=True))
    for head, end in ((b"data: ", b"\n\n"), (b"data:", b"\r\n\r\n"), (b"id: 4\ndata: ", b"\n\n")):
        assert reader.on_event(head + chunk + end) == head + shown + end


def test_cutting_usage_from_a_payload_on_several_lines() -> None:
    reader = StreamReader(StreamTerms(injected_continuous=True))
    out = reader.on_event(b'data: {"choices":[{}],\ndata: "usage":{"a":1}}\n\n')
    assert out == b'data: {"choices":[{}]}\n\n'


def test_a_null_usage_is_left_where_the_engine_put_it() -> None:
    chunk = content("Hello", usage=None)
    for terms in (StreamTerms(), StreamTerms(injected_continuous=True), StreamTerms(client_wants_usage=True)):
        assert StreamReader(terms).on_event(chunk) is chunk


def test_the_fingerprint_that_moves_to_the_usage_chunk_is_put_back() -> None:
    # without include_usage vLLM stamps the finishing chunks; with it only the usage chunk
    stamped = event(choices=[choice("stop", content="")], system_fingerprint=FINGERPRINT)
    reader, out = play([*TALK, FINISH, USAGE, DONE], StreamReader(StreamTerms(fingerprint=FINGERPRINT)))
    assert out == [*TALK, stamped, DONE]
    assert reader.system_fingerprint == FINGERPRINT
    running = event(choices=[choice("stop", content="")], usage=usage(96, 2))
    terms = StreamTerms(injected_continuous=True, fingerprint=FINGERPRINT)
    assert StreamReader(terms).on_event(running) == stamped


def test_the_fingerprint_is_not_put_where_the_engine_would_not() -> None:
    asked = StreamTerms(client_wants_usage=True, fingerprint=FINGERPRINT)
    assert StreamReader(asked).on_event(FINISH) is FINISH
    own = event(choices=[choice("stop", content="")], system_fingerprint="other")
    assert StreamReader(StreamTerms(fingerprint=FINGERPRINT)).on_event(own) is own
    assert StreamReader(StreamTerms(fingerprint=FINGERPRINT)).on_event(TALK[1]) is TALK[1]


NO_CHOICES = event(usage=usage(96, 3, cached_tokens=64))
EMPTY_DELTA = event(choices=[choice(None)], usage=usage(96, 3, cached_tokens=64))


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("upstream", ["usage chunk", "no choices", "beside an empty delta", "none"])
def test_api_a9_usage_frames_reach_only_clients_that_asked_and_always_have_choices(
    wants: bool, upstream: str
) -> None:
    frames = {
        "usage chunk": [USAGE],
        "no choices": [NO_CHOICES],
        "beside an empty delta": [EMPTY_DELTA],
        "none": [],
    }
    _, out = play(
        [*TALK, FINISH, *frames[upstream], DONE], StreamReader(StreamTerms(client_wants_usage=wants))
    )
    records = [json.loads(data_of(e) or b"") for e in out if e != DONE]
    assert all("choices" in record for record in records)
    if wants:
        assert sum("usage" in record for record in records) == (upstream != "none")
    else:
        assert all(record["choices"] and "usage" not in record for record in records)


def test_api_a9_the_list_added_to_a_usage_frame_changes_nothing_else() -> None:
    reader = StreamReader(StreamTerms(client_wants_usage=True))
    assert reader.on_event(b'data: {"usage":{"a":1},"x": 2}\n\n') == (
        b'data: {"choices":[],"usage":{"a":1},"x": 2}\n\n'
    )


def test_an_error_event_is_forwarded_even_with_usage() -> None:
    failed = event(choices=[], usage=usage(96, 3), error={"message": "boom"})
    reader = StreamReader()
    assert reader.on_event(failed) is failed
    assert ending(reader, clean_eof=True) is Ending.ERROR


def test_an_empty_list_of_choices_without_usage_is_the_upstreams_own() -> None:
    chunk = event(choices=[], prompt_filter_results=[{}])
    assert StreamReader().on_event(chunk) is chunk


@pytest.mark.parametrize(
    "odd",
    [
        KEEP_ALIVE,
        b"event: ping\n\n",
        b"data: not json\n\n",
        b"data: \n\n",
        b"data: 17\n\n",
        b'data: {"choices":"x"}\n\n',
        b'data: {"choices":null}\n\n',
        b'data: {"choices":[7]}\n\n',
        b'data: {"choices":[{"delta":[1]}]}\n\n',
        b'data: {"choices":[{"index":"a","delta":{"content":7}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
        b'data: {"future":{"x":[1,2]}}\n\n',
        b"data: " + b"[" * 5_000 + b"]" * 5_000 + b"\n\n",
    ],
)
def test_what_the_gateway_does_not_understand_passes_unchanged(odd: bytes) -> None:
    assert StreamReader(StreamTerms(injected_continuous=True)).on_event(odd) is odd


def test_gateways_q1_reasoning_and_unknown_fields_pass_and_are_metered() -> None:
    chunks = [
        event(choices=[choice(reasoning_content="thinking")]),
        event(choices=[choice(reasoning="ümlaut")]),
        event(choices=[choice(content="x", vendor={"a": [1]})], extra=True),
    ]
    reader, out = play(chunks)
    assert out == chunks
    assert reader.text_bytes == 8 + 7 + 1
    assert reader.content_events == 3


@pytest.mark.parametrize("size", [1, 3, 1_000])
def test_api_a2_tool_arguments_pass_whole_in_whatever_pieces_they_come(size: int) -> None:
    arguments = json.dumps({"path": "src/ä.py", "lines": [1, 2]}, ensure_ascii=False)
    pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
    chunks = [
        event(choices=[choice(tool_calls=[{"index": 0, "function": {"arguments": piece}}])])
        for piece in pieces
    ]
    reader, out = play([*chunks, event(choices=[choice("tool_calls")]), DONE])
    assert out[:-2] == chunks
    deltas = [json.loads(data_of(e) or b"")["choices"][0]["delta"] for e in out[:-2]]
    assert "".join(d["tool_calls"][0]["function"]["arguments"] for d in deltas) == arguments
    assert reader.text_bytes == len(arguments.encode())
    assert reader.finish_reasons == {0: "tool_calls"}


# --- the tail ----------------------------------------------------------------------------------------


def test_a_last_event_without_its_blank_line_still_counts() -> None:
    reader, _ = play([*TALK, FINISH])
    assert reader.close(b"data: [DONE]") == b"data: [DONE]"
    assert reader.done


def test_half_an_event_is_dropped() -> None:
    reader, _ = play(TALK)
    assert reader.close(content("lost")[:-20]) == b""
    assert reader.close(b"") == b""
    assert ending(reader, clean_eof=True) is Ending.TRUNCATED


def test_a_whole_tail_of_an_incomplete_answer_is_terminated_so_that_an_error_can_follow() -> None:
    reader, _ = play(TALK)
    chunk = content("more")
    assert reader.close(chunk[:-2]) == chunk


def test_a_usage_chunk_in_the_tail_is_withheld_all_the_same() -> None:
    reader, _ = play([*TALK, FINISH])
    assert reader.close(USAGE[:-2]) == b""
    assert metered(reader).cached == measured(64)


# --- chunks of bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_relay_forwards_the_same_bytes_however_they_arrive(size: int) -> None:
    stream = b"".join([KEEP_ALIVE, *TALK, FINISH, USAGE, DONE])
    reader = StreamReader()
    relay = StreamRelay(reader)
    out = b"".join(relay.take(stream[start : start + size]) for start in range(0, len(stream), size))
    assert out == b"".join([KEEP_ALIVE, *TALK, FINISH])
    assert relay.end_marker == DONE
    assert relay.close() == b""
    assert metered(reader).cached == measured(64)


def test_relay_passes_a_plain_chunk_on_as_the_same_object() -> None:
    chunk = content("x")
    assert StreamRelay(StreamReader()).take(chunk) is chunk


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_the_price_goes_on_the_first_event_seen_once_the_usage_is_known(size: int) -> None:
    after = event(choices=[], note="after")
    stream = b"".join([*TALK, FINISH, USAGE, after, after, DONE])
    seen: list[bytes] = []

    def priced(one: bytes) -> bytes:
        seen.append(one)
        return b"priced\n\n"

    for wants, first, rest in ((True, USAGE, [after, after]), (False, after, [after])):
        seen.clear()
        relay = StreamRelay(StreamReader(StreamTerms(client_wants_usage=wants)), priced)
        out = b"".join(relay.take(stream[start : start + size]) for start in range(0, len(stream), size))
        assert out == b"".join([*TALK, FINISH, b"priced\n\n", *rest])
        assert seen == [first]


def test_a_closed_relay_lets_go_of_its_owner() -> None:
    class Owner:
        """Holds a relay that calls it back."""

        def __init__(self) -> None:
            self.relay = StreamRelay(StreamReader(), self.priced)

        def priced(self, one: bytes) -> bytes:
            """Price an event."""
            return one

    gc.disable()  # what the collector would find is not found here
    try:
        owner = Owner()
        owner.relay.close()
        gone = weakref.ref(owner)
        del owner
        assert gone() is None
    finally:
        gc.enable()


def test_the_end_marker_is_kept_back_also_without_its_blank_line() -> None:
    relay = StreamRelay(StreamReader())
    assert relay.take(content("x") + DONE[:-2]) == content("x")
    assert (relay.close(), relay.end_marker) == (b"", DONE[:-2])
    cut = StreamRelay(StreamReader())
    assert cut.take(TALK[0] + content("y")[:-2]) == TALK[0]
    assert (cut.close(), cut.end_marker) == (content("y"), b"")
