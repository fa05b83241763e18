"""What went out once of a tool result is never decided again, however it came to go out so."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.config import Context
from ctxgate.gateway.ledger import LedgerUnavailable
from support import twin
from support.gateway import MODEL, Gateway, bearer, config
from support.long_chats import SYSTEM, TASK
from support.recorder import recording

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

SHORT = replace(Context(recall=False), tool_results=True, tool_result_bytes=2000)
MORE = {"role": "user", "content": "Please go on. " * 400}
OFF = ("x-ctxgate-compaction", "off")


def chat(lines: int) -> list[dict[str, Any]]:
    """A chat whose last message is a result of so many lines."""
    call = {"id": "c0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    log = "\n".join(f"line {number} of a log" for number in range(lines))
    return [
        SYSTEM,
        TASK,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": log},
    ]


async def two_prompts(
    folder: Path, lines: int, *headers: tuple[str, str], patch: pytest.MonkeyPatch | None = None
) -> list[list[dict[str, Any]]]:
    """What goes out of a chat with `headers` and under a `patch`, and then without, with one more message."""
    async with twin.serving(max_model_len=50_000) as engine, recording(engine.url) as recorder:
        gateway = await Gateway.start(
            config(folder / "ledger.db", [recorder.url], served_name="tiny", context=SHORT)
        )
        try:
            messages = chat(lines)
            for sent, more in ((messages, headers), ([*messages, MORE], ())):
                if patch is not None and more is headers:
                    patch.setattr(gateway.services.forms, "answer", down)
                body = {"model": MODEL, "messages": sent, "max_tokens": 2}
                assert (await gateway.post(body, headers=(bearer(), *more))).status == 200
                if patch is not None:
                    patch.undo()
        finally:
            await gateway.stop()
        return recorder.answered()


async def down(*_: object) -> dict[bytes, bytes]:
    raise LedgerUnavailable("down")


async def test_context_f9_a_result_in_a_small_body_is_shortened_at_once_or_never(tmp_path: Path) -> None:
    first, second = await two_prompts(tmp_path, 200)  # the whole body is below 8 KiB
    assert len(first[3]["content"]) <= 2000 < len(chat(200)[3]["content"])
    assert second[:4] == first


async def test_context_f9_a_result_that_was_to_stay_as_it_is_stays_so(tmp_path: Path) -> None:
    first, second = await two_prompts(tmp_path, 2000, OFF)
    assert first == chat(2000)
    assert second[:4] == first


async def test_context_f9_a_result_that_went_out_without_the_store_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await two_prompts(tmp_path, 2000, patch=monkeypatch)
    assert first == chat(2000)
    assert second[:4] == first


async def test_context_f9_a_result_that_was_shortened_stays_so_while_the_store_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with twin.serving(max_model_len=50_000) as engine, recording(engine.url) as recorder:
        gateway = await Gateway.start(
            config(tmp_path / "ledger.db", [recorder.url], served_name="tiny", context=SHORT)
        )
        try:
            body = {"model": MODEL, "messages": chat(2000), "max_tokens": 2}
            await gateway.post(body)
            monkeypatch.setattr(gateway.services.forms, "answer", down)
            await gateway.post(body | {"messages": [*chat(2000), MORE]})
        finally:
            await gateway.stop()
        first, second = recorder.answered()
    assert len(first[3]["content"]) <= 2000
    assert second[:4] == first
