"""The request of a conversation before this one, found again without a session id.

A conversation that only grows is known by its chain. Clients change the head of a prompt as well as its
tail; then it is looked for by its messages, from the end backwards: the last two messages of the request
before are somewhere near the end of this one. A single message, or the task that the client names, leads
to it only where the two have messages in common: a "yes" is said in many conversations, and one task can
hold several.

Where a prompt is sent again for another task or to another model, both have the same messages. The request
before is then the one of the same task, even where another one is longer.

What is kept is bounded: outlines by their elements, bodies by their bytes and their number, and
the hashes of what leads to a request by their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ctxgate.compression.recent import Recent
from ctxgate.compression.sent import WIDTH
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ctxgate.compression.sent import Outline, Sent
    from ctxgate.inference.wire import Body

Place: TypeAlias = "tuple[str, str]"
"""A pool and a replica of it, by name."""

ELEMENTS: Final = 2_000_000  # of outlines, at some 30 bytes each
BODY_BYTES: Final = 256 * 2**20
BODIES: Final = 1024
"""Bodies that are kept at most, however short. Many small conversations would fill the memory with what
parsing them made, far more than their bytes; those beyond are compared by digests."""

_KEYS: Final = 200_000  # that lead to a request, of all conversations together, at some 90 bytes each
_ELEMENT_BYTES: Final = 96  # that a parsed body takes for each element, beside its bytes
_FIRST: Final = 4
_WALK: Final = 256  # messages that two requests of one conversation lie apart at most
_CANDIDATES: Final = 8  # keys that lead to other tasks' requests, before one of them is taken


class Owner(NamedTuple):
    """Whose a request is: the tenant, and the task, unique within it."""

    tenant: str
    task: str


class Before(Record, frozen=True):
    """A request that was sent: its prompt, where to, how many tokens the engine counted, and when.

    `conversation` names the line of requests that it was the last of, `task` whom it was sent for.
    """

    conversation: bytes
    outline: Outline
    place: Place
    tokens: int | None
    at_us: int
    task: str = ""


class _Kept(NamedTuple):
    """The bytes of a request, and what they parse to, where the sender had that."""

    raw: bytes
    parsed: Body | None
    weight: int


class Previous:
    """The last request of each conversation, per tenant. Belongs to one event loop."""

    def __init__(self, elements: int = ELEMENTS, body_bytes: int = BODY_BYTES, keys: int = _KEYS) -> None:
        self._requests: Recent[bytes, Before] = Recent(elements, lambda before: len(before.outline) + 8)
        least = body_bytes // BODIES
        self._bodies: Recent[bytes, _Kept] = Recent(body_bytes, lambda kept: max(kept.weight, least))
        self._names: Recent[int, bytes] = Recent(keys)

    def find(self, owner: Owner, sent: Sent) -> Before | None:
        """The request before this one; None for a conversation's first, or where it is forgotten."""
        chain = sent.chain
        links = chain[: max(len(chain) - _WALK, 0) : -1]
        grown = next((before for _, before in self._named(owner.tenant, links)), None)
        if grown is not None and grown.task == owner.task:
            return grown
        return self._of_task(owner, sent.outline) or grown or self._by_messages(owner, sent.outline)

    def latest(self, owner: Owner) -> Before | None:
        """The last request of the task, whatever it says."""
        return next((before for _, before in self._named(owner.tenant, [owner.task])), None)

    def _of_task(self, owner: Owner, outline: Outline) -> Before | None:
        """The last request of the task, where this prompt holds the end of it, or only ends otherwise."""
        for _, before in self._named(owner.tenant, [owner.task]):
            if _is_retry(before.outline, outline) or _holds_end(before.outline, outline):
                return before
        return None

    def _by_messages(self, owner: Owner, outline: Outline) -> Before | None:
        """The request whose end this prompt holds nearest its own end, rather one of the same task."""
        keys: list[bytes | str] = [*outline.last(_WALK, 2), *outline.last(_WALK, 1), owner.task]
        nearest, candidates = None, 0
        for key, before in self._named(owner.tenant, keys):
            if key == owner.task:
                related = nearest is None and _has_in_common(before.outline, outline)
            else:
                related = len(key) > WIDTH or _is_same_talk(before.outline, outline)
            if related and owner.task in (before.task, key):
                return before
            if related:
                nearest, candidates = nearest or before, candidates + 1
                if candidates == _CANDIDATES:
                    break
        return nearest

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
        body: Body | bytes,
        before: Before | None,
        *,
        place: Place,
        tokens: int | None,
        now_us: int,
    ) -> None:
        """Note a request that was sent. It takes the place of `before` where it goes on from its end."""
        outline = sent.outline
        if not outline.messages:
            return
        name = f"{owner.tenant}/{owner.task}/".encode() + sent.chain[-1]
        if before is not None and _replaces(owner, outline, before):
            name = before.conversation
        self._requests.put(name, Before(name, outline, place, tokens, now_us, owner.task))
        if isinstance(body, bytes):
            kept = _Kept(body, None, len(body))
        else:
            kept = _Kept(body.raw, body, len(body.raw) + _ELEMENT_BYTES * len(outline))
        self._bodies.put(name, kept)
        keys: list[bytes | str] = [sent.chain[-1], *outline.last(2, 2), *outline.last(1, 1), owner.task]
        for key in keys:
            self._names.put(hash((owner.tenant, key)), name)

    def _named(self, tenant: str, keys: Iterable[bytes | str]) -> Iterator[tuple[bytes | str, Before]]:
        """The requests that these keys lead to, in the keys' order; each with its key."""
        whose = f"{tenant}/".encode()
        for key in keys:
            name = self._names.get(hash((tenant, key)))
            # Two keys may have one hash, if hardly ever; nobody is told of another tenant's request for that.
            if name is None or not name.startswith(whose):
                continue
            if (before := self._requests.get(name)) is not None:
                yield key, before


def goes_on(before: Before, outline: Outline) -> bool:
    """Whether a prompt holds the end of the one before: else it is a sibling, or history was rewritten."""
    return outline.holds(before.outline.message(-1))


def _replaces(owner: Owner, outline: Outline, before: Before) -> bool:
    """Whether a request goes on from the one before. For another task it may as well be a replay of it."""
    if not goes_on(before, outline):
        return False
    one = before.outline
    return before.task == owner.task or (one.fields == outline.fields and one.messages < outline.messages)


def _is_retry(one: Outline, two: Outline) -> bool:
    """Whether two prompts of equal length differ in nothing but their last two messages, and have more."""
    same = one.elements[: -2 * WIDTH]
    return (
        len(one) == len(two)
        and len(same) > one.head * WIDTH
        and one.fields == two.fields
        and two.elements.startswith(same)
    )


def _holds_end(one: Outline, two: Outline) -> bool:
    """Whether the second prompt holds the first one's last two messages; one will do where it has no more."""
    talk = min(2, len(one) - one.head)
    if talk == 0 or not two.holds(one.elements[-talk * WIDTH :]):
        return False
    return talk > 1 or _is_same_talk(one, two)


def _messages(outline: Outline) -> list[bytes]:
    return outline.digests(outline.tools)


def _has_in_common(one: Outline, two: Outline) -> bool:
    """Whether any message is in both; mostly one of the first is."""
    if any(map(two.holds, one.digests(one.tools, one.tools + _FIRST))):
        return True
    return not set(_messages(one)).isdisjoint(_messages(two))


def _is_same_talk(one: Outline, two: Outline) -> bool:
    """Whether half of what was said behind the first one's head is in the second one too."""
    talk = set(one.digests(one.tools + one.heads))
    return 2 * len(talk.intersection(_messages(two))) >= len(talk) > 0
