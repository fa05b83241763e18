"""Properties of the metering core over generated records and streams."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference.chat_relay import StreamRelay
from ctxgate.inference.chat_stream import StreamReader, StreamTerms, finish_facts
from ctxgate.inference.chunk_edit import top_level, without_member
from ctxgate.inference.estimate import TokenRatio, fill_unknown
from ctxgate.inference.rates import RateCard, Rates, charge, format_usd
from ctxgate.inference.sse import SseSplitter, data_of
from ctxgate.inference.usage import UNKNOWN, Count, Usage, estimated, measured
from ctxgate.inference.usage_parse import parse_usage

DAY = date(2026, 11, 30)
TOKENS = st.integers(0, 2_000_000)
RATE = st.integers(0, 10**12)


@st.composite
def cards(draw: st.DrawFn) -> RateCard:
    edges = sorted(draw(st.sets(st.integers(1, 2_000_000), max_size=3)))
    tiers = [
        Rates(draw(RATE), draw(RATE), draw(RATE), draw(RATE), date(2026, 1, 1), edge) for edge in (0, *edges)
    ]
    return RateCard((tuple(tiers),))


@st.composite
def truths(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """P, C, W, O with C + W <= P."""
    cached, written, fresh = draw(TOKENS), draw(TOKENS), draw(TOKENS)
    return cached + written + fresh, cached, written, draw(TOKENS)


def inclusive(prompt: int, cached: int, written: int, output: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached, "created_cache_tokens": written},
    }


def exclusive(prompt: int, cached: int, written: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached - written,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": output,
    }


# --- money -------------------------------------------------------------------------------------------


@given(truths(), cards())
def test_api_b19_each_component_is_within_half_a_nano_of_the_exact_amount(
    truth: tuple[int, int, int, int], prices: RateCard
) -> None:
    prompt, cached, written, output = truth
    record = Usage(measured(prompt - cached), measured(cached), measured(output), written=measured(written))
    bill = charge(record, prices, DAY)
    reached = [tier for tier in prices.versions[0] if prompt > tier.above_prompt_tokens]
    rates = reached[-1] if reached else prices.versions[0][0]
    fresh = prompt - cached - written
    exact = (
        Fraction(fresh * rates.uncached + written * rates.written, 10**6),
        Fraction(cached * rates.cached, 10**6),
        Fraction(output * rates.output, 10**6),
    )
    parts = (bill.uncached, bill.cached, bill.output)
    for part, amount in zip(parts, exact, strict=True):
        assert part is not None
        assert Fraction(-1, 2) <= amount - part < Fraction(1, 2)  # the nearest; a half goes up
    assert bill.total == sum(part for part in parts if part is not None)
    assert bill.exact


@given(truths(), cards())
def test_gateways_a7_api_b7_both_conventions_cost_the_same(
    truth: tuple[int, int, int, int], prices: RateCard
) -> None:
    one = parse_usage(inclusive(*truth), "inclusive")
    other = parse_usage(exclusive(*truth), "exclusive")
    assert one.usage is not None
    assert one == other
    assert charge(one.usage, prices, DAY).total is not None


COUNTS = st.one_of(st.just(UNKNOWN), TOKENS.map(measured), TOKENS.map(estimated))


@given(COUNTS, COUNTS, COUNTS, cards())
def test_a_total_is_the_sum_of_the_known_parts(
    uncached: Count, cached: Count, output: Count, prices: RateCard
) -> None:
    bill = charge(Usage(uncached, cached, output), prices, DAY)
    parts = (bill.uncached, bill.cached, bill.output)
    for count, part in zip((uncached, cached, output), parts, strict=True):
        assert (part is None) == (count.value is None)
    known = [part for part in parts if part is not None]
    assert bill.total == (sum(known) if known else None)
    assert bill.exact == all(c.certainty == "measured" for c in (uncached, cached, output))


@given(st.integers(-(10**20), 10**20))
def test_format_usd_reads_back_exactly(nano: int) -> None:
    with_context = Decimal(format_usd(nano)).as_integer_ratio()
    assert Fraction(*with_context) == Fraction(nano, 10**9)


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.none() | TOKENS, st.none() | TOKENS, st.none() | TOKENS)
def test_filling_never_touches_a_known_count(
    uncached: Count,
    cached: Count,
    output: Count,
    total: Count,
    prompt: int | None,
    hit: int | None,
    more: int | None,
) -> None:
    record = Usage(uncached, cached, output, prompt_total=total)
    filled = fill_unknown(record, prompt=prompt, cached=hit, output=more)
    for before, after in ((uncached, filled.uncached), (cached, filled.cached), (output, filled.output)):
        assert after == before if before.value is not None else after.certainty != "measured"


@given(st.lists(st.tuples(st.integers(-10, 10**7), st.integers(-10, 10**6)), max_size=40))
def test_a_ratio_stays_within_what_text_can_be(pairs: list[tuple[int, int]]) -> None:
    ratio = TokenRatio()
    for size, tokens in pairs:
        ratio = ratio.updated(size, tokens)
    assert 0.25 <= ratio.bytes_per_token <= 64
    assert len(ratio.samples) <= 15


# --- usage objects -----------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    [
        "prompt_tokens", "input_tokens", "completion_tokens", "output_tokens", "total_tokens",
        "prompt_tokens_details", "input_tokens_details", "completion_tokens_details", "iterations",
        "cached_tokens", "created_cache_tokens", "cache_write_tokens", "cache_read_input_tokens",
        "cache_creation_input_tokens", "reasoning_tokens",
    ]
)  # fmt: skip
VALUES = st.integers(-2, 50) | JSON
LEVEL = st.dictionaries(FIELDS, VALUES, max_size=6)
RECORDS = st.dictionaries(FIELDS, VALUES | LEVEL | st.lists(LEVEL, max_size=3), max_size=10)


@given(RECORDS, st.sampled_from(["inclusive", "exclusive"]), st.booleans())
def test_gateways_a8_whatever_comes_no_record_is_negative_or_contradicts_itself(
    record: dict[str, Any], convention: str, absent_is_zero: bool
) -> None:
    parsed = parse_usage(record, convention, cached_absent_is_zero=absent_is_zero)
    if parsed.usage is None:
        assert parsed.anomalies
        return
    usage = parsed.usage  # Count and Usage refuse negative figures and parts beyond their whole
    if usage.uncached.value is not None and usage.cached.value is not None:
        assert usage.prompt_total == UNKNOWN


@given(st.binary(max_size=60), st.sampled_from(["inclusive", "exclusive"]))
def test_parsing_bytes_never_raises(raw: bytes, convention: str) -> None:
    parse_usage(raw, convention)


# --- streams -----------------------------------------------------------------------------------------

LINES = st.sampled_from(
    [b"data: 1", b"data: {}", b"data", b": note", b"event: x", b"", b"\xef\xbb\xbf", b"data: \xff", b"x"]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
STREAMS = st.lists(st.tuples(LINES, ENDS), max_size=12).map(lambda ls: b"".join(a + b for a, b in ls))


@st.composite
def chunked(draw: st.DrawFn, streams: st.SearchStrategy[bytes]) -> list[bytes]:
    stream = draw(streams)
    cuts = sorted(draw(st.sets(st.integers(0, len(stream)), max_size=10)) | {0, len(stream)})
    return [stream[a:b] for a, b in pairwise(cuts)]


def split(chunks: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = SseSplitter()
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    return events, splitter.tail()


@given(chunked(STREAMS))
def test_context_r4_the_splitter_keeps_every_byte_and_chunk_borders_do_not_show(chunks: list[bytes]) -> None:
    stream = b"".join(chunks)
    events, tail = split(chunks)
    assert b"".join(events) + tail == stream
    assert (events, tail) == split([stream])
    assert (events, tail) == split([bytes([byte]) for byte in stream])


def reference_payloads(stream: bytes) -> list[bytes]:
    """The payloads by the standard's own algorithm, line by line."""
    payloads: list[bytes] = []
    data: list[bytes] = []
    for line in stream.removeprefix(b"\xef\xbb\xbf").splitlines():
        if not line:
            payloads += [b"\n".join(data)] if data else []
            data = []
        elif line.partition(b":")[0] == b"data":
            data.append(line.partition(b":")[2].removeprefix(b" "))
    return payloads


@given(STREAMS)
def test_payloads_are_those_of_the_standards_algorithm(stream: bytes) -> None:
    plain = stream.replace(b"\xef\xbb\xbf", b"")
    events, tail = split([plain])
    found = [payload for event in [*events, tail] if (payload := data_of(event)) is not None]
    # the standard drops an event without its blank line; the tail is looked at all the same
    expected = reference_payloads(plain)
    assert found[: len(expected)] == expected
    assert len(found) - len(expected) <= 1


TEXTS = st.text(max_size=20)


def chunk_of(text: str, finish: str | None = None) -> bytes:
    delta = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "c", "choices": [delta]}).encode() + b"\n\n"


@given(truths(), st.lists(TEXTS, max_size=8), st.booleans(), st.booleans(), st.data())
def test_gateways_a11_a13_stream_and_whole_answer_are_metered_alike(
    truth: tuple[int, int, int, int], texts: list[str], wants: bool, beside: bool, data: st.DataObject
) -> None:
    figures = inclusive(*truth)
    chunks = [chunk_of(text) for text in texts] + [chunk_of("", "stop")]
    last = {"id": "c", "choices": [{"index": 0, "delta": {}}] if beside else [], "usage": figures}
    closing = b"data: " + json.dumps(last).encode() + b"\n\n"
    stream = b"".join([*chunks, closing, b"data: [DONE]\n\n"])
    reader = StreamReader(StreamTerms(client_wants_usage=wants))
    relay = StreamRelay(reader)
    out = b"".join(relay.take(piece) for piece in data.draw(chunked(st.just(stream)))) + relay.end_marker

    message = {"index": 0, "message": {"content": "".join(texts)}, "finish_reason": "stop"}
    facts = finish_facts(json.dumps({"choices": [message], "usage": figures}).encode())
    assert reader.usage() == parse_usage(facts.usage, "inclusive")
    if all(json.dumps(text) == f'"{text}"' for text in texts):  # skimmed text is counted as it is written
        assert reader.text_bytes == facts.text_bytes
    assert reader.finish_reasons == facts.finish_reasons
    if wants:
        assert out == stream
    else:
        assert b'"usage":' not in out  # inside a text its quotes are escaped
        assert out.startswith(b"".join(chunks))


@given(st.binary(max_size=80).map(lambda tail: b"data: " + tail + b"\n\n"))
def test_an_event_without_usage_is_forwarded_as_it_is(event: bytes) -> None:
    reader = StreamReader(StreamTerms(injected_continuous=True))
    assert reader.on_event(event) is event


KEYS = st.sampled_from(["usage", "choices", "a", 'q"uote', "x:y", "é"]) | st.text(max_size=4)
OBJECTS = st.dictionaries(KEYS, JSON | st.dictionaries(KEYS, JSON, max_size=3), max_size=5)


@given(OBJECTS, st.sampled_from([(",", ":"), (", ", ": "), (",\n", "\t: ")]), st.booleans())
def test_cutting_a_member_leaves_the_others_as_they_were(
    record: dict[str, Any], separators: tuple[str, str], ascii_only: bool
) -> None:
    payload = json.dumps(record, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "replace")
    assert [member.name for member in top_level(payload)] == list(json.loads(payload))
    if "usage" not in record:
        return
    value = json.dumps(record["usage"], separators=separators, ensure_ascii=ascii_only)
    cut = without_member(payload, "usage", msgspec.Raw(value.encode("utf-8", "replace")))
    rest = {name: item for name, item in record.items() if name != "usage"}
    assert cut == json.dumps(rest, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "replace")
