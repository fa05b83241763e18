"""A long conversation with a running gateway, and the work of summarizing it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.gateway import identity
from ctxgate.gateway.flow import Surface
from ctxgate.gateway.inbound import read_inbound
from ctxgate.gateway.pipeline import Pipeline
from ctxgate.gateway.summary_work import SummaryWork
from ctxgate.inference import wire
from support.gateway import ALPHA, MODEL

if TYPE_CHECKING:
    from ctxgate.gateway.services import Services

TASK: Final = "Port the billing service to Rust."
RULE: Final = "Never commit to main."
SYSTEM: Final = {"role": "system", "content": "You are an agent."}
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
NOTES: Final = (
    "Goal:\n- port the invoice parser\nDecisions:\n- dates are read as UTC\nState:\n- forty tests pass"
)


def conversation(rounds: int = 12, lines: int = 6) -> list[dict[str, Any]]:
    """A system message, the task, a rule, `rounds` tool calls with results, and the user's next wish."""
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": TASK}]
    messages.append({"role": "user", "content": RULE})
    for number in range(rounds):
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": f"make test-{number} -j 2"})},
        }
        messages.append({"role": "assistant", "content": f"I run part {number}.", "tool_calls": [call]})
        result = [f"src/part{number}/file{line}.rs: checked without a finding" for line in range(lines)]
        result.append(f"Error: cannot open part {number}")
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": "\n".join(result)})
    messages.append({"role": "assistant", "content": "The parser reads dates as UTC now."})
    messages.append({"role": "user", "content": "Go on with the tax module."})
    return messages


def body_of(messages: list[dict[str, Any]], **more: Any) -> bytes:
    """A chat request."""
    return json.dumps({"model": MODEL, "messages": messages, **more}).encode()


async def work_of(
    services: Services,
    messages: list[dict[str, Any]],
    *,
    kept: int = 1,
    budget: int = 600,
    task: str = "port",
    key: str = ALPHA,
    **more: Any,
) -> SummaryWork:
    """Summarize all but the head and the last `kept` messages; the request is planned, but not sent."""
    raw = body_of(messages, **more)
    headers = {"x-ctxgate-task": task}
    inbound = read_inbound(f"req_{services.new_id()}", Surface.CHAT, headers, raw, services.now_us())
    pipeline = Pipeline(services)
    owner = services.keys.find(key)
    assert owner is not None
    identified = identity.identify(inbound, owner, services.roots)
    planned = await pipeline.plan(pipeline.allow(identified))
    routed = pipeline.route(planned, ())
    assert routed is not None
    sent = wire.parse(b"".join(planned.plan.outgoing))
    dropped = inbound.messages[2 : len(messages) - kept]
    return SummaryWork(
        held=pipeline.hold(routed, 1),
        sent=sent,
        dropped=dropped,
        task=inbound.messages[1],
        budget=budget,
        source_bytes=sum(memoryview(message).nbytes for message in dropped),
    )


def large(messages: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """The same conversation with one result of `size` bytes."""
    copy: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(messages))
    copy[4]["content"] = "\n".join(f"line {n} of a long report" for n in range(size // 24))
    return copy
