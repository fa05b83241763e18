"""Bodies and headers on the way in: encodings, bounds, hostile input; and the reply's rules."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.gateway.config import Limits
from ctxgate.gateway.edge import ClientGone, Reply, decompress, read_body, read_headers
from ctxgate.gateway.errors import Kind, Refused
from support.client import CHAT
from support.gateway import HELLO, bearer, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ctxgate.gateway.edge import Message
    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

LIMIT = 2**18


def raw_deflate(data: bytes) -> bytes:
    """Deflate without zlib's wrapper, as some clients send it under that name."""
    squeezer = zlib.compressobj(wbits=-15)
    return squeezer.compress(data) + squeezer.flush()


def zstd_of_unknown_size(data: bytes) -> bytes:
    """A zstd frame that does not tell its content's size."""
    squeezer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return squeezer.compress(data) + squeezer.flush()


ENCODERS: dict[str, list[Callable[[bytes], bytes]]] = {
    "gzip": [gzip.compress, lambda data: gzip.compress(data[:3]) + gzip.compress(data[3:])],
    "x-gzip": [gzip.compress],
    "deflate": [zlib.compress, raw_deflate],
    "zstd": [
        zstandard.compress,
        zstd_of_unknown_size,
        lambda data: zstandard.compress(data[:3]) + zstandard.compress(data[3:]),
    ],
}
CASES = [(name, encode) for name, encoders in ENCODERS.items() for encode in encoders]


@given(data=st.binary(max_size=3000), case=st.sampled_from(CASES))
def test_every_encoding_gives_back_what_was_put_in(
    data: bytes, case: tuple[str, Callable[[bytes], bytes]]
) -> None:
    name, encode = case
    assert decompress(encode(data), name, LIMIT) == data


@pytest.mark.parametrize(("name", "encode"), CASES)
def test_the_bound_is_on_what_comes_out_and_is_exact(name: str, encode: Callable[[bytes], bytes]) -> None:
    fits = encode(b"x" * LIMIT)
    assert len(fits) < LIMIT // 20
    assert len(decompress(fits, name, LIMIT)) == LIMIT
    with pytest.raises(Refused) as refused:
        decompress(encode(b"x" * (LIMIT + 1)), name, LIMIT)
    assert refused.value.kind is Kind.BODY_TOO_LARGE


@pytest.mark.parametrize(("name", "encode"), CASES)
def test_a_bomb_is_stopped_near_the_bound(
    name: str, encode: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tracemalloc

    bomb = encode(bytes(64 * LIMIT))
    tracemalloc.start()
    try:
        with pytest.raises(Refused):
            decompress(bomb, name, LIMIT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**24


@pytest.mark.parametrize(("name", "encode"), CASES)
def test_a_cut_or_foreign_body_is_refused(name: str, encode: Callable[[bytes], bytes]) -> None:
    whole = encode(json.dumps(HELLO).encode())
    for broken in (whole[:-3], whole[: len(whole) // 2], whole[:1], b"", b"{}", b"\xff" * 40):
        with pytest.raises(Refused) as refused:
            decompress(broken, name, LIMIT)
        assert (refused.value.kind, refused.value.param) == (Kind.INVALID_JSON, "content-encoding")


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd"])
def test_bytes_after_the_end_are_refused(name: str) -> None:
    with pytest.raises(Refused):
        decompress(ENCODERS[name][0](b"{}") + b"more", name, LIMIT)


async def received(*messages: Message, headers: dict[str, str] | None = None, limit: int = 10) -> bytes:
    """`read_body` on scripted messages."""
    queue = list(messages)

    async def receive() -> Message:
        return queue.pop(0)

    return await read_body(receive, headers or {}, limit)


def piece(data: bytes, *, more: bool = False) -> Message:
    """An ASGI message with a part of the body."""
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_body_is_joined_and_bounded_as_it_comes() -> None:
    assert await received(piece(b"abc", more=True), piece(b"", more=True), piece(b"def")) == b"abcdef"
    assert await received(piece(b"x" * 10)) == b"x" * 10
    for messages in ([piece(b"x" * 11)], [piece(b"x" * 6, more=True), piece(b"x" * 5, more=True)]):
        with pytest.raises(Refused) as refused:
            await received(*messages)
        assert refused.value.kind is Kind.BODY_TOO_LARGE


async def test_a_declared_size_is_refused_before_anything_is_read() -> None:
    with pytest.raises(Refused) as refused:
        await received(headers={"content-length": "11"})
    assert refused.value.kind is Kind.BODY_TOO_LARGE


@pytest.mark.parametrize("before", [[], [piece(b"x", more=True)]])
async def test_a_client_that_leaves_inside_its_body_is_gone(before: list[Message]) -> None:
    with pytest.raises(ClientGone):
        await received(*before, {"type": "http.disconnect"})


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"api-key"])
def test_a_credential_given_twice_is_refused_even_when_equal(name: bytes) -> None:
    with pytest.raises(Refused) as refused:
        read_headers([(name, b"Bearer a"), (b"x", b"y"), (name, b"Bearer a")])
    assert refused.value.kind is Kind.UNKNOWN_KEY


def test_of_another_header_the_last_value_counts() -> None:
    assert read_headers([(b"x-a", b"1"), (b"x-a", b"\xe9")]) == {"x-a": "\u00e9"}


class Client:
    """Both ends of an ASGI connection."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)


async def test_nothing_is_sent_to_a_client_that_has_gone_and_it_is_told_once() -> None:
    client = Client()
    reply = Reply(client.receive, client.send)
    told: list[bool] = []
    reply.on_gone = lambda: told.append(reply.gone)
    reply.watch()
    await reply.start(200, [])
    client.left.set()
    await until(lambda: told)
    await reply.write(b"x")
    await reply.end(b"y")
    assert [message["type"] for message in client.sent] == ["http.response.start"]
    assert told == [True]
    reply.unwatch()
    reply.unwatch()


async def test_a_client_that_leaves_after_the_end_is_not_gone() -> None:
    client = Client()
    reply = Reply(client.receive, client.send)
    reply.watch()
    await reply.whole(200, [], b"body")
    await reply.end(b"again")
    client.left.set()
    await asyncio.sleep(0)
    assert not reply.gone
    assert [message.get("body") for message in client.sent] == [None, b"body"]
    assert client.sent[0]["headers"] == [(b"content-length", b"4")]
    reply.unwatch()


@pytest.mark.parametrize(("name", "encode"), CASES)
async def test_an_encoded_request_reaches_the_upstream_decoded(
    gateway: Gateway, upstream: Upstream, name: str, encode: Callable[[bytes], bytes]
) -> None:
    plain = json.dumps(HELLO).encode()
    answer = await gateway.post(encode(plain), headers=[bearer(), ("content-encoding", name.upper())])
    assert answer.status == 200
    assert upstream.calls[0].body == plain
    assert upstream.calls[0].header("content-encoding") == ""


@pytest.mark.parametrize("name", ["br", "compress", "gzip, gzip", "gzip;q=1", "x"])
async def test_an_unknown_encoding_is_415(gateway: Gateway, upstream: Upstream, name: str) -> None:
    answer = await gateway.post(HELLO, headers=[bearer(), ("content-encoding", name)])
    assert (answer.status, answer.error["param"]) == (415, "content-encoding")
    assert answer.error["code"] == "unsupported_encoding"
    assert (upstream.calls, await gateway.rows()) == ([], [])


async def small(upstream: Upstream, start: Start) -> Gateway:
    """A gateway that takes bodies of up to 1000 bytes."""
    return await start(upstream, limits=Limits(max_body_bytes=1000))


@pytest.mark.parametrize("encode", [lambda data: data, gzip.compress, zstandard.compress])
async def test_an_oversize_body_is_413_whether_declared_or_found(
    upstream: Upstream, start_gateway: Start, encode: Callable[[bytes], bytes]
) -> None:
    gateway = await small(upstream, start_gateway)
    body = encode(json.dumps(HELLO | {"x": "y" * 1000}).encode())
    name = {0x1F: "gzip", 0x28: "zstd"}.get(body[0], "identity")
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    for sent, more in ((body, []), (chunked, [("transfer-encoding", "chunked")])):
        answer = await gateway.post(sent, headers=[bearer(), ("content-encoding", name), *more])
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert answer.header("connection") == "close"
    assert (upstream.calls, await gateway.rows()) == ([], [])


async def test_an_oversize_declaration_is_answered_before_the_body_is_sent(
    upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await small(upstream, start_gateway)
    async with gateway.wire() as wire:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: {bearer()[1]}\r\ncontent-length: 1001\r\n\r\n"
        )
        wire.send(head.encode())
        assert (await wire.answer()).status == 413
        assert await wire.closed()


async def test_an_endless_chunked_body_is_cut_off_at_the_limit(
    upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await small(upstream, start_gateway)
    async with gateway.wire() as wire:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: {bearer()[1]}\r\n"
        wire.send(head.encode() + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            wire.send(b"190\r\n" + b" " * 400 + b"\r\n")
        assert (await wire.answer()).status == 413


async def test_a_body_of_exactly_the_limit_is_taken(upstream: Upstream, start_gateway: Start) -> None:
    gateway = await small(upstream, start_gateway)
    body = json.dumps(HELLO).encode()
    assert (await gateway.post(body + b" " * (1000 - len(body)))).status == 200
    assert len(upstream.calls[0].body) == 1000


async def test_a_stranger_is_refused_before_its_body_is_read(gateway: Gateway, upstream: Upstream) -> None:
    async with gateway.wire() as wire:
        wire.send(f"POST {CHAT} HTTP/1.1\r\nhost: g\r\ncontent-length: 60000000\r\n\r\n".encode())
        answer = await wire.answer()
        assert (answer.status, answer.error["code"]) == (401, "missing_api_key")
        assert await wire.closed()


@pytest.mark.parametrize(("secret", "continues"), [(bearer()[1], True), ("Bearer no", False)])
async def test_expect_100_continue_is_answered_only_when_the_body_is_wanted(
    gateway: Gateway, secret: str, continues: bool
) -> None:
    body = json.dumps(HELLO).encode()
    async with gateway.wire() as wire:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: {secret}\r\nexpect: 100-continue\r\n"
        wire.send(head.encode() + b"content-length: %d\r\n\r\n" % len(body))
        interim = await wire.head()
        assert interim.status == (100 if continues else 401)
        if continues:
            wire.send(body)
            assert (await wire.answer()).status == 200


async def test_a_connection_is_kept_over_requests_of_every_kind(gateway: Gateway) -> None:
    async with gateway.wire() as wire:
        for body, status in ((HELLO, 200), (b"{", 400), (HELLO | {"stream": True}, 200), (HELLO, 200)):
            wire.request(body=body, headers=[bearer()])
            assert (await wire.answer()).status == status
        wire.request("/health")
        assert (await wire.answer()).status == 200
        wire.request("/nowhere")
        assert (await wire.answer()).status == 404
    assert len(await gateway.rows()) == 3


async def test_pipelined_requests_are_answered_in_order(gateway: Gateway) -> None:
    async with gateway.wire() as wire:
        for task in ("one", "two", "three"):
            wire.request(body=HELLO, headers=[bearer(), ("x-ctxgate-task", task)])
        assert [(await wire.answer()).header("x-ctxgate-task") for _ in range(3)] == ["one", "two", "three"]


async def test_http_1_0_is_answered_and_closed(gateway: Gateway) -> None:
    body = json.dumps(HELLO).encode()
    async with gateway.wire() as wire:
        head = f"POST {CHAT} HTTP/1.0\r\nauthorization: {bearer()[1]}\r\ncontent-length: {len(body)}\r\n\r\n"
        wire.send(head.encode() + body)
        assert (await wire.answer()).status == 200
        assert await wire.closed()


def test_a_reply_of_events_is_known_by_its_headers() -> None:
    from ctxgate.gateway.edge import EVENT_STREAM, JSON

    async def nothing(*_: Any) -> Any:
        return None

    for headers, streams in (([*EVENT_STREAM], True), ([JSON], False)):
        reply = Reply(nothing, nothing)
        asyncio.run(reply.start(200, headers))
        assert reply.streams is streams
