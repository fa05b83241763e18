"""What is learned from an answer of chat/completions or completions, and how it ended."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest

from ctxgate.inference.chat_stream import (
    Ending,
    StreamReader,
    StreamTerms,
    ending,
    error_event,
    finish_facts,
    truncation_event,
)
from ctxgate.inference.estimate import TokenRatio, estimate_output_tokens
from ctxgate.inference.rates import RateCard, Rates, charge
from ctxgate.inference.sse import data_of
from ctxgate.inference.usage import UNKNOWN, Usage, estimated, measured
from ctxgate.inference.usage_meter import UsageDialect
from ctxgate.inference.usage_parse import never_scheduled, parse_usage
from streams import (
    DONE,
    FINGERPRINT,
    FINISH,
    KEEP_ALIVE,
    ROLE,
    TALK,
    choice,
    content,
    event,
    metered,
    play,
    usage,
)


def test_text_is_counted_in_utf8_once_per_text() -> None:
    both = choice(content="né", reasoning="abc", reasoning_content="abc", refusal="no")
    old = choice(function_call={"name": "f", "arguments": "{}"})
    reader, _ = play([event(choices=[both]), event(choices=[old]), event(choices=[choice(content="")])])
    assert reader.text_bytes == 3 + 3 + 2 + 2
    assert reader.content_events == 2
    assert reader.events == 3


def test_first_content_is_not_the_role_chunk() -> None:
    reader, _ = play([KEEP_ALIVE, ROLE])
    assert not reader.first_content_seen
    reader.on_event(content("x"))
    assert reader.first_content_seen


def test_completions_text_counts() -> None:
    reader, _ = play([event(choices=[{"index": 0, "text": "abc", "finish_reason": "length"}])])
    assert (reader.text_bytes, reader.finish_reasons) == (3, {0: "length"})


@pytest.mark.parametrize(
    ("delta", "size"),
    [
        ('{"content":[{"type":"text","text":"ab"},{"type":"text","text":"c"}]}', 3),
        ('{"content":"\\ud83d"}', 3),  # a lone surrogate: half of a split emoji
        (
            '{"content":"ab","tool_calls":[{"function":{"arguments":{"k":"ü"}}}]}',
            2 + len(b'{"k":"\xc3\xbc"}'),
        ),
        ('{"content":7,"reasoning":"abc"}', 3),
    ],
)
def test_unusual_shapes_are_metered_all_the_same(delta: str, size: int) -> None:
    chunk = f'data: {{"choices":[{{"index":0,"delta":{delta},"finish_reason":"stop"}}]}}\n\n'.encode()
    reader = StreamReader()
    assert reader.on_event(chunk) is chunk
    assert reader.text_bytes == size
    assert reader.finish_reasons == {0: "stop"}
    assert reader.malformed == 0


def test_malformed_events_are_counted() -> None:
    reader, _ = play([b"data: {broken\n\n", b"data: 1\n\n", KEEP_ALIVE, DONE])
    assert reader.malformed == 2


def test_metrics_of_the_withheld_chunk_are_kept() -> None:
    closing = event(choices=[], usage=usage(9, 1), metrics={"queue_time_ms": 1.5})
    reader, out = play([closing])
    assert out == []
    assert reader.metrics == b'{"queue_time_ms":1.5}'


def test_routing_g7_aborted_in_the_queue_is_recognised_from_the_stream() -> None:
    queued = event(choices=[], usage=usage(89, 0, cached_tokens=0, created_cache_tokens=0), metrics={})
    reader, _ = play([ROLE, queued, DONE])
    assert never_scheduled(reader.meter.last_whole, reader.metrics)


CARD = RateCard(((Rates(210_000_000, 50_000_000, 840_000_000, 210_000_000, date(2026, 1, 1)),),))


def test_gateways_a11_usage_beside_an_empty_delta_costs_what_the_whole_answer_costs() -> None:
    figures = usage(16_111, 2, cached_tokens=15_872)
    last = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}], usage=figures)
    reader, _ = play([ROLE, content("ok"), last, DONE])
    whole = parse_usage(
        finish_facts(json.dumps({"choices": [], "usage": figures}).encode()).usage, "inclusive"
    )
    assert reader.usage() == whole
    bill = charge(metered(reader), CARD, date(2026, 11, 30))
    # 239 uncached x 210 + 15 872 cached x 50 + 2 x 840 nano; at the full price it would be 3 384 990
    assert bill.total == 50_190 + 793_600 + 1_680 == 845_470


def test_gateways_a13_stream_and_whole_answer_agree_with_reads_and_writes() -> None:
    figures = usage(98_805, 5_120, cached_tokens=66_360, cache_creation_tokens=32_435)
    reader, _ = play([*TALK, FINISH, event(choices=[], usage=figures), DONE])
    body = json.dumps({"choices": [{"index": 0, "message": {"content": "x"}}], "usage": figures}).encode()
    assert reader.usage() == parse_usage(finish_facts(body).usage, "inclusive")
    dollar = 10**9
    prices = RateCard(((Rates(3 * dollar, 300_000_000, 15 * dollar, 3_750_000_000, date(2026, 1, 1)),),))
    bill = charge(metered(reader), prices, date(2026, 11, 30))
    assert bill.uncached == 10 * 3_000 + 32_435 * 3_750
    assert bill.total == 121_661_250 + 19_908_000 + 76_800_000


def test_gateways_b4_growing_usage_in_several_chunks() -> None:
    reader, _ = play([content("a", usage=usage(5, 1)), content("b", usage=usage(5, 15)), FINISH, DONE])
    assert metered(reader).output == measured(15)


def test_gateways_b5_continuous_usage_then_a_final_null() -> None:
    running = [content("x", usage=usage(48, n)) for n in (10, 50, 100)]
    reader, _ = play([*running, FINISH, event(choices=[], usage=None), DONE])
    assert metered(reader).output == measured(100)
    assert metered(reader).prompt == 48


def test_gateways_b10_api_b12_a_stream_without_usage_is_estimated_never_zero() -> None:
    reader, _ = play([*TALK, FINISH, DONE])
    assert reader.usage().usage is None
    assert ending(reader, clean_eof=True) is Ending.COMPLETED
    # "Hello" + " wörld" = 5 + 7 bytes
    assert estimate_output_tokens(reader.text_bytes, reader.content_events, TokenRatio()) == estimated(3)


def test_gateways_b11_an_explicit_zero_in_the_stream_stays_zero() -> None:
    reader, _ = play([ROLE, FINISH, event(choices=[], usage=usage(1_200, 0, cached_tokens=0)), DONE])
    assert metered(reader) == Usage(measured(1_200), measured(0), measured(0))


def test_gateways_c6_the_last_seen_usage_of_a_cut_stream_is_kept_as_a_lower_bound() -> None:
    terms = StreamTerms(injected_continuous=True)
    reader, _ = play([content("x", usage=usage(300, n)) for n in range(1, 8)], StreamReader(terms))
    assert metered(reader) == Usage(UNKNOWN, UNKNOWN, estimated(7), prompt_total=measured(300))


def test_gateways_c8_an_upstream_that_dies_is_charged_for_what_it_produced() -> None:
    reader, _ = play([content(f"w{n} ", usage=usage(300, n)) for n in range(1, 201)])
    assert ending(reader, clean_eof=False) is Ending.TRUNCATED
    assert metered(reader).output == estimated(200)
    bill = charge(metered(reader), CARD, date(2026, 11, 30))
    assert bill.output == 200 * 840
    assert not bill.exact


def test_usage_of_several_choices() -> None:
    terms = StreamTerms(injected_continuous=True, dialect=UsageDialect(choices=2))
    events = [
        event(choices=[choice(index=n % 2, content="x")], usage=usage(40, 1 + n // 2)) for n in range(6)
    ]
    reader, _ = play(events, StreamReader(terms))
    assert metered(reader).output == estimated(6)
    reader.on_event(event(choices=[], usage=usage(40, 8, cached_tokens=32)))
    assert metered(reader) == Usage(UNKNOWN, UNKNOWN, measured(8), prompt_total=measured(40))


# --- how it ends -------------------------------------------------------------------------------------


def test_gateways_j1_an_upstream_that_drops_is_truncated_and_the_client_is_told() -> None:
    reader, out = play([ROLE, *(content("x") for _ in range(4))])
    assert ending(reader, clean_eof=False) is Ending.TRUNCATED
    assert ending(reader, clean_eof=True) is Ending.TRUNCATED  # a bare close is no better
    last = truncation_event()
    assert DONE not in [*out, last]
    error = json.loads(data_of(last) or b"")["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert last.endswith(b"\n\n")


def test_gateways_j3_an_error_event_inside_a_200_is_an_error_even_before_done() -> None:
    failed = b'data: {"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}\n\n'
    reader, out = play([ROLE, failed, DONE])
    assert out == [ROLE, failed, DONE]
    assert ending(reader, clean_eof=True) is Ending.ERROR
    assert json.loads(reader.error or b"")["code"] == 500


@pytest.mark.parametrize(
    "failed",
    [
        b'data: {"error":"busy"}\n\n',
        b'data: {"object":"error","message":"boom","code":500}\n\n',
        b'event: error\ndata: {"message":"boom"}\n\n',
    ],
)
def test_gateways_j3_other_shapes_of_error_events(failed: bytes) -> None:
    reader, out = play([ROLE, failed])
    assert out == [ROLE, failed]
    assert ending(reader, clean_eof=True) is Ending.ERROR


@pytest.mark.parametrize("empty", [None, "", {}, False])
def test_an_empty_error_member_is_no_error(empty: Any) -> None:
    reader, _ = play([content("x", error=empty), DONE])
    assert ending(reader, clean_eof=True) is Ending.COMPLETED


def test_gateways_j3_a_bare_close_after_the_finish_reason_is_complete_only_if_clean() -> None:
    reader, _ = play([*TALK, FINISH])
    assert ending(reader, clean_eof=True) is Ending.COMPLETED
    assert ending(reader, clean_eof=False) is Ending.TRUNCATED


def test_gateways_j3_done_proves_completion() -> None:
    reader, _ = play([*TALK, FINISH, DONE])
    assert ending(reader, clean_eof=False) is Ending.COMPLETED


def test_gateways_j3_one_unfinished_choice_of_two_is_a_truncation() -> None:
    terms = StreamTerms(dialect=UsageDialect(choices=2))
    reader, _ = play([FINISH, event(choices=[choice(index=1, content="x")])], StreamReader(terms))
    assert ending(reader, clean_eof=True) is Ending.TRUNCATED
    reader.on_event(event(choices=[choice("length", index=1)]))
    assert ending(reader, clean_eof=True) is Ending.COMPLETED
    assert reader.finish_reasons == {0: "stop", 1: "length"}


def test_an_empty_stream_is_a_truncation() -> None:
    assert ending(StreamReader(), clean_eof=True) is Ending.TRUNCATED


def test_error_event_escapes_its_message() -> None:
    made = error_event('a "quote"\nand a line', kind="server_error", code=None)
    assert made.count(b"\n") == 2
    assert json.loads(data_of(made) or b"")["error"]["message"] == 'a "quote"\nand a line'


# --- whole answers -----------------------------------------------------------------------------------


def test_facts_of_a_whole_answer() -> None:
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hé", "reasoning": None},
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
                "finish_reason": "tool_calls",
            },
        ],
        "usage": usage(9, 5, cached_tokens=0),
        "metrics": {"queue_time_ms": 0.1},
        "system_fingerprint": FINGERPRINT,
    }
    facts = finish_facts(json.dumps(body).encode())
    assert facts.finish_reasons == {0: "stop", 1: "tool_calls"}
    assert facts.text_bytes == 3 + 2
    assert facts.error is None
    assert facts.system_fingerprint == FINGERPRINT
    assert json.loads(facts.metrics or b"") == {"queue_time_ms": 0.1}
    assert parse_usage(facts.usage, "inclusive").usage == Usage(measured(9), measured(0), measured(5))


def test_facts_of_completions_and_embeddings() -> None:
    text = finish_facts(b'{"choices":[{"index":0,"text":"abcd","finish_reason":"length"}],"usage":null}')
    assert (text.text_bytes, text.finish_reasons, text.usage) == (4, {0: "length"}, None)
    vector = finish_facts(
        b'{"object":"list","data":[{"embedding":[0.1,0.2]}],"usage":{"prompt_tokens":8,"total_tokens":8}}'
    )
    assert parse_usage(vector.usage, "inclusive").usage is not None
    assert (vector.text_bytes, vector.error) == (0, None)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"error":{"message":"no"}}', b'{"message":"no"}'),
        (b'{"object":"error","message":"no"}', b'{"object":"error","message":"no"}'),
        (b'{"error":null,"choices":[]}', None),
    ],
)
def test_facts_of_an_error_body(body: bytes, error: bytes | None) -> None:
    assert finish_facts(body).error == error


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'"x"'])
def test_a_body_that_is_no_json_object(body: bytes) -> None:
    assert finish_facts(body).malformed
