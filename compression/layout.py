"""The layout level `safe`: the form first seen is the form sent.

Clients reorder tools, keys and white space between two turns of one conversation, and every such turn
is a new prompt to the prefix cache. Here each part that has been sent before goes out again in the text
of its first sight, and the tools keep their order:

- tools of this conversation keep their order; new ones follow, dropped ones stay dropped;
- a group of tools that is new to the conversation (all of them, at its start) stands in the order in
  which this tenant first sent that set;
- a tool or an assistant's tool calls that are equal to ones this tenant has sent go out in their text.

Nothing is reworded, and nothing that has no earlier form is touched. What was sent before is knowledge
of a store; this module asks for it and does no I/O itself: `lay_out` is a generator that yields an `Ask`
and is sent the answer. The same request and the same answers give the same bytes in any process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeAlias

from ctxgate.compression.canonical import DIGEST_BYTES
from ctxgate.compression.chain import chain
from ctxgate.compression.dialects.chat import Views
from ctxgate.compression.plan import PlanEdit
from ctxgate.compression.recent import Recent
from ctxgate.inference import wire
from ctxgate.inference.wire import Edit

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import msgspec

    from ctxgate.compression.dialects.chat import Facts, ToolFacts
    from ctxgate.inference.wire import Body

REMEMBERED_CONVERSATIONS: Final = 100_000
Order: TypeAlias = "tuple[bytes, ...]"
"""Digests of tools, in the order in which they are sent."""

Text: TypeAlias = "bytes | msgspec.Raw"
Answer: TypeAlias = "Mapping[bytes, bytes]"


@dataclass(frozen=True, slots=True)
class Ask:
    """What layout wants to know of a tenant's earlier prompts.

    The answer holds, for every key of `claims`, the text that was claimed first under that key, now or
    ever before by any process; and for each of `reads` the text under it, where there is one.
    """

    claims: Mapping[bytes, Text] = field(repr=False)
    reads: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as layout sees it. `tools` is None where their order and text are the client's business."""

    facts: tuple[Facts, ...]
    tools: tuple[ToolFacts, ...] | None


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """Edits on the request's bytes, and a `PlanEdit` for each field they change."""

    edits: tuple[Edit, ...] = ()
    reasons: tuple[PlanEdit, ...] = ()
    dropped: str | None = None  # why no edit is made although some form differs


UNCHANGED: Final = LayoutResult()


class Memory:
    """What one process remembers to save work; its contents never change a result.

    `seed` should be a secret of the process: see `Views`.
    """

    def __init__(self, conversations: int = REMEMBERED_CONVERSATIONS, seed: int = 0) -> None:
        self.views = Views(seed=seed)
        self.orders: Recent[bytes, Order] = Recent(conversations)


def look(body: Body, messages: Sequence[msgspec.Raw], tenant: str, memory: Memory) -> Prompt:
    """The facts of a request's messages and tools; only what was never seen is decoded."""
    facts = tuple(memory.views.message(tenant, raw) for raw in messages)
    return Prompt(facts, _tools(body, tenant, memory))


def lay_out(
    body: Body, messages: Sequence[msgspec.Raw], prompt: Prompt, tenant: str, memory: Memory
) -> Generator[Ask, Answer, LayoutResult]:
    """The edits of one request. Yields what it wants to know, and must be sent the answers."""
    claims: dict[bytes, Text] = {
        facts.digest: raw for facts, raw in zip(prompt.facts, messages, strict=True) if facts.varies
    }
    tools: Sequence[msgspec.Raw] = ()
    hashes: list[bytes] = []
    if prompt.tools:
        tools = body.items("tools")
        hashes = chain(tenant, (facts.digest for facts in prompt.facts))
        claims |= {facts.digest: raw for facts, raw in zip(prompt.tools, tools, strict=True)}
    order, unread = _remembered(hashes, memory)
    if not claims:
        return UNCHANGED
    forms = yield Ask(claims, unread)
    for key in unread:  # longest prefix first
        if key in forms:
            order = _unpacked(forms[key])
            break
    wanted_tools: list[bytes] = []
    if prompt.tools:
        digests = tuple(facts.digest for facts in prompt.tools)
        here = hashes[-1]
        placed = yield from _placed(order, digests, here, claimed=here in forms)
        memory.orders.put(here, placed.kept)
        wanted_tools = [forms[digest] for digest in placed.sent]
    wanted = [forms[facts.digest] if facts.varies else None for facts in prompt.facts]
    return _result(body, _differing(messages, wanted), _differing(tools, wanted_tools))


def set_key(tools: Sequence[bytes]) -> bytes:
    """The key under which the first order of a set of tools is kept; the order given does not count."""
    return blake2b(b"".join(sorted(tools)), digest_size=DIGEST_BYTES, person=b"ctxgate set").digest()


def _tools(body: Body, tenant: str, memory: Memory) -> tuple[ToolFacts, ...] | None:
    if body.kind("tools") != "[":
        return None
    found = [memory.views.tool(tenant, raw) for raw in body.items("tools")]
    tools = tuple(tool for tool in found if tool is not None)
    names = {tool.name for tool in tools if tool.name is not None}
    if not tools or len(tools) != len(found) or len(names) != len(tools):
        return None  # no tools, or such as cannot be told apart
    return tools


def _remembered(hashes: Sequence[bytes], memory: Memory) -> tuple[Order, list[bytes]]:
    """The order of the longest prefix this process remembers, and the longer ones, longest first."""
    for position in range(len(hashes) - 1, -1, -1):
        order = memory.orders.get(hashes[position])
        if order is not None:
            return order, list(reversed(hashes[position + 1 :]))
    return (), list(reversed(hashes))


@dataclass(frozen=True, slots=True)
class _Placed:
    sent: Order  # this request's tools
    kept: Order  # what is known at its prefix from now on, to any process


def _placed(order: Order, tools: Order, here: bytes, *, claimed: bool) -> Generator[Ask, Answer, _Placed]:
    """Where each of a request's tools stands. A change of order is claimed at the request's own prefix.

    A prefix has one order for ever: where another request has claimed it (`claimed`), that one counts.
    """
    sent, before = set(tools), set(order)
    group = tuple(tool for tool in tools if tool not in before)
    if len(group) > 1:
        key = set_key(group)
        group = _unpacked((yield Ask({key: b"".join(group)}))[key])
    placed = (*(tool for tool in order if tool in sent), *group)
    if placed == order or claimed:
        return _Placed(placed, order)
    first = _unpacked((yield Ask({here: b"".join(placed)}))[here])
    if first == placed:
        return _Placed(placed, placed)
    return (yield from _placed(first, tools, here, claimed=True))


def _unpacked(text: bytes) -> Order:
    return tuple(text[at : at + DIGEST_BYTES] for at in range(0, len(text), DIGEST_BYTES))


def _differing(items: Sequence[msgspec.Raw], wanted: Sequence[bytes | None]) -> dict[int, bytes]:
    """By position: the text to send, where it is another than the client's."""
    return {
        at: text
        for at, (raw, text) in enumerate(zip(items, wanted, strict=True))
        if text is not None and (memoryview(raw).nbytes != len(text) or bytes(raw) != text)
    }


def _result(body: Body, messages: Mapping[int, bytes], tools: Mapping[int, bytes]) -> LayoutResult:
    edits: list[Edit] = []
    reasons: list[PlanEdit] = []
    for name, texts, reason in (
        ("tools", tools, "the tools in the order and text they were first sent in"),
        ("messages", messages, "the text in which this message was first sent"),
    ):
        if not texts:
            continue
        spans = wire.array_spans(body, name)
        if spans is None:
            return LayoutResult(dropped="hidden")
        edits += (Edit(*spans[at], text) for at, text in texts.items())
        places = ("tools",) if name == "tools" else (f"messages[{at}]" for at in texts)
        reasons += (PlanEdit(place, reason) for place in places)
    return LayoutResult(tuple(edits), tuple(reasons))
