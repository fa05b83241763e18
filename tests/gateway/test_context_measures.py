"""What counts as how long: pictures, and tools that change, in front of a scripted engine of 4,096 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Context
from support.gateway import MODEL, Gateway, until
from support.long_chats import long_chat, requests_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.upstream import Exchange, Upstream

    StartGateway = Callable[..., Awaitable[Gateway]]

pytestmark = pytest.mark.integration

SMALL = Context(tail_tokens=800, summary_tokens=300, summarizer="off", recall=False)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo/" * 8500}}
LOOK = {"role": "user", "content": [{"type": "text", "text": "What is wrong here?"}, PICTURE]}
SHOT = {"role": "tool", "tool_call_id": "c8", "content": "Done.", "files": [{"data": "iVBORw0KGgo/" * 8500}]}


def schemas(count: int) -> list[dict[str, Any]]:
    """Tools of about 20 tokens each, in four bytes of JSON per token."""
    return [
        {"type": "function", "function": {"name": f"tool_{at:03}", "description": "does one thing"}}
        for at in range(count)
    ]


async def sent(gateway: Gateway, upstream: Upstream, messages: list[dict[str, Any]], **more: Any) -> Any:
    """The messages that the engine got."""
    answer = await gateway.post({"model": MODEL, "messages": messages, "max_tokens": 2, **more})
    assert answer.status == 200
    compactor = gateway.services.context.compactor
    await until(lambda: not compactor.busy and not gateway.services.background)
    return upstream.calls[-1].document["messages"]


def measured(tokens: int) -> Callable[[Exchange], Awaitable[None]]:
    """An engine that counts so many tokens of prompt."""

    async def play(exchange: Exchange) -> None:
        exchange.answer(prompt=tokens, cached=0)

    return play


@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.parametrize("picture", [LOOK, SHOT])
async def test_context_g2_g3_a_picture_pushes_nothing_out(
    upstream: Upstream, start_gateway: StartGateway, picture: dict[str, Any], at_first: bool
) -> None:
    """Of 100 KB: as text it would be six windows long; the messages without it need about 2,200 tokens."""
    gateway = await start_gateway(upstream, context=SMALL)
    await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
    history = long_chat(9)
    more = [*history, picture] if picture is LOOK else [*history[:-1], picture]
    upstream.default = measured(2200)
    if not at_first:
        assert await sent(gateway, upstream, history[:-1] if picture is SHOT else history) is not None
    upstream.default = measured(3200)
    assert await sent(gateway, upstream, more) == more


async def test_context_g3_masking_keeps_the_newest_picture_and_drops_older_rounds(
    upstream: Upstream, start_gateway: StartGateway
) -> None:
    """About 5,000 tokens without the picture: older results give way, and the picture goes out whole."""
    gateway = await start_gateway(upstream, context=SMALL)
    await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
    history = [*long_chat(24), LOOK]
    out = await sent(gateway, upstream, history)
    assert out != history
    assert out[-1] == LOOK
    assert out[:2] == history[:2]


async def test_tools_that_appear_in_a_known_conversation_count(
    upstream: Upstream, start_gateway: StartGateway
) -> None:
    """2,400 tokens were measured without tools; 200 schemas of 20 tokens each do not fit beside them."""
    gateway = await start_gateway(upstream, context=SMALL)
    await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
    *_, before, history = requests_of(long_chat(10))
    upstream.default = measured(2400)
    assert await sent(gateway, upstream, before) == before
    assert await sent(gateway, upstream, history, tools=schemas(100)) != history


async def test_tools_that_are_gone_from_a_known_conversation_leave_room(
    upstream: Upstream, start_gateway: StartGateway
) -> None:
    """3,900 tokens were measured, of which the tools that are missing now had about 1,300."""
    gateway = await start_gateway(upstream, context=SMALL)
    await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
    *_, before, history = requests_of(long_chat(11))
    upstream.default = measured(3900)
    assert await sent(gateway, upstream, before, tools=schemas(60)) == before
    upstream.default = measured(2700)
    assert await sent(gateway, upstream, history) == history
