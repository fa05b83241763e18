"""The request of a conversation before this one, found again without a session id.

A conversation that only grows is known by its chain. Clients change the head of a prompt as well as its
tail; then it is looked for by its messages, from the end backwards: the last two messages of the request
before are somewhere near the end of this one. A single message, or the task that the client names, leads
to it only where the two have messages in common: a "yes" is said in many conversations, and one task can
hold several.

What is kept is bounded: outlines by their elements, bodies by their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ctxgate.compression.recent import Recent

if TYPE_CHECKING:
    from ctxgate.compression.sent import Outline, Sent
    from ctxgate.inference.wire import Body

Place: TypeAlias = "tuple[str, str]"
"""A pool and a replica of it, by name."""

ELEMENTS: Final = 2_000_000  # of outlines, at some 30 bytes each
BODY_BYTES: Final = 256 * 2**20
_CONVERSATIONS: Final = 200_000  # names that lead to one
_ELEMENT_BYTES: Final = 96  # that a parsed body takes for each element, beside its bytes
_WALK: Final = 256  # messages that two requests of one conversation lie apart at most


class Owner(NamedTuple):
    """Whose a request is: the tenant, and the task, unique within it."""

    tenant: str
    task: str


@dataclass(frozen=True, slots=True)
class Before:
    """A request that was sent: its prompt, where to, how many tokens the engine counted, and when.

    `conversation` names the line of requests that it was the last of.
    """

    conversation: bytes
    outline: Outline = field(repr=False)
    place: Place
    tokens: int | None
    at_us: int


class _Kept(NamedTuple):
    """The bytes of a request, and what they parse to, where the sender had that."""

    raw: bytes
    parsed: Body | None
    weight: int


class Previous:
    """The last request of each conversation, per tenant. Belongs to one event loop."""

    def __init__(self, elements: int = ELEMENTS, body_bytes: int = BODY_BYTES) -> None:
        self._requests: Recent[bytes, Before] = Recent(elements, lambda before: len(before.outline) + 8)
        self._bodies: Recent[bytes, _Kept] = Recent(body_bytes, lambda kept: kept.weight)
        self._names: Recent[tuple[str, bytes | str], bytes] = Recent(4 * _CONVERSATIONS)

    def find(self, owner: Owner, sent: Sent) -> Before | None:
        """The request before this one; None for a conversation's first, or where it is forgotten."""
        tenant, outline, chain = owner.tenant, sent.outline, sent.chain
        for at in range(len(chain) - 1, max(len(chain) - _WALK, 0), -1):
            if (before := self._named(tenant, chain[at])) is not None:
                return before
        least = max(outline.messages - _WALK, 0)
        for at in range(outline.messages - 1, least, -1):
            pair = outline.message(at - 1) + outline.message(at)
            if (before := self._named(tenant, pair)) is not None:
                return before
        for at in range(outline.messages - 1, least - 1, -1):
            before = self._named(tenant, outline.message(at))
            if before is not None and _is_same_talk(before.outline, outline):
                return before
        before = self._named(tenant, owner.task)
        if before is None or set(_messages(before.outline)).isdisjoint(_messages(outline)):
            return None
        return before

    def body(self, before: Before) -> bytes | None:
        """The bytes of that request, None where they are no longer kept."""
        kept = self._bodies.get(before.conversation)
        return None if kept is None else kept.raw

    def parsed(self, before: Before) -> Body | None:
        """That request as it was parsed when it was kept, None where it was not, or no longer is."""
        kept = self._bodies.get(before.conversation)
        return None if kept is None else kept.parsed

    def keep(
        self,
        owner: Owner,
        sent: Sent,
        body: bytes,
        before: Before | None,
        *,
        place: Place,
        tokens: int | None,
        now_us: int,
        parsed: Body | None = None,
    ) -> None:
        """Note a request that was sent. It takes the place of `before` where it goes on from its end.

        `parsed`: the body again, where it need not be parsed when it is compared.
        """
        outline = sent.outline
        if not outline.messages:
            return
        name = owner.tenant.encode() + sent.chain[-1]
        if before is not None and goes_on(before, outline):
            name = before.conversation
        self._requests.put(name, Before(name, outline, place, tokens, now_us))
        weight = len(body) + (0 if parsed is None else _ELEMENT_BYTES * len(outline))
        self._bodies.put(name, _Kept(body, parsed, weight))
        last = outline.message(-1)
        pair = (outline.message(-2) + last,) if outline.messages > 1 else ()
        for key in (sent.chain[-1], *pair, last, owner.task):
            self._names.put((owner.tenant, key), name)

    def _named(self, tenant: str, key: bytes | str) -> Before | None:
        name = self._names.get((tenant, key))
        return None if name is None else self._requests.get(name)


def goes_on(before: Before, outline: Outline) -> bool:
    """Whether a prompt holds the end of the one before: else it is a sibling, or history was rewritten."""
    return outline.holds(before.outline.message(-1))


def _messages(outline: Outline) -> list[bytes]:
    return outline.digests(outline.tools)


def _is_same_talk(one: Outline, two: Outline) -> bool:
    """Whether half of what was said behind the first one's head is in the second one too."""
    talk = set(one.digests(one.tools + one.heads))
    return 2 * len(talk.intersection(_messages(two))) >= len(talk) > 0
