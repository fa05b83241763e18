"""The tool `context_recall` in requests: who is offered it, and what is hidden in a conversation that has it.

A conversation has the tool or has it not, from its first request on: a definition that comes or goes changes
a prompt's beginning, and with it all that a cache holds of it. It is offered beside the client's own tools
only, so that what a model server makes of tools is the client's own risk.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.recall_tool import (
    DEFINITION,
    NAME,
    HiddenRounds,
    ToolMemory,
    at_hand,
    has_tool,
    hidden,
    kept,
)
from ctxgate.gateway.ledger import LedgerError
from ctxgate.inference.expand import expanded

if TYPE_CHECKING:
    from ctxgate.compression.ask import Asking
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.services import Services
    from ctxgate.inference.wire import Body

log = logging.getLogger(__name__)
OUTCOMES: Final = ("found", "nothing", "unreadable", "too many", "failed")
"""What became of a call: passages; none; no arguments that can be read; not answered, as there were too many
before it in one answer; the answer could not go on with the result."""

_ESCAPE: Final = b"\\u00"  # of a character that needs none
_OPEN_CHOICES: Final = ("", "auto", "required")


class RecallTool:
    """Offers the tool. Belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.memory = ToolMemory()

    async def offer(self, turn: Turn) -> None:
        """Let a request go out with the tool, and with what was hidden before, where its conversation has it.

        Where the store does not say, as far as this process knows.
        """
        if not turn.context.recall_tool or not _has_tools(turn.laid):
            return
        try:
            has = await self._services.context.answered_by_store(turn.tenant, self._looked_up(turn))
        except (LedgerError, TimeoutError) as error:
            self._store_failed(error)
            has, turn.hidden = at_hand(turn.root, turn.messages, turn.facts, turn.hashes, self.memory)
        body = expanded(turn.laid, {}, DEFINITION) if has and may_be_called(turn.laid, turn) else None
        if body is not None:
            turn.offer(body)

    def _looked_up(self, turn: Turn) -> Asking[bool]:
        begins = not any(each.role == "assistant" for each in turn.facts) and _may_begin(turn)
        if not (yield from has_tool(turn.root, self.memory, begins=begins)):
            return False
        turn.hidden = yield from hidden(turn.messages, turn.facts, turn.hashes, self.memory)
        return True

    async def keep(self, turn: Turn, identity: bytes, rounds: HiddenRounds) -> None:
        """Keep what was hidden before an answer that is about to end. Never raises.

        Where it cannot be kept, later requests lack it: they are valid, and miss the cache from there on.
        """
        context = self._services.context
        try:
            asking = kept(turn.hashes[-1], identity, rounds, self.memory)
            key = await context.answered_by_store(turn.tenant, asking)
        except (LedgerError, TimeoutError) as error:
            self._store_failed(error)
            return
        self._services.spawn(context.shown.keep(turn, {}, forms=[key]))

    def _store_failed(self, error: Exception) -> None:
        log.warning("hidden calls cannot be kept or read: %s", type(error).__name__)
        self._services.telemetry.context_dropped.labels("store").inc()


def may_be_called(body: Body, turn: Turn) -> bool:
    """Whether a request can hold the tool and its answer can be taken on from a call of it."""
    if _named(body) or turn.facts[-1].role == "assistant" or body.has("functions"):
        return False
    return _small(body, "n") in (None, 1) and not _small(body, "continue_final_message")


def _may_begin(turn: Turn) -> bool:
    """Whether a first request lets its conversation have the tool: its model may call what it likes."""
    body = turn.laid
    choice, form = _small(body, "tool_choice"), _small(body, "response_format")
    free = form is None or (isinstance(form, dict) and form.get("type") == "text")
    tokens = _small(body, "logprobs")  # those of a call that is taken out cannot be told from the others
    return free and not tokens and (choice or "") in _OPEN_CHOICES and may_be_called(body, turn)


def _has_tools(body: Body) -> bool:
    """Whether the client sends tools of its own."""
    return body.kind("tools") == "[" and bool(body.items("tools"))


def _named(body: Body) -> bool:
    """Whether the client has a tool of that name itself, however it escapes it."""
    value = bytes(body.get("tools") or b"")
    if _ESCAPE in value:
        value += msgspec.json.encode(_small(body, "tools"))
    return NAME.encode() in value


def _small(body: Body, name: str) -> Any:
    """A small member's value; None where it cannot be read."""
    try:
        return body.value(name)
    except msgspec.DecodeError:
        return None


def without_tool(body: Body) -> bytes:
    """A body in which the tool was put, without it again."""
    return body.raw.replace(b"," + DEFINITION, b"", 1)
