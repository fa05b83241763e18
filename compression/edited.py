"""A request after edits: its bytes, and what is known of its messages and tools.

Edits inside messages and tools need no second look at what they leave alone. What they change is looked at
as if it had come from a client, so that a check of the result does not depend on how the edits were made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxgate.compression.layout import Memory, Prompt, look, look_at_tools
from ctxgate.inference import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.inference.wire import Body, Edit


def edited(
    body: Body, prompt: Prompt, edits: Sequence[Edit], tenant: str, memory: Memory
) -> tuple[Body, Prompt]:
    """The edited body, and its prompt. `prompt` is that of the body before.

    The same as `look` finds in the spliced bytes. Raises ValueError where they are no JSON object with an
    array of messages, or edits overlap.
    """
    after = wire.rewritten(body, edits)
    if after is None:
        return looked_at_again(body, edits, tenant, memory)
    before, messages = body.items("messages"), after.items("messages")
    facts = list(prompt.facts)
    changed = [at for at, (old, new) in enumerate(zip(before, messages, strict=True)) if old is not new]
    for at, each in zip(
        changed, memory.views.messages(tenant, [messages[at] for at in changed]), strict=True
    ):
        facts[at] = each
    return after, Prompt(tuple(facts), look_at_tools(after, tenant, memory))


def looked_at_again(body: Body, edits: Sequence[Edit], tenant: str, memory: Memory) -> tuple[Body, Prompt]:
    """`edited` by a scan of all bytes."""
    after = wire.parse(b"".join(wire.splice(body.raw, edits)))
    return after, look(after, after.items("messages"), tenant, memory)
