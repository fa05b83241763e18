"""The layout stage in a running gateway: who gets which level, what is sent, what is told, what fails how."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression import layout as pure
from ctxgate.compression.ask import Ask
from ctxgate.compression.layout import LayoutResult
from ctxgate.compression.policy import LEVELS
from ctxgate.gateway import forms as forms_module
from ctxgate.gateway.config import Team
from ctxgate.gateway.forms import Forms
from ctxgate.gateway.layout import DROPPED
from ctxgate.gateway.ledger import LedgerUnavailable
from ctxgate.inference.wire import Edit
from support.gateway import BETA, MODEL, bearer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping
    from pathlib import Path

    from support.client import Answer
    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

pytestmark = pytest.mark.integration


def tool(name: str, keys: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in keys}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def request(turn: int, *, turned: bool, stream: bool = False) -> bytes:
    """A turn of a growing conversation; `turned` sends all that can vary in another form."""
    arguments = '{"b": 2, "a": 1}' if turned else '{"a": 1, "b": 2}'
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for number in range(turn):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": "" if turned else None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": "done"},
        ]
    tools = [tool("g", "xy"), tool("f", "yx")] if turned else [tool("f", "xy"), tool("g", "xy")]
    return json.dumps({"model": MODEL, "messages": messages, "tools": tools, "stream": stream}).encode()


def heading(level: str) -> list[tuple[str, str]]:
    return [bearer(), ("x-ctxgate-layout", level)]


@pytest.fixture
async def safe(upstream: Upstream, start_gateway: Start) -> Gateway:
    """A gateway whose teams are laid out safely."""
    return await start_gateway(upstream, layout="safe")


async def dropped(gateway: Gateway) -> dict[str, float]:
    """How often each reason was counted."""
    metrics = await gateway.metrics()
    names = {reason: f'ctxgate_layout_dropped_total{{reason="{reason}"}}' for reason in DROPPED}
    return {reason: metrics[name] for reason, name in names.items() if name in metrics}


def sent(upstream: Upstream) -> list[bytes]:
    return [call.body for call in upstream.calls]


async def test_what_was_sent_first_is_sent_again_and_told(safe: Gateway, upstream: Upstream) -> None:
    assert (await safe.post(request(2, turned=False))).header("x-ctxgate-layout") == ""
    answer = await safe.post(request(2, turned=True))
    assert answer.header("x-ctxgate-layout") == "safe; edits=3"  # the tools and two messages
    assert sent(upstream) == [request(2, turned=False)] * 2
    rows = await safe.rows()
    assert [row.opened.body_bytes for row in rows] == [len(request(2, turned=False))] * 2
    assert await dropped(safe) == {}


async def test_a_stream_carries_both_the_layout_and_the_meters_fields(
    safe: Gateway, upstream: Upstream
) -> None:
    await safe.post(request(1, turned=False))
    answer = await safe.post(request(1, turned=True, stream=True))
    assert answer.header("x-ctxgate-layout") == "safe; edits=2"
    expected = request(1, turned=False, stream=True)[:-1]
    assert sent(upstream)[1] == expected + b',"stream_options":{"include_usage":true}}'


async def test_off_is_the_default_and_sends_the_clients_bytes(gateway: Gateway, upstream: Upstream) -> None:
    for turned in (False, True):
        answer = await gateway.post(request(1, turned=turned))
        assert answer.header("x-ctxgate-layout") == ""
    assert sent(upstream) == [request(1, turned=False), request(1, turned=True)]


async def test_a_request_may_ask_for_less(safe: Gateway, upstream: Upstream) -> None:
    await safe.post(request(1, turned=False))
    answer = await safe.post(request(1, turned=True), headers=heading("off"))
    assert answer.header("x-ctxgate-layout") == ""
    assert sent(upstream)[1] == request(1, turned=True)
    await safe.post(request(1, turned=True), headers=heading("safe"))
    assert sent(upstream)[2] == request(1, turned=False)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("safe", "asks for 'safe'; the team's level is 'off'"),
        ("SAFE", "must be one of: off, safe"),
        ("", "must be one of"),
        ("learned", "asks for 'learned'; the team's level is 'off'"),
        ("declare", "must be one of: off, safe, declared, learned"),
    ],
)
async def test_other_levels_are_refused_by_name(
    gateway: Gateway, upstream: Upstream, path: str, level: str, message: str
) -> None:
    body = json.loads(request(0, turned=False)) | {"prompt": "x", "input": "x"}
    answer = await gateway.post(body, path, heading(level))
    assert answer.status == 400
    error = answer.error
    assert (error["param"], error["code"]) == ("x-ctxgate-layout", "invalid_value")
    assert message in error["message"]
    assert upstream.calls == []


async def test_other_surfaces_are_not_laid_out(safe: Gateway, upstream: Upstream) -> None:
    for turned in (False, True):
        body = json.loads(request(1, turned=turned)) | {"prompt": "x"}
        answer = await safe.post(body, "/v1/completions", heading("safe"))
        assert (answer.status, answer.header("x-ctxgate-layout")) == (200, "")
        assert json.loads(sent(upstream)[-1]) == body


async def test_teams_do_not_learn_from_each_other(safe: Gateway, upstream: Upstream) -> None:
    await safe.post(request(1, turned=False))
    answer = await safe.post(request(1, turned=True), headers=[bearer(BETA)])
    assert answer.header("x-ctxgate-layout") == ""
    assert sent(upstream)[1] == request(1, turned=True)


async def test_context_j2_a_restart_in_the_middle_sends_the_same_bytes(
    upstream: Upstream, start_gateway: Start, tmp_path: Path
) -> None:
    """The store alone carries the forms; a second gateway beside the first agrees with it too."""
    store = tmp_path / "shared.db"
    first = await start_gateway(upstream, layout="safe", store=store)
    await first.post(request(1, turned=False))
    beside = await start_gateway(upstream, layout="safe", store=store)
    await beside.post(request(1, turned=True))
    await first.stop()
    await beside.stop()
    second = await start_gateway(upstream, layout="safe", store=store)
    answer = await second.post(request(1, turned=True))
    assert answer.header("x-ctxgate-layout") == "safe; edits=2"
    assert sent(upstream) == [request(1, turned=False)] * 3


async def test_gateways_agree_on_forms_that_come_at_the_same_time(
    upstream: Upstream, start_gateway: Start, tmp_path: Path
) -> None:
    store = tmp_path / "shared.db"
    fleet = [await start_gateway(upstream, layout="safe", store=store) for _ in range(2)]
    await asyncio.gather(
        *(gateway.post(request(3, turned=turned)) for turned in (False, True) for gateway in fleet)
    )
    forms = {json.dumps([json.loads(body)["messages"], json.loads(body)["tools"]]) for body in sent(upstream)}
    assert len(forms) == 1


class Broken:
    """A store that cannot serve."""

    async def claim(
        self, tenant: str, claims: Mapping[bytes, bytes], reads: Collection[bytes], now_us: int
    ) -> dict[bytes, bytes]:
        raise LedgerUnavailable("disk full")


class Slow:
    """A store that never answers."""

    async def claim(
        self, tenant: str, claims: Mapping[bytes, bytes], reads: Collection[bytes], now_us: int
    ) -> dict[bytes, bytes]:
        await asyncio.Event().wait()
        raise AssertionError


async def post_after(gateway: Gateway) -> Answer:
    """Two forms of one request; the answer to the second."""
    await gateway.post(request(1, turned=False))
    return await gateway.post(request(1, turned=True))


@pytest.mark.parametrize("store", [Broken(), Slow()])
async def test_without_an_answer_of_the_store_the_original_goes_out(
    safe: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, store: Any
) -> None:
    monkeypatch.setattr(forms_module, "ANSWER_WITHIN_S", 0.01)
    safe.services.layout._forms = Forms(store)
    answer = await post_after(safe)
    assert (answer.status, answer.header("x-ctxgate-layout")) == (200, "")
    assert sent(upstream) == [request(1, turned=False), request(1, turned=True)]
    assert await dropped(safe) == {"store": 2}


@pytest.mark.parametrize(
    "edit", [b"}{", b'{"role":"user","content":"other"}', b'{"role":"system","content":""}']
)
async def test_an_edited_body_that_is_not_the_same_prompt_is_dropped(
    safe: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, edit: bytes
) -> None:
    raw = request(0, turned=False)
    start = raw.index(b'{"role"')
    result = LayoutResult((Edit(start, raw.index(b"}", start) + 1, edit),))

    def wrong(*_: object) -> Any:
        yield Ask({})
        return result

    monkeypatch.setattr(pure, "lay_out", wrong)
    answer = await safe.post(raw)
    assert (answer.status, answer.header("x-ctxgate-layout")) == (200, "")
    assert sent(upstream) == [raw]
    assert await dropped(safe) == {"invalid": 1}


async def test_a_defect_in_the_layout_is_counted_and_harmless(
    safe: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(pure, "look", broken)
    assert (await post_after(safe)).status == 200
    assert sent(upstream) == [request(1, turned=False), request(1, turned=True)]
    assert await dropped(safe) == {"defect": 2}
    assert "layout of request" in caplog.text
    assert "RuntimeError in broken" in caplog.text
    assert "a defect" not in caplog.text  # an error's own words may quote a prompt


async def test_a_body_with_repeated_members_goes_out_as_it_came(safe: Gateway, upstream: Upstream) -> None:
    await safe.post(request(1, turned=False))
    raw = b'{"tools":[],' + request(1, turned=True)[1:]
    assert (await safe.post(raw)).status == 200
    assert sent(upstream)[1] == raw
    assert await dropped(safe) == {"hidden": 1}


async def test_messages_no_reader_understands_pass(safe: Gateway, upstream: Upstream) -> None:
    raw = b'{"model":"m","messages":[{"role":"assistant","tool_calls":7},{"role":5}],"tools":[3,null]}'
    for _ in range(2):
        assert (await safe.post(raw)).status == 200
    assert sent(upstream) == [raw, raw]
    assert await dropped(safe) == {}


def test_the_levels_of_the_configuration_are_those_of_the_gateway() -> None:
    assert LEVELS == ("off", "safe", "declared", "learned")
    assert Team("research", "acme").layout == "safe"
