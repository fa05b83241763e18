"""What reaches the upstream, and what comes back from it: the client's bytes, and none of its headers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.behaviours import plays
from support.client import CHAT
from support.gateway import HELLO, MODEL, STREAM, bearer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

ODD_BODIES = [
    b'{"model":"m","messages":[{"role":"user","content":"hi"}]}',
    b' \r\n\t{ "model" : "m" ,\n "messages" :[ {"role":"user","content":"\\u00e9\\ud83d\\ude00\xc3\xa9"}]}\n',
    b'{"model":"x","model":"m","messages":[],"messages":[{"role":"user","content":1}]}',
    b'{"mod\\u0065l":"m","messages":[{"role":"user","content":"\\"model\\":\\"x\\""}],"temperature":1e-7}',
    b'{"messages":[{"content":null,"role":"user","unknown":[[{}]]}],"top_k":-1,"model":"m","x":1E400}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"seed":123456789012345678901234567890}',
    b'{"model":"m","messages":[{"role":"user","content":"a\xff"}]}',
]


@pytest.mark.parametrize("body", ODD_BODIES)
async def test_an_untouched_body_arrives_byte_for_byte(
    gateway: Gateway, upstream: Upstream, body: bytes
) -> None:
    answer = await gateway.post(body)
    assert (answer.status, upstream.calls[0].body) == (200, body)
    row = await gateway.row()
    assert row.opened.body_bytes == len(body)


@pytest.mark.parametrize("size", [2**16, 2**20, 5 * 2**20])
@pytest.mark.parametrize("stream", [False, True])
async def test_large_bodies_arrive_whole(
    gateway: Gateway, upstream: Upstream, size: int, stream: bool
) -> None:
    document = HELLO | {"stream": stream, "messages": [{"role": "user", "content": "é" * (size // 2)}]}
    body = json.dumps(document, ensure_ascii=False).encode()
    assert (await gateway.post(body)).status == 200
    arrived = upstream.calls[0].body
    if stream:
        added = b',"stream_options":{"include_usage":true}}'
        assert arrived == body[:-1] + added
    else:
        assert arrived == body


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(more=st.dictionaries(st.text(max_size=6).map("x_".__add__), JSON_VALUES, max_size=4), data=st.data())
async def test_unknown_fields_of_any_shape_pass_untouched(
    gateway: Gateway, upstream: Upstream, more: dict[str, Any], data: st.DataObject
) -> None:
    stream = data.draw(st.booleans())
    fields = list((HELLO | {"stream": stream} | more).items())
    document = dict(data.draw(st.permutations(fields)))
    indent = data.draw(st.sampled_from([None, 1]))
    body = json.dumps(document, indent=indent, ensure_ascii=data.draw(st.booleans())).encode(
        "utf-8", "replace"
    )
    assert (await gateway.post(body)).status == 200
    arrived = upstream.calls[-1].body
    if stream:
        assert arrived.startswith(body[: body.rindex(b"}")])
        assert json.loads(arrived) == json.loads(body) | {"stream_options": {"include_usage": True}}
    else:
        assert arrived == body


async def test_asking_for_usage_keeps_the_clients_own_stream_options(
    gateway: Gateway, upstream: Upstream
) -> None:
    options = {"include_usage": False, "x_new": [1]}
    await gateway.post(STREAM | {"stream_options": options})
    assert upstream.calls[0].document["stream_options"] == {"include_usage": True, "x_new": [1]}


async def test_the_engines_own_name_of_a_model_is_spliced_in(
    upstream: Upstream, start_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    gateway = await start_gateway(upstream, served_name="org/engine-name")
    body = b'{ "messages":[{"role":"user","content":"m"}], "model" : "m" , "stream":true }'
    assert (await gateway.post(body)).status == 200
    assert upstream.calls[0].body == (
        b'{ "messages":[{"role":"user","content":"m"}], "model" : "org/engine-name" , "stream":true '
        b',"stream_options":{"include_usage":true}}'
    )
    row = await gateway.row()
    assert row.opened.model == "m"


CLIENT_HEADERS = [
    ("x-request-id", "mine-request"),
    ("X-Session-ID", "mine-session"),
    ("x-vllm-priority", "-1000"),
    ("X-data-parallel-rank", "7"),
    ("endpoint-load-metrics-format", "json"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("cookie", "mine=cookie"),
    ("x-forwarded-for", "6.6.6.6"),
    ("accept-encoding", "gzip, br"),
    ("te", "trailers"),
    ("user-agent", "mine/1.0"),
    ("openai-organization", "mine-org"),
    ("x-ctxgate-task", "mine-task"),
    ("x-stainless-retry-count", "1"),
]


async def test_no_header_of_the_client_reaches_the_upstream(
    upstream: Upstream, start_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    gateway = await start_gateway(upstream, pool={"api_key": "engine-key"})
    await gateway.post(HELLO, headers=[bearer(), *CLIENT_HEADERS])
    (call,) = upstream.calls
    assert {name for name, _ in call.headers} == {
        "host",
        "content-type",
        "accept",
        "accept-encoding",
        "content-length",
        "authorization",
        "x-request-id",
    }
    assert call.header("authorization") == "Bearer engine-key"
    assert call.header("accept-encoding") == "identity"
    assert b"mine" not in call.raw_head
    row = await gateway.row()
    assert call.request_id == row.opened.attempt_id
    assert (row.opened.task, row.opened.task_source) == ("mine-task", "header")


async def test_without_a_pool_key_no_authorization_is_sent(gateway: Gateway, upstream: Upstream) -> None:
    await gateway.post(HELLO)
    assert upstream.calls[0].header("authorization") == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_no_header_of_the_upstream_reaches_the_client(
    gateway: Gateway, upstream: Upstream, stream: bool
) -> None:
    internal = (
        "server: uvicorn",
        "x-request-id: engine-id",
        "set-cookie: engine=1",
        "endpoint-load-metrics: kv=0.5",
        "keep-alive: timeout=5",
        "x-internal: yes",
    )

    def write(exchange: Exchange) -> None:
        if stream:
            exchange.head(200, "text/event-stream; charset=utf-8", *internal)
            exchange.chunk({"content": "x"}, "stop")
            exchange.usage_chunk()
            exchange.done()
        else:
            body = json.dumps(exchange.answer_document()).encode()
            exchange.respond(200, body, "application/json", *internal)

    upstream.play(plays(write))
    answer = await gateway.post(HELLO | {"stream": stream})
    assert b"engine" not in repr(answer.headers).encode()
    names = {name for name, _ in answer.headers}
    assert names & {"server", "set-cookie", "endpoint-load-metrics", "keep-alive", "x-internal"} == set()
    assert answer.header("x-request-id") == (await gateway.row()).opened.request_id
    assert answer.header("x-ctxgate-pool") == "standard"
    assert answer.header("x-ctxgate-replica") == "standard-0"


async def test_a_whole_answer_passes_with_its_cost_in_place(gateway: Gateway, upstream: Upstream) -> None:
    raw = b'{"choices":[{"index":0,"message":{"content":"\\u00e9"},"finish_reason":"length"}] , "x":1e2,' + (
        b'"usage":{"prompt_tokens":40,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":32}}}'
    )
    upstream.play(plays(lambda exchange: exchange.respond(200, raw)))
    answer = await gateway.post(HELLO)
    assert answer.body == raw[:-2] + b',"cost":0.0000172}}'
    assert answer.header("x-ctxgate-cost") == "0.0000172"
    assert answer.header("content-type") == "application/json"
    assert (await gateway.row()).settled.finish_reason == "length"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        ("/v1/completions", {"model": MODEL, "prompt": "x"}),
        ("/v1/embeddings", {"model": MODEL, "input": ["x"], "encoding_format": "base64"}),
    ],
)
async def test_routing_a1_every_surface_takes_and_gives_back_one_count(
    gateway: Gateway, upstream: Upstream, path: str, body: dict[str, Any]
) -> None:
    seen: list[int] = []
    record = gateway.services.fleet.record("standard", "standard-0")

    def write(exchange: Exchange) -> None:
        seen.append(record.in_flight)
        exchange.answer()

    upstream.play(plays(write))
    answer = await gateway.post(body, path)
    assert answer.status == 200
    assert upstream.calls[0].path == path
    assert seen == [1]
    assert record.in_flight == 0
    row = await gateway.row()
    assert row.opened.surface == path.removeprefix("/v1/").replace("chat/completions", "chat")


async def test_embeddings_are_priced_by_their_prompt_alone(gateway: Gateway) -> None:
    await gateway.post({"model": MODEL, "input": "x"}, "/v1/embeddings")
    settled = (await gateway.row()).settled
    assert (settled.usage.prompt, settled.usage.output.value) == (7, 0)
    assert (settled.charge.total, settled.charge.exact) == (7_000, True)


async def test_upstream_connections_are_reused(gateway: Gateway, upstream: Upstream) -> None:
    for _ in range(10):
        await gateway.post(HELLO)
        await gateway.post(STREAM)
    # One for the calls and one for the probe, which may change places.
    assert upstream.accepted <= 2
    assert len({call.connection for call in upstream.calls}) <= 2


async def test_two_teams_with_one_conversation_have_roots_of_their_own(gateway: Gateway) -> None:
    from support.gateway import BETA

    await gateway.post(HELLO)
    await gateway.post(HELLO, headers=[bearer(BETA)])
    first, second = await gateway.rows()
    assert first.opened.task != second.opened.task
    assert (first.opened.team, second.opened.team) == ("alpha", "beta")
