"""Whether tools may be refused is asked of each engine once, and "no" wherever that is not certain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ctxgate.gateway.tool_refusal import ToolRefusal
from ctxgate.inference.client import Dropped


class Engine:
    """Renders by script: for each call a status and document, or an error."""

    def __init__(self, *answers: tuple[int, Any] | Exception) -> None:
        self.answers = list(answers)
        self.bodies: list[Any] = []

    async def post_json(self, url: str, document: Any, headers: Any, timeout_s: float) -> tuple[int, Any]:
        assert url == "http://e/v1/chat/completions/render"
        self.bodies.append(document)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def free(self, refusal: ToolRefusal, fingerprint: str | None = None) -> bool:
        services: Any = SimpleNamespace(client=self, upstream_headers=lambda _: {})
        record: Any = SimpleNamespace(
            replica=SimpleNamespace(url="http://e"), pool=None, fingerprint=fingerprint
        )
        return await refusal.is_free(services, cast("Any", record), "m")


@pytest.mark.parametrize(
    ("plain", "refusing", "free"),
    [
        ((200, {"token_ids": [1, 2]}), (200, {"token_ids": [1, 2]}), True),
        ((200, {"token_ids": [1, 2]}), (200, {"token_ids": [1]}), False),
        ((403, None), (403, None), False),
        ((200, {}), (200, {}), False),
        ((200, []), (200, []), False),
        ((400, {"error": {}}), (200, {"token_ids": [1]}), False),
    ],
)
async def test_it_is_free_where_both_prompts_are_the_same(plain: Any, refusing: Any, free: bool) -> None:
    engine, refusal = Engine(plain, refusing), ToolRefusal()
    assert await engine.free(refusal) is free
    assert await engine.free(refusal) is free
    one, two = engine.bodies
    assert two == one | {"tool_choice": "none"}
    assert one["tools"]


async def test_an_engine_that_was_started_anew_is_asked_again() -> None:
    same = (200, {"token_ids": [1]})
    engine, refusal = Engine(same, same, same, (200, {"token_ids": []})), ToolRefusal()
    assert await engine.free(refusal, "one")
    assert not await engine.free(refusal, "two")


async def test_one_that_does_not_answer_is_asked_again() -> None:
    same = (200, {"token_ids": [1]})
    engine, refusal = Engine(Dropped("no"), same, same), ToolRefusal()
    assert not await engine.free(refusal)
    assert await engine.free(refusal)
