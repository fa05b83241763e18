"""What was brought back stays where it was when the store gives no answer, or gives it too late."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Context
from ctxgate.gateway.ledger import LedgerUnavailable
from support import twin
from support.gateway import MODEL, Gateway, bearer, config, until
from support.long_chats import long_chat
from support.recorder import Recorder, recording

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.integration

WINDOW = 8192
CONTEXT = Context(tail_tokens=800, summary_tokens=300, summarizer="off")
FACT = "\nThe invoice serial is QX-77-4410-KLM, issued by Vendor Oberon."
QUESTION = {"role": "user", "content": "Which vendor issued the invoice serial QX-77-4410-KLM?"}
Messages = list[dict[str, Any]]


class Chat:
    """One conversation through a gateway; `sent` is what went out for each request."""

    def __init__(self, gateway: Gateway, recorder: Recorder) -> None:
        self.gateway = gateway
        self.recorder = recorder
        self.messages = long_chat(60)
        self.messages[5]["content"] += FACT
        self.sent: list[Messages] = []

    async def turn(self) -> Messages:
        """One request; what runs in the background after it is waited for."""
        services = self.gateway.services
        body = {"model": MODEL, "messages": self.messages, "max_tokens": 2}
        assert (await self.gateway.post(body, headers=(bearer(),))).status == 200
        await until(lambda: not services.context.compactor.busy and not services.background)
        await services.recall.settled()
        self.sent.append(self.recorder.answered()[-1])
        return self.sent[-1]

    def asks(self) -> None:
        """Another question about what was left out."""
        self.messages = [*self.messages, {"role": "assistant", "content": "I look."}, QUESTION]

    async def is_told(self) -> Messages:
        """Ask until something is brought back: on a busy machine a search may come too late."""
        for _ in range(20):
            self.asks()
            if "Oberon" in (await self.turn())[-1]["content"]:
                return self.sent[-1]
        pytest.fail("nothing was brought back")


@asynccontextmanager
async def chatting(folder: Path) -> AsyncIterator[Chat]:
    async with twin.serving(max_model_len=WINDOW) as engine, recording(engine.url) as recorder:
        settings = config(folder / "ledger.db", [recorder.url], served_name="tiny", context=CONTEXT)
        gateway = await Gateway.start(settings)
        try:
            await until(lambda: all(record.windows for record in gateway.services.fleet.records()))
            chat = Chat(gateway, recorder)
            assert "Oberon" not in json.dumps(await chat.turn())
            yield chat
        finally:
            await gateway.stop()


async def test_what_was_brought_back_stays_while_the_store_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(*_: object) -> dict[bytes, bytes]:
        raise LedgerUnavailable("down")

    async with chatting(tmp_path) as chat:
        before = await chat.is_told()
        monkeypatch.setattr(chat.gateway.services.forms, "answer", down)
        chat.asks()
        during = await chat.turn()
        assert during[: len(before)] == before
        assert during[-1] == QUESTION  # nothing new can be kept
        monkeypatch.undo()
        chat.asks()
        assert (await chat.turn())[: len(during)] == during


async def test_what_the_store_was_told_too_late_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chatting(tmp_path) as chat:
        before = await chat.is_told()
        answer = chat.gateway.services.forms.answer

        async def late(*asked: Any) -> dict[bytes, bytes]:
            await answer(*asked)  # it is written, and nobody hears of it
            raise TimeoutError

        monkeypatch.setattr(chat.gateway.services.forms, "answer", late)
        chat.asks()
        during = await chat.turn()
        assert during[: len(before)] == before
        assert during[-1] == QUESTION
        monkeypatch.undo()
        chat.asks()
        assert (await chat.turn())[: len(during)] == during
