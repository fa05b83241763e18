"""Requests that pass the explanation of misses, answered by the hit rule of an engine without eviction."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from ctxgate.compression.policy import Level
from ctxgate.gateway.config import Key
from ctxgate.gateway.flow import Held, Identified, Inbound, Planned, Routed, Surface, Task
from ctxgate.gateway.misses import Misses
from ctxgate.inference import wire
from ctxgate.inference.oracle import PrefixOracle
from ctxgate.inference.prompts import PromptRenderer
from ctxgate.inference.rates import RateCard
from ctxgate.inference.usage import UNKNOWN, Usage, measured
from support.gateway import RATES
from support.ledgers import opened

if TYPE_CHECKING:
    from ctxgate.gateway.miss import Miss
    from ctxgate.gateway.sessions import Turn
    from ctxgate.routing.prefix_index import Place

KEY: Final = Key("ci", b"", "search", "acme", frozenset())
HERE: Final = ("standard", "standard-0")
BLOCK: Final = 16
RENDERER: Final = PromptRenderer()


@dataclass(frozen=True)
class Answered:
    """What became of one request; `prompt` and `cached` in tokens."""

    miss: Miss | None
    foreseen: Miss | None
    expected: int | None
    prompt: int
    cached: int


@dataclass
class Follower:
    """Explains requests as a gateway does, in front of engines that each remember all they have read."""

    misses: Misses = field(default_factory=lambda: Misses(_fail, seed=7, compared_at_once=2**30))
    engine: PrefixOracle = field(default_factory=lambda: PrefixOracle(BLOCK))
    reports: bool = True
    _now_us: int = 0

    def send(
        self, body: bytes, *, place: Place = HERE, task: str = "job", surface: Surface = Surface.CHAT
    ) -> Answered:
        """One request, from its body to its settlement."""
        parsed = wire.parse(body)
        messages = tuple(parsed.items("messages")) if surface is Surface.CHAT else ()
        inbound = Inbound("r", surface, {}, parsed, messages, "m", False, 0)
        identified = Identified(inbound, KEY, Task(task, "header"), b"root")
        seen = self.misses.look(identified, parsed, None)
        expected = self.misses.expect(seen, place)
        row = opened("a", pool=place[0], replica=place[1], estimated_prompt_tokens=len(body) // 4)
        planned = Planned(
            cast("Any", SimpleNamespace(identified=identified)), cast("Any", None), Level.OFF, seen
        )
        pool = cast("Any", SimpleNamespace(rates=RateCard(((RATES,),))))
        held = Held(Routed(planned, cast("Any", None), pool, cast("Any", None)), row, expected)
        foreseen = self.misses.foreseen(held)
        ids = token_ids(body) if surface is Surface.CHAT else RENDERER.encode(json.loads(body)["prompt"])
        cached = self.engine.observe(ids, domain="/".join(place))
        self._now_us += 1
        usage = Usage(measured(len(ids) - cached), measured(cached), measured(1))
        if not self.reports:
            usage = Usage(UNKNOWN, UNKNOWN, measured(1), prompt_total=measured(len(ids)))
        miss = self.misses.settled(held, usage, self._now_us)
        return Answered(miss, foreseen, None if expected is None else expected.tokens, len(ids), cached)


def request(turn: Turn, **members: Any) -> bytes:
    """A turn as a client sends it."""
    tools = {"tools": turn.tools} if turn.tools else {}
    return json.dumps({"model": "m", "messages": turn.messages, **tools, **members}).encode()


@cache
def token_ids(body: bytes) -> tuple[int, ...]:
    """The tokens of a chat request's prompt."""
    decoded = json.loads(body)
    return tuple(RENDERER.encode(RENDERER.chat_text(decoded["messages"], decoded.get("tools") or None)))


def _fail() -> None:
    raise AssertionError("a prompt could not be explained")
