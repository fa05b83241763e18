"""Level `declared` in a running gateway: what is sent, told and refused, and what a failure does."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression import layout as pure
from ctxgate.compression.moved import HEADING, PLACEHOLDER, Passage
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway.layout import DROPPED
from support.gateway import MODEL, bearer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

pytestmark = pytest.mark.integration

DECLARED: dict[str, Any] = {"layout": "declared", "volatile": frozenset({VolatileKind.CLOCK})}
NOTE = f"{HEADING}\nNow 2026-01-05T09:00:00Z"


def request(minute: int, *messages: dict[str, Any], **more: Any) -> bytes:
    system = {"role": "system", "content": f"Now 2026-01-05T09:{minute:02}:00Z"}
    return json.dumps({"model": MODEL, "messages": [system, *messages]} | more).encode()


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content} | more


HEAD = {"role": "system", "content": f"Now {PLACEHOLDER}"}
ANSWER = {"role": "assistant", "content": "Yes."}


@pytest.fixture
async def declared(upstream: Upstream, start_gateway: Start) -> Gateway:
    """A gateway whose teams declare clocks volatile."""
    return await start_gateway(upstream, **DECLARED)


def messages(upstream: Upstream) -> list[list[dict[str, Any]]]:
    """What each call had upstream."""
    return [json.loads(call.body)["messages"] for call in upstream.calls]


async def dropped(gateway: Gateway) -> dict[str, float]:
    metrics = await gateway.metrics()
    names = {reason: f'ctxgate_layout_dropped_total{{reason="{reason}"}}' for reason in DROPPED}
    return {reason: metrics[name] for reason, name in names.items() if name in metrics}


async def test_the_clock_moves_and_is_told(declared: Gateway, upstream: Upstream) -> None:
    answer = await declared.post(request(0, user("Go.")))
    assert answer.header("x-ctxgate-layout") == "declared; edits=2"
    await declared.post(request(1, user("Go."), ANSWER, user("On.")))
    first, second = messages(upstream)
    assert first == [HEAD, user(f"Go.\n\n{NOTE}")]
    assert second == [*first, ANSWER, user(f"On.\n\n{HEADING}\nNow 2026-01-05T09:01:00Z")]
    assert await dropped(declared) == {}


async def test_a_request_may_ask_for_less(declared: Gateway, upstream: Upstream) -> None:
    for level in ("safe", "off"):
        raw = request(0, user("Go."))
        await declared.post(raw, headers=[bearer(), ("x-ctxgate-layout", level)])
        assert upstream.calls[-1].body == raw


async def test_a_restart_in_the_middle_repeats_the_notes(
    upstream: Upstream, start_gateway: Start, tmp_path: Path
) -> None:
    store = tmp_path / "shared.db"
    first = await start_gateway(upstream, store=store, **DECLARED)
    await first.post(request(0, user("Go.")))
    await first.stop()
    second = await start_gateway(upstream, store=store, **DECLARED)
    await second.post(request(1, user("Go."), ANSWER, user("On.")))
    one, two = messages(upstream)
    assert two[: len(one)] == one


async def test_a_conversation_that_began_elsewhere_keeps_its_old_turns(
    upstream: Upstream, start_gateway: Start, tmp_path: Path
) -> None:
    """That an old turn has no note is kept in the store too."""
    store = tmp_path / "shared.db"
    first = await start_gateway(upstream, store=store, **DECLARED)
    await first.post(request(0, user("Go."), ANSWER, user("On.")))
    await first.post(request(1, user("Go.")))
    await first.stop()
    second = await start_gateway(upstream, store=store, **DECLARED)
    await second.post(request(2, user("Go."), ANSWER, user("On."), ANSWER, user("And?")))
    one, _, three = messages(upstream)
    assert one == [HEAD, user("Go."), ANSWER, user(f"On.\n\n{NOTE}")]
    assert three[: len(one)] == one
    assert await dropped(second) == {}


async def test_gateways_agree_on_one_note(upstream: Upstream, start_gateway: Start, tmp_path: Path) -> None:
    """Two that see one prefix at the same time, each with a clock of its own, repeat the same note later."""
    store = tmp_path / "shared.db"
    fleet = [await start_gateway(upstream, store=store, **DECLARED) for _ in range(2)]
    await asyncio.gather(*(each.post(request(at, user("Go."))) for at, each in enumerate(fleet)))
    for each in fleet:
        await each.post(request(5, user("Go."), ANSWER, user("On.")))
    later = messages(upstream)[2:]
    assert later[0] == later[1]
    assert later[0][1] in [one[1] for one in messages(upstream)[:2]]


async def test_a_wrong_mark_costs_nothing_and_is_named(declared: Gateway, upstream: Upstream) -> None:
    answer = await declared.post(request(0, user("Go.", ctxgate={"stability": "voltaile"})))
    assert answer.status == 400
    error = answer.error
    assert (error["param"], error["code"]) == ("messages[1].ctxgate.stability", "invalid_value")
    assert "must be 'stable' or 'volatile'" in error["message"]
    assert upstream.calls == []
    assert await declared.rows() == []


async def test_a_wrong_mark_passes_at_off(gateway: Gateway, upstream: Upstream) -> None:
    raw = request(0, user("Go.", ctxgate=7))
    assert (await gateway.post(raw)).status == 200
    assert upstream.calls[0].body == raw


async def test_context_k1_marks_for_the_cache_pass_and_ours_do_not(
    declared: Gateway, upstream: Upstream
) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    await declared.post(request(0, user("Go.", ctxgate={"stability": "stable"}, **mark)))
    assert messages(upstream) == [[HEAD, user(f"Go.\n\n{NOTE}", **mark)]]


@pytest.mark.parametrize(
    "moved",
    [
        (),
        (Passage(0, ("2026-01-05T09:00:01Z",), "Now"),),
        (Passage(1, ("2026-01-05T09:00:00Z",), "Now"),),
        (Passage(0, ("2026-01-05T09:00:00Z", "Now"), "Now"),),
    ],
)
async def test_text_that_is_lost_on_its_way_is_noticed(
    declared: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, moved: tuple[Passage, ...]
) -> None:
    """The checker compares bytes; what the layout claims to have moved must be there."""
    honest = pure.lay_out

    def wrong(*arguments: Any) -> Any:
        result = yield from honest(*arguments)
        return pure.LayoutResult(result.edits, result.reasons, moved, added=result.added)

    monkeypatch.setattr(pure, "lay_out", wrong)
    raw = request(0, user("Go."))
    answer = await declared.post(raw)
    assert (answer.status, answer.header("x-ctxgate-layout")) == (200, "")
    assert upstream.calls[0].body == raw
    assert await dropped(declared) == {"invalid": 1}


async def test_a_defect_sends_the_clients_bytes(
    declared: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(pure, "take", broken)
    raw = request(0, user("Go."))
    assert (await declared.post(raw)).status == 200
    assert upstream.calls[0].body == raw
    assert await dropped(declared) == {"defect": 1}
