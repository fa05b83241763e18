"""What real clients do to a conversation that should only grow, as deterministic rewrites of a turn.

Each perturbation keeps the meaning of the request and changes its bytes, and so breaks a prefix cache.
Every choice is drawn from a hash of session, turn and place: the same replay gives the same bytes in
any process and on any Python.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from enum import StrEnum
from hashlib import blake2b
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ctxgate.gateway.sessions import Message, Tool, Turn

T = TypeVar("T")


class Perturbation(StrEnum):
    """A habit of real clients. They combine; the order in which they are named does not matter."""

    CLOCK = "clock"  # `Current time: ...` as the last line of the system prompt
    TOOL_ORDER = "tool-order"  # the tools shuffled each turn
    JSON_KEYS = "json-keys"  # keys of tool schemas and of tool-call arguments reordered each turn
    RESERIALIZE = "reserialize"  # other white space in arguments; null, missing, empty content swapped
    LATE_TOOL = "late-tool"  # one more tool from the middle of the session on


LATE_TOOL_NAME: Final = "attach_note"
_LEXEME: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s"{}\[\],:]+')
# Item separator, key separator, and what stands inside the brackets of a container that is not empty.
_SPACINGS: Final = ((",", ":", ""), (", ", ": ", ""), (", ", ": ", " "), (",\n  ", ": ", "\n"))


def parse_perturbations(text: str) -> frozenset[Perturbation]:
    """Parse a comma-separated list; empty text is no perturbation. Raises ValueError with the known names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {kind.value for kind in Perturbation}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown perturbation {name!r}; known: {', '.join(sorted(known))}")
    return frozenset(Perturbation(name) for name in names)


def perturb(turn: Turn, kinds: Collection[Perturbation]) -> Turn:
    """Return the turn as a client with these habits would send it; the turn itself is not changed."""
    for kind, rewrite in _REWRITES:
        if kind in kinds:
            turn = rewrite(turn, _Draw(f"{turn.session}\0{turn.number}\0{kind.value}"))
    return turn


class _Draw:
    """Reproducible choices, each named by a place, independent of one another."""

    def __init__(self, seed: str) -> None:
        self._key = blake2b(seed.encode(), digest_size=32).digest()

    def number(self, place: str) -> int:
        return int.from_bytes(blake2b(place.encode(), key=self._key, digest_size=8).digest(), "big")

    def pick(self, options: Sequence[T], place: str) -> T:
        return options[self.number(place) % len(options)]

    def shuffled(self, items: Collection[T], place: str) -> list[T]:
        ranked = sorted(enumerate(items), key=lambda pair: self.number(f"{place}#{pair[0]}"))
        return [item for _, item in ranked]


def _late_tool(turn: Turn, _draw: _Draw) -> Turn:
    if 2 * turn.number < turn.of:
        return turn
    taken = {tool["function"]["name"] for tool in turn.tools}
    name = LATE_TOOL_NAME
    while name in taken:
        name += "_"
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    function = {"name": name, "description": "Attach a note to the task.", "parameters": parameters}
    return replace(turn, tools=(*turn.tools, {"type": "function", "function": function}))


def _json_keys(turn: Turn, draw: _Draw) -> Turn:
    tools: tuple[Tool, ...] = tuple(
        _reordered(tool, draw, f"tool/{at}") for at, tool in enumerate(turn.tools)
    )
    return replace(
        turn, tools=tools, messages=_with_arguments(turn.messages, lambda text, at: _rekeyed(text, draw, at))
    )


def _tool_order(turn: Turn, draw: _Draw) -> Turn:
    return replace(turn, tools=tuple(draw.shuffled(turn.tools, "tools")))


def _reserialize(turn: Turn, draw: _Draw) -> Turn:
    messages = _with_arguments(turn.messages, lambda text, at: _respaced(text, draw.pick(_SPACINGS, at)))
    swapped = (_swap_empty(message, draw, f"content/{at}") for at, message in enumerate(messages))
    return replace(turn, messages=tuple(swapped))


def _clock(turn: Turn, _draw: _Draw) -> Turn:
    line = f"Current time: {turn.at:%Y-%m-%dT%H:%M:%SZ}"
    if not turn.messages or turn.messages[0]["role"] not in ("system", "developer"):
        return replace(turn, messages=({"role": "system", "content": line}, *turn.messages))
    head = turn.messages[0]
    content = head["content"]
    longer = f"{content}\n{line}" if isinstance(content, str) else [*content, {"type": "text", "text": line}]
    return replace(turn, messages=({**head, "content": longer}, *turn.messages[1:]))


_REWRITES: Final[tuple[tuple[Perturbation, Callable[[Turn, _Draw], Turn]], ...]] = (
    (Perturbation.LATE_TOOL, _late_tool),
    (Perturbation.JSON_KEYS, _json_keys),
    (Perturbation.TOOL_ORDER, _tool_order),
    (Perturbation.RESERIALIZE, _reserialize),
    (Perturbation.CLOCK, _clock),
)


def _with_arguments(messages: tuple[Message, ...], rewrite: Callable[[str, str], str]) -> tuple[Message, ...]:
    """Every tool call's arguments rewritten; `rewrite` gets the text and a name of the place."""

    def one(message: Message, at: int) -> Message:
        if not message.get("tool_calls"):
            return message
        calls = [
            {**call, "function": {**function, "arguments": rewrite(function["arguments"], f"call/{at}/{n}")}}
            for n, call in enumerate(message["tool_calls"])
            for function in (call["function"],)
        ]
        return {**message, "tool_calls": calls}

    return tuple(one(message, at) for at, message in enumerate(messages))


def _reordered(value: Any, draw: _Draw, place: str) -> Any:
    """The same JSON value with the keys of every object in another order; arrays keep theirs."""
    if isinstance(value, dict):
        keys = draw.shuffled(value, place)
        return {key: _reordered(value[key], draw, f"{place}/{key}") for key in keys}
    if isinstance(value, list):
        return [_reordered(item, draw, f"{place}/{at}") for at, item in enumerate(value)]
    return value


def _rekeyed(text: str, draw: _Draw, place: str) -> str:
    """Arguments with other key order, in the style they had; text that JSON cannot carry over is kept."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except ValueError:
        return text
    compact = _respaced(text, _SPACINGS[0]) == text
    return json.dumps(
        _reordered(value, draw, place),
        ensure_ascii=text.isascii(),
        separators=(",", ":") if compact else (", ", ": "),
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} has no float")
    return value


def _respaced(text: str, spacing: tuple[str, str, str]) -> str:
    """The same JSON lexemes with other white space between them; text that is not JSON is kept."""
    try:
        json.loads(text)
    except ValueError:
        return text
    comma, colon, pad = spacing
    separators = {",": comma, ":": colon}
    lexemes: list[str] = _LEXEME.findall(text)
    out: list[str] = []
    for at, lexeme in enumerate(lexemes):
        if lexeme in "{[" and lexemes[at + 1] not in "}]":
            out += (lexeme, pad)
        elif lexeme in "}]" and lexemes[at - 1] not in "{[":
            out += (pad, lexeme)
        else:
            out.append(separators.get(lexeme, lexeme))
    return "".join(out)


def _swap_empty(message: Message, draw: _Draw, place: str) -> Message:
    """Absent text of an assistant message with tool calls, as null, as nothing or as an empty string."""
    if not message.get("tool_calls") or message.get("content"):
        return message
    form = draw.pick(("null", "missing", "empty"), place)
    bare = {key: value for key, value in message.items() if key != "content"}
    return bare if form == "missing" else {**bare, "content": None if form == "null" else ""}
