"""Recorded sessions as the shapes of a simulation: lengths of prompts and answers, and pauses. Pure."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.routing.simulated_load import Call, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeAlias

    from ctxgate.gateway.sessions import Session, Turn

    Tokens: TypeAlias = Callable[
        [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], Sequence[int] | None
    ]

TOOL_S: Final = 2.0
"""The run of a tool, where no times are recorded."""
PERSON_S: Final = 20.0
"""What a person takes to answer, where no times are recorded."""
RECORDED_TOKEN_S: Final = 0.0125
"""What a token took of the recorded time from one answer to the next; the rest was the pause."""
LEAST_S: Final = 0.1


LOOP: Final = 0.8
"""From this share of requests on that follow a tool's result, a session is an agent's loop."""


def kind_of(session: Session) -> str:
    """Whether a session is an agent's loop of tool calls or a dialogue with a person."""
    turns = list(session.turns())
    tools = sum(turn.messages[-1]["role"] == "tool" for turn in turns)
    return "agent" if tools >= LOOP * len(turns) else "interactive"


def shape_of(session: Session, kind: str, tokens: Tokens) -> Shape:
    """A session's shape. Raises ValueError for a prompt that cannot be rendered.

    Every prompt is taken to begin with the whole prompt before it. The head is the tools and the system
    messages in front; sessions with the same head share it.
    """
    calls: list[Call] = []
    before: Turn | None = None
    first: Sequence[int] = ()
    for turn in session.turns():
        prompt = tokens(turn.messages, turn.tools)
        if prompt is None:
            raise ValueError(f"{session.name}: the template refuses request {turn.number + 1}")
        recorded = session.outputs[turn.number] if turn.number < len(session.outputs) else None
        output = recorded or len(tokens([turn.answer], ()) or ())
        calls.append(Call(len(prompt), max(output, 1), _pause(session, before, turn)))
        first = first or prompt
        before = turn
    head = [message for message in session.messages[:1] if message["role"] in ("system", "developer")]
    if not head and not session.tools:
        return Shape(session.name, kind, None, 0, tuple(calls))
    length = _common(tokens(head, session.tools) or (), first)
    digest = blake2b(msgspec.json.encode([session.tools, head]), digest_size=8).hexdigest()
    return Shape(session.name, kind, digest, min(length, calls[0].prompt_tokens - 1), tuple(calls))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def _pause(session: Session, before: Turn | None, turn: Turn) -> float:
    if before is None:
        return 0.0
    at, last = session.times[turn.number], session.times[before.number]
    if at is None or last is None:
        return TOOL_S if turn.messages[-1]["role"] == "tool" else PERSON_S
    own = session.outputs[turn.number] or 0
    return max((at - last).total_seconds() - own * RECORDED_TOKEN_S, LEAST_S)
