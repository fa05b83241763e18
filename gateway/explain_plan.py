"""What the layout would do to one request, in prose and as JSON. Nothing is sent, and nothing is stored.

The request is taken for the first one of its tenant: no forms and no notes of earlier ones are known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctxgate.compression import layout
from ctxgate.compression.moved import HEADING
from ctxgate.compression.policy import Level
from ctxgate.inference import wire

if TYPE_CHECKING:
    from ctxgate.compression.layout import LayoutResult
    from ctxgate.compression.policy import Policy
    from ctxgate.inference.wire import Body

_TENANT = "explain"


@dataclass(frozen=True, slots=True)
class PlanOf:
    """The plan of one request: its level, its edits, and the bytes before and after."""

    request: str
    level: str
    result: LayoutResult
    before: bytes = field(repr=False)
    after: bytes = field(repr=False)

    def notes(self) -> list[tuple[str, str]]:
        """Field and text of each note."""
        found = []
        for at, message in enumerate(json.loads(self.after)["messages"]):
            if not any(edit.field == f"messages[{at}]" for edit in self.result.reasons):
                continue
            content = message.get("content")
            last = content if isinstance(content, str) else content[-1].get("text", "") if content else ""
            start = last.rfind(HEADING)
            if start >= 0:
                found.append((f"messages[{at}]", last[start:]))
        return found


def plan_of(request: str, body: Body, policy: Policy) -> PlanOf:
    """The plan of a chat request. Raises `MarkError` where its marks are not understood."""
    memory = layout.Memory()
    messages = body.items("messages")
    prompt = layout.look(body, messages, _TENANT, memory)
    if policy.level is Level.OFF:
        return PlanOf(request, policy.level, layout.UNCHANGED, body.raw, body.raw)
    work = layout.lay_out(body, messages, prompt, _TENANT, memory, policy)
    try:
        ask = next(work)
        while True:
            ask = work.send({key: bytes(text) for key, text in ask.claims.items()})
    except StopIteration as end:
        result: LayoutResult = end.value
    return PlanOf(request, policy.level, result, body.raw, b"".join(wire.splice(body.raw, result.edits)))


def plan_as_text(plan: PlanOf) -> str:
    """The edits and what moved, for a reader."""
    head = f"What the layout level {plan.level} makes of {plan.request}, as the first request of its team:"
    if not plan.result.reasons:
        return f"{head}\n\nNothing: it goes upstream as it came.\n"
    lines = [head, ""]
    notes = dict(plan.notes())
    for edit in plan.result.reasons:
        lines.append(f"{edit.field}: {edit.reason}")
        for passage in plan.result.moved:
            if edit.field == f"messages[{passage.message}]":
                lines += (f"  takes {json.dumps(words, ensure_ascii=False)}" for words in passage.words)
        lines += (f"  | {line}" for line in notes.get(edit.field, "").splitlines())
    lines += ["", f"{len(plan.before):,} bytes come in, {len(plan.after):,} go out."]
    return "\n".join(lines) + "\n"


def plan_as_json(plan: PlanOf) -> str:
    """The same as a JSON object, with the outgoing body."""
    document = {
        "request": plan.request,
        "level": plan.level,
        "edits": [{"field": edit.field, "reason": edit.reason} for edit in plan.result.reasons],
        "moved": [
            {"message": passage.message, "words": list(passage.words), "line": passage.line}
            for passage in plan.result.moved
        ],
        "bytes_in": len(plan.before),
        "bytes_out": len(plan.after),
        "outgoing": json.loads(plan.after),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
