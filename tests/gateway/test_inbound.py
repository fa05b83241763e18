"""What is checked of a body: each wrong field is a 400 that names it, and costs nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.gateway.errors import Kind, Refused, body_of
from ctxgate.gateway.flow import Surface
from ctxgate.gateway.inbound import MAX_MESSAGES, check_engine_fields, read_inbound
from ctxgate.inference import wire
from ctxgate.inference.wire_fields import ENGINE_FIELDS
from support.behaviours import plays
from support.client import CHAT
from support.gateway import HELLO, MODEL, bearer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Upstream

PATHS = {Surface.CHAT: CHAT, Surface.COMPLETIONS: "/v1/completions", Surface.EMBEDDINGS: "/v1/embeddings"}
COMPLETION = {"model": MODEL, "prompt": "x"}
EMBEDDING = {"model": MODEL, "input": "x"}
NO_NAME: list[Any] = [7, 1.5, True, [], {}, "", "x" * 5000]
NO_LIST: list[Any] = [7, "hi", {}, True, []]
NO_FLAG: list[Any] = [1, "true", [], {}, 0.0]
NO_OPTIONS: list[Any] = [1, "x", [], True]
NO_COUNT: list[Any] = [0, -1, 1.5, "16", True, [], {}]
SET: list[Any] = [1, True, "x", {"a": 1}, [1]]
C, T, E = Surface.CHAT, Surface.COMPLETIONS, Surface.EMBEDDINGS
STREAMED: dict[str, Any] = {"stream": True}
# surface, changes to a valid body (... removes), kind, field named
WRONG: list[tuple[Surface, dict[str, Any], Kind, str]] = [
    (C, STREAMED | {"stream_options": {"x": "y" * 2000}}, Kind.INVALID_VALUE, "stream_options"),
    (C, {"model": ...}, Kind.MISSING_FIELD, "model"),
    (C, {"model": None}, Kind.MISSING_FIELD, "model"),
    *[(C, {"model": value}, Kind.INVALID_VALUE, "model") for value in NO_NAME],
    (C, {"model": "nowhere"}, Kind.MODEL_NOT_FOUND, "model"),
    (C, {"messages": ...}, Kind.MISSING_FIELD, "messages"),
    (C, {"messages": None}, Kind.MISSING_FIELD, "messages"),
    *[(C, {"messages": value}, Kind.INVALID_VALUE, "messages") for value in NO_LIST],
    (C, {"messages": [{"role": "user"}, "hi"]}, Kind.INVALID_VALUE, "messages[1]"),
    (C, {"messages": [None]}, Kind.INVALID_VALUE, "messages[0]"),
    (C, {"messages": [[]]}, Kind.INVALID_VALUE, "messages[0]"),
    (T, {"prompt": ...}, Kind.MISSING_FIELD, "prompt"),
    (T, {"prompt": None}, Kind.MISSING_FIELD, "prompt"),
    (T, {"prompt": None, "prompt_embeds": None}, Kind.MISSING_FIELD, "prompt"),
    (T, {"prompt": None, "prompt_embeds": "AAAA"}, Kind.FORBIDDEN_FIELD, "prompt_embeds"),
    (E, {"input": ...}, Kind.MISSING_FIELD, "input"),
    (E, {"input": None, "messages": None}, Kind.MISSING_FIELD, "input"),
    (E, {"input": ..., "messages": []}, Kind.INVALID_VALUE, "messages"),
    (E, {"input": ..., "messages": ["hi"]}, Kind.INVALID_VALUE, "messages[0]"),
    (E, STREAMED, Kind.INVALID_VALUE, "stream"),
    *[(C, {"stream": value}, Kind.INVALID_VALUE, "stream") for value in NO_FLAG],
    (C, {"stream_options": {"include_usage": True}}, Kind.INVALID_VALUE, "stream_options"),
    *[
        (C, STREAMED | {"stream_options": value}, Kind.INVALID_VALUE, "stream_options")
        for value in NO_OPTIONS
    ],
    *[
        (C, STREAMED | {"stream_options": {name: value}}, Kind.INVALID_VALUE, f"stream_options.{name}")
        for name in ("include_usage", "continuous_usage_stats")
        for value in NO_FLAG
    ],
    *[
        (surface, {name: value}, Kind.INVALID_VALUE, name)
        for surface in (C, T)
        for name in ("max_tokens", "max_completion_tokens", "n", "best_of")
        for value in NO_COUNT
    ],
    *[(C, {name: value}, Kind.FORBIDDEN_FIELD, name) for name in sorted(ENGINE_FIELDS) for value in SET],
]


def changed(surface: Surface, changes: dict[str, Any]) -> dict[str, Any]:
    """A valid body of a surface, changed."""
    valid: dict[Surface, dict[str, Any]] = {C: HELLO, T: COMPLETION, E: EMBEDDING}
    body = valid[surface] | changes
    return {name: value for name, value in body.items() if value is not ...}


async def test_every_wrong_field_is_named_and_nothing_is_booked_or_sent(
    gateway: Gateway, upstream: Upstream
) -> None:
    async with gateway.wire() as client:
        for surface, changes, kind, field in WRONG:
            client.request(PATHS[surface], changed(surface, changes), [bearer()])
            answer = await client.answer()
            assert answer.status == (404 if kind is Kind.MODEL_NOT_FOUND else 400), changes
            assert answer.error["param"] == field, changes
            assert answer.error["type"] == "invalid_request_error"
            assert field.split("[")[0].split(".")[0] in answer.error["message"] or field == "stream"
            assert answer.header("x-request-id").startswith("req_")
    assert upstream.calls == []
    assert await gateway.rows() == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{",
        b'{"model":"m"',
        b"{'model':'m'}",
        b'{"model":"m"}{}',
        b'{"model":"m",}',
        b'{"model":"m","messages":[{"role":"user"},]}',
        b'\xef\xbb\xbf{"model":"m"}',
        '{"model":"m"}'.encode("utf-16"),
        b'{"model":"m","temperature":NaN}',
        b'{"model":"m","temperature":-Infinity}',
        b'{"model":"m","x":01}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","x":' + b"[" * 100_000,
        b'{"model":"m","x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b"\x00" * 100,
    ],
)
async def test_what_is_no_json_is_400_and_never_500(gateway: Gateway, upstream: Upstream, raw: bytes) -> None:
    answer = await gateway.post(raw)
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")
    assert len(answer.body) < 500
    assert (upstream.calls, await gateway.rows()) == ([], [])


@pytest.mark.parametrize("raw", [b"[]", b"7", b'"x"', b"null", b"true", b'["model"]'])
async def test_json_that_is_no_object_is_400(gateway: Gateway, raw: bytes) -> None:
    answer = await gateway.post(raw)
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")


@pytest.mark.parametrize(
    "template",
    [
        '{"model":"m","messages":[{"role":"user"}],"metadata":%s}',
        '{"model":"m","messages":[{"role":"user"}],"user":%s}',
        '{"model":"m","messages":[{"role":%s}]}',
        '{"model":"m","messages":[{"content":%s}]}',
        '{"model":"m","messages":%s}',
        '{"model":%s,"messages":[{"role":"user"}]}',
        '{"model":"m","messages":[{"role":"user"}],"stream":%s}',
        '{"model":"m","messages":[{"role":"user"}],"stream":true,"stream_options":{"x":%s}}',
        '{"model":"m","messages":[{"role":"user"}],"n":%s}',
        '{"model":"m","messages":[{"role":"user"}],"unknown":%s}',
        '{"model":"m","messages":[{"role":"user"}],"cache_salt":%s}',
    ],
)
async def test_deep_nesting_near_the_parsers_limit_is_never_an_internal_error(
    gateway: Gateway, upstream: Upstream, template: str
) -> None:
    statuses = set()
    upstream.default = plays(lambda exchange: exchange.respond(200, b"{}"))
    async with gateway.wire() as client:
        for depth in range(900, 1001):
            client.request(body=(template % ("[" * depth + "]" * depth)).encode(), headers=[bearer()])
            statuses.add((await client.answer()).status)
    assert statuses <= {200, 400}


@pytest.mark.parametrize("value", [1, 2**31, 10**30])
async def test_api_a17_a_huge_output_limit_passes_to_the_engine(
    gateway: Gateway, upstream: Upstream, value: int
) -> None:
    assert (await gateway.post(HELLO | {"max_tokens": value})).status == 200
    assert upstream.calls[0].document["max_tokens"] == value


async def test_a_number_beyond_any_float_where_an_integer_belongs_is_400(gateway: Gateway) -> None:
    for raw in (b"1e400", b"-1e400", b"1" * 5000):
        body = b'{"model":"m","messages":[{"role":"user"}],"max_tokens":' + raw + b"}"
        answer = await gateway.post(body)
        assert (answer.status, answer.error["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("part", [b"{}", b"[]", b'""'])
def test_a_large_body_of_very_many_empty_parts_is_refused_unparsed(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxgate.gateway.inbound._LARGE", 2**12)
    monkeypatch.setattr("ctxgate.gateway.inbound._MOST_PARTS", 2**11)
    raw = b'{"model":"m","messages":[%s]}' % b",".join([part] * 2**12)
    with pytest.raises(Refused) as refused:
        read_inbound("r", Surface.CHAT, {}, raw, 0)
    assert refused.value.kind is Kind.BODY_TOO_LARGE


@pytest.mark.parametrize("part", [b"{}", b"[]", b"0", b'{"role":"user"}'])
@pytest.mark.parametrize("surface", [Surface.CHAT, Surface.EMBEDDINGS])
def test_the_number_of_messages_is_bounded_before_they_are_looked_at(surface: Surface, part: bytes) -> None:
    raw = b'{"model":"m","messages":[%s]}' % b",".join([part] * (MAX_MESSAGES + 1))
    assert len(raw) < 2**23
    with pytest.raises(Refused) as refused:
        read_inbound("r", surface, {}, raw, 0)
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert "65536" in refused.value.message


def test_as_many_messages_as_the_bound_allows_are_taken_and_the_first_wrong_one_is_named() -> None:
    parts = [b"{}"] * MAX_MESSAGES
    raw = b'{"model":"m","messages":[%s]}'
    inbound = read_inbound("r", Surface.CHAT, {}, raw % b",".join(parts), 0)
    assert len(inbound.messages) == 65_536
    parts[70] = parts[900] = b"1"
    with pytest.raises(Refused) as refused:
        read_inbound("r", Surface.CHAT, {}, raw % b",".join(parts), 0)
    assert refused.value.param == "messages[70]"


async def test_vllms_own_ways_to_give_a_prompt_reach_the_engine(
    upstream: Upstream, start_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    gateway = await start_gateway(upstream, granted=frozenset({"prompt_embeds"}))
    embedded = {"model": MODEL, "messages": HELLO["messages"]}
    given = {"model": MODEL, "prompt": None, "prompt_embeds": "AAAA"}
    assert (await gateway.post(embedded, PATHS[E])).status == 200
    assert (await gateway.post(given, PATHS[T])).status == 200
    assert [call.document for call in upstream.calls] == [embedded, given]


def test_a_large_image_is_no_such_body() -> None:
    image = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}' % (b"A" * 2**24)
    raw = b'{"model":"m","messages":[{"role":"user","content":[%s]}]}' % image
    assert read_inbound("r", Surface.CHAT, {}, raw, 0).body.raw is raw


async def test_many_members_are_read(gateway: Gateway, upstream: Upstream) -> None:
    more = ",".join(f'"k{number}":0' for number in range(100_000))
    body = f'{{"model":"m","stream":true,"messages":[{{"role":"user"}}],{more}}}'.encode()
    assert (await gateway.post(body)).status == 200
    assert upstream.calls[0].body == body[:-1] + b',"stream_options":{"include_usage":true}}'


@pytest.mark.parametrize(
    ("value", "granted", "passes"),
    [
        ("null", False, True),
        ("false", False, True),
        ("0", False, True),
        ("true", False, False),
        ('""', False, False),
        ("0.0", False, False),
        ("5", True, True),
    ],
)
def test_engine_fields_pass_only_when_harmless_or_granted(value: str, granted: bool, passes: bool) -> None:
    body = wire.parse(f'{{"priority":{value}}}'.encode())
    allowed = frozenset({"priority"}) if granted else frozenset()
    if passes:
        check_engine_fields(body, allowed)
        return
    with pytest.raises(Refused) as refused:
        check_engine_fields(body, allowed)
    assert (refused.value.kind, refused.value.param) == (Kind.FORBIDDEN_FIELD, "priority")


async def test_a_granted_engine_field_reaches_the_engine(
    upstream: Upstream, start_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    gateway = await start_gateway(upstream, granted=frozenset({"ignore_eos"}))
    assert (await gateway.post(HELLO | {"ignore_eos": True})).status == 200
    assert upstream.calls[0].document["ignore_eos"] is True
    assert (await gateway.post(HELLO | {"min_tokens": 3})).status == 400


def test_an_engine_field_hidden_behind_an_escape_or_a_repetition_is_found() -> None:
    for raw in (
        b'{"pri\\u006frity":5}',
        b'{"priority":0,"priority":5}',
        b'{"priority":0,"pri\\u006frity":5}',
    ):
        with pytest.raises(Refused):
            check_engine_fields(wire.parse(raw), frozenset())
    # What vLLM's reader takes is the last one, and that is harmless.
    check_engine_fields(wire.parse(b'{"priority":5,"priority":0}'), frozenset())


@given(st.text(max_size=40))
def test_a_refusal_never_carries_a_fields_value(value: str) -> None:
    secret = "canary" + value
    for name, kind in (("n", str), ("stream", str), ("messages", str), ("stream_options", str)):
        raw = json.dumps(HELLO | {"stream": True} | {name: kind(secret)}).encode()
        with pytest.raises(Refused) as refused:
            read_inbound("r", Surface.CHAT, {}, raw, 0)
        assert b"canary" not in body_of(refused.value)
        assert refused.value.param == name


def test_what_is_read_of_a_body() -> None:
    raw = b'{"messages":[ {"role":"user"} ,{"x":1}], "model":"m","stream":true}'
    inbound = read_inbound("req_1", Surface.CHAT, {"a": "b"}, raw, 17)
    assert [bytes(message) for message in inbound.messages] == [b'{"role":"user"}', b'{"x":1}']
    assert (inbound.model, inbound.stream, inbound.received_at_us) == ("m", True, 17)
    assert (inbound.request_id, inbound.headers, inbound.body.raw) == ("req_1", {"a": "b"}, raw)
    assert b"user" not in repr(inbound).encode()
