"""Conversations whose tool results are shortened when they arrive."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.arrivals import ArrivalPolicy, ArrivalsMemory, Arrived, arrivals
from ctxgate.compression.dialects.chat import facts_of
from support.forms import TENANT, Forms

if TYPE_CHECKING:
    from collections.abc import Sequence

LONG: Final = "\n".join(f"line {number} of a long listing" for number in range(400))
POLICY: Final = ArrivalPolicy(2000)
SYSTEM: Final = {"role": "system", "content": "You help."}
USER: Final = {"role": "user", "content": "fix it"}
DONE: Final = {"role": "assistant", "content": "done"}


def reference(digest: bytes) -> str:
    return digest.hex()[:24]


def call(id_: str, name: str = "bash") -> dict[str, Any]:
    function = {"name": name, "arguments": "{}"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id_, "type": "function", "function": function}],
    }


def result(id_: str, text: Any = LONG, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": text, **more}


def raws(messages: Sequence[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(each).encode() for each in messages]


@dataclass
class Process:
    """One gateway process over a store that others share."""

    forms: Forms = field(default_factory=Forms)
    policy: ArrivalPolicy = POLICY
    memory: ArrivalsMemory = field(default_factory=ArrivalsMemory)
    tenant: str = TENANT

    def arrived(self, messages: list[bytes], laid: list[bytes] | None = None) -> Arrived:
        facts = [facts_of(raw) for raw in messages]
        work = arrivals(messages, facts, self.policy, self.memory, self.tenant, self.reference, laid)
        try:
            ask = next(work)
            while True:
                ask = work.send(self.forms.take(self.tenant, ask.claims, ask.reads))
        except StopIteration as end:
            found: Arrived = end.value
            return found

    def reference(self, digest: bytes) -> str:
        """The id of an original, which differs between tenants."""
        return reference(digest) if self.tenant == TENANT else reference(digest[::-1])

    def content(self, messages: Sequence[dict[str, Any]], at: int) -> Any:
        """What a message says as it goes out."""
        found = self.arrived(raws(messages))
        return json.loads(found.texts[at])["content"] if at in found.texts else messages[at]["content"]
