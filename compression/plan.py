"""The outgoing prompt and why it is what it is.

The edits of the layout come first; what the gateway adds for metering is made here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.inference import wire
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from ctxgate.inference.wire import Body, Pieces

_DICT: Final = msgspec.json.Decoder(dict[str, object])


class PlanEdit(Record, frozen=True):
    """One change to the outgoing body: what was changed and for which purpose."""

    field: str
    reason: str


class PromptPlan(Record, frozen=True):
    """The bytes to send, in pieces, and every edit that made them differ from the client's."""

    outgoing: Pieces
    edits: tuple[PlanEdit, ...] = ()
    layout_edits: int = 0  # how many of them the layout made
    injected_usage: bool = False
    injected_continuous: bool = False

    def __repr__(self) -> str:
        return f"PromptPlan({self.size} bytes, edits={self.edits})"  # never the prompt itself

    @property
    def size(self) -> int:
        """Bytes to send."""
        return sum(map(len, self.outgoing))


def plan(
    body: Body,
    *,
    stream: bool,
    served_model: str | None,
    continuous_usage: bool,
    laid: tuple[PlanEdit, ...] = (),
    shaped: tuple[PlanEdit, ...] = (),
    cache_salt: str | None = None,
) -> PromptPlan:
    """The body as it goes upstream, which already carries the edits of the layout and of the context.

    `laid` and `shaped` say what these were.
    A stream is asked for its usage, which the client sees only if it asked too; the model's name is
    replaced where the engine knows it by another; `cache_salt` keeps other tenants out of the prompt's
    cache blocks. Everything else is the client's own bytes.
    """
    edits = [*laid, *shaped]
    members: dict[str, bytes] = {}
    if served_model is not None:
        members["model"] = msgspec.json.encode(served_model)
        edits.append(PlanEdit("model", "the engine's name of the model"))
    wanted = stream_options(body) if stream else {}
    asked = wanted.get("include_usage") is True
    asked_continuous = wanted.get("continuous_usage_stats") is True
    inject_continuous = stream and continuous_usage and not asked_continuous
    if stream and (not asked or inject_continuous):
        options = {**wanted, "include_usage": True}
        if inject_continuous:
            options["continuous_usage_stats"] = True
        members["stream_options"] = msgspec.json.encode(options)
        edits.append(PlanEdit("stream_options", "usage of the stream, for the ledger"))
    if cache_salt is not None:
        members["cache_salt"] = msgspec.json.encode(cache_salt)
        edits.append(PlanEdit("cache_salt", "the tenant's own part of the prefix cache"))
    outgoing = wire.with_members(body, members) if members else (body.raw,)
    return PromptPlan(outgoing, tuple(edits), len(laid), stream and not asked, inject_continuous)


def untouched(body: Body, cache_salt: str | None = None) -> PromptPlan:
    """The client's own bytes, with nothing added but the salt: a failed plan is no way past isolation."""
    if cache_salt is None:
        return PromptPlan((body.raw,))
    return PromptPlan(wire.with_member(body, "cache_salt", msgspec.json.encode(cache_salt)))


def stream_options(body: Body) -> dict[str, object]:
    """The client's stream options, empty when absent or null. Raises `msgspec.DecodeError` if no object."""
    raw = body.get("stream_options")
    if raw is None or bytes(raw) == b"null":
        return {}
    return wire.decoded(_DICT, raw)
