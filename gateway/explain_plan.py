"""What the layout would do to one request, in prose and as JSON. Nothing is sent, and nothing is stored.

The request is taken for the first one of its team: no forms and no notes of earlier ones are known, but
those of requests that are given.
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
    from ctxgate.compression.ask import Ask
    from ctxgate.compression.layout import LayoutResult
    from ctxgate.compression.policy import Policy
    from ctxgate.inference.wire import Body

_TENANT = "explain"
_DROPPED = {
    "longer": "the placeholders and labels of so much of it would make the prompt too long",
    "hidden": "repeated members of the body hide where it stands",
}


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


@dataclass(slots=True)
class Team:
    """What is known of one team's earlier requests: nothing at first."""

    memory: layout.Memory = field(default_factory=layout.Memory)
    forms: dict[bytes, bytes] = field(default_factory=dict)

    def answer(self, ask: Ask) -> dict[bytes, bytes]:
        """The first text under each claimed key, and what is known of the others."""
        for key, text in ask.claims.items():
            self.forms.setdefault(key, bytes(text))
        return {key: self.forms[key] for key in (*ask.claims, *ask.reads) if key in self.forms}


def plan_of(request: str, body: Body, policy: Policy, team: Team | None = None) -> PlanOf:
    """The plan of a chat request, the first one of its team unless a team is given, which learns from it.

    Raises `MarkError` where its marks are not understood.
    """
    team = team or Team()
    memory = team.memory
    messages = body.items("messages")
    prompt = layout.look(body, messages, _TENANT, memory)
    if policy.level is Level.OFF:
        return PlanOf(request, policy.level, layout.UNCHANGED, body.raw, body.raw)
    work = layout.lay_out(body, messages, prompt, _TENANT, memory, policy)
    try:
        ask = next(work)
        while True:
            ask = work.send(team.answer(ask))
    except StopIteration as end:
        result: LayoutResult = end.value
    return PlanOf(request, policy.level, result, body.raw, b"".join(wire.splice(body.raw, result.edits)))


def plan_as_text(plan: PlanOf) -> str:
    """The edits and what moved, for a reader."""
    head = f"What the layout level {plan.level} makes of {plan.request}, as the first request of its team:"
    stays = (
        [f"Volatile text stays in its place: {_DROPPED[plan.result.dropped]}."] if plan.result.dropped else []
    )
    if not plan.result.reasons:
        return "\n".join((head, "", *stays, "Nothing: it goes upstream as it came.")) + "\n"
    lines = [head, "", *stays]
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
        "dropped": plan.result.dropped,
        "bytes_in": len(plan.before),
        "bytes_out": len(plan.after),
        "outgoing": json.loads(plan.after),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
