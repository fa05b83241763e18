"""One answer made of several: what is told of its cost, and how much of it is read at a time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway import merged_reply
from ctxgate.gateway.edge import JSON, Reply
from ctxgate.gateway.merged_reply import MergedReply
from ctxgate.inference.call_filter import Hearing
from ctxgate.inference.usage import NOTHING_KNOWN
from support.looking_up import call
from support.upstream import event_bytes, usage

if TYPE_CHECKING:
    from ctxgate.gateway.edge import Headers, Message


class Client:
    """What was sent to a client."""

    def __init__(self) -> None:
        self.body = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.reply = MergedReply(Reply(self.receive, self.send), self.ends)

    async def receive(self) -> Message:
        raise AssertionError("nobody watches")

    async def send(self, message: Message) -> None:
        self.headers += message.get("headers", [])
        self.body += message.get("body", b"")

    async def ends(self) -> None:
        pass


def answer(message: dict[str, Any], reason: str, cost: float | None) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    used = usage() | ({} if cost is None else {"cost": cost})
    return json.dumps({"id": "x", "choices": [choice], "usage": used}).encode()


@pytest.mark.parametrize(("first", "second"), [(None, 3_000), (2_000, None), (2_000, 3_000)])
async def test_a_cost_that_is_unknown_makes_the_sum_unknown(first: int | None, second: int | None) -> None:
    """Never a part of it, and never zero in its place."""
    client = Client()

    async def whole(message: dict[str, Any], reason: str, nano: int | None) -> None:
        cost = None if nano is None else nano / 10**9
        headers: Headers = [JSON]
        if cost is not None:
            headers.append((b"x-ctxgate-cost", f"{cost:.9f}".encode()))
        await client.reply.whole(200, headers, answer(message, reason, cost))

    await whole({"content": None, "tool_calls": [call()]}, "tool_calls", first)
    assert client.reply.goes_on
    client.reply.paid(NOTHING_KNOWN, first)
    client.reply.begin(answers=True)
    await whole({"content": "It is."}, "stop", second)
    told = json.loads(client.body)["usage"]
    names = [name for name, _ in client.headers]
    if first is None or second is None:
        assert "cost" not in told
        assert b"x-ctxgate-cost" not in names
    else:
        assert round(told["cost"] * 10**9) == 5_000
        assert (b"x-ctxgate-cost", b"0.000005") in client.headers
    assert told["prompt_tokens"] == 2 * usage()["prompt_tokens"]


@pytest.mark.integration
async def test_a_long_answer_is_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is needed at its end; read all at once, a long one would hold up everybody."""
    sizes: list[int] = []
    take = Hearing.take

    def counted(self: Hearing, events: bytes) -> None:
        sizes.append(len(events))
        take(self, events)

    monkeypatch.setattr(Hearing, "take", counted)
    client = Client()
    event = event_bytes({"id": "x", "choices": [{"index": 0, "delta": {"content": "word " * 20}}]})
    for _ in range(10_000):
        await client.reply.write(event)
    assert client.reply.spoken.text == "word " * 200_000
    assert len(sizes) > 10
    assert max(sizes) < merged_reply._READ_AT_ONCE + len(event)
