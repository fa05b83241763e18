"""The first requests of conversations whose heads are versions of one another.

What a conversation's first request can find in a cache is the head that earlier conversations left there:
tools and leading system messages. Where its own head was never sent before but is another version of one
that was (a clock in it moved, a tool was added), that one says why nothing is found.

Two heads are versions of each other if their system texts begin or end alike; without system messages, if
their first or last tools do. Another agent of the same team has another system text.

What is kept is bounded by its bytes. Belongs to one event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ctxgate.compression.previous import Before
from ctxgate.compression.recent import Recent
from ctxgate.compression.sent import WIDTH

if TYPE_CHECKING:
    from ctxgate.compression.previous import Owner, Place
    from ctxgate.compression.sent import Sent
    from ctxgate.inference.wire import Body

BODY_BYTES: Final = 32 * 2**20
LARGEST: Final = 2**18  # bytes of a request; one that is longer is hardly a conversation's first
_HEADS: Final = 20_000
_ALIKE: Final = 128  # bytes at either end of the system messages that make two of them versions of one text

_Key = tuple[str, bytes]


class Kin(NamedTuple):
    """The earlier request and its body."""

    before: Before
    body: Body


class Kindred:
    """First requests by the ends of their heads, per tenant."""

    def __init__(self, body_bytes: int = BODY_BYTES) -> None:
        self._bodies: Recent[_Key, Kin] = Recent(body_bytes, lambda kin: len(kin.body.raw))
        self._ends: Recent[_Key, bytes] = Recent(_HEADS)

    def find(self, owner: Owner, sent: Sent, body: Body) -> Kin | None:
        """The nearest earlier version of this head; None where this very head was sent before, or none is."""
        head = _head(sent)
        if head is None or self._bodies.get((owner.tenant, head)) is not None:
            return None
        for end in _ends(sent, body):
            name = self._ends.get((owner.tenant, end))
            if name is not None and (kin := self._bodies.get((owner.tenant, name))) is not None:
                return kin
        return None

    def keep(
        self, owner: Owner, sent: Sent, body: Body, *, place: Place, tokens: int | None, now_us: int
    ) -> None:
        """Note a conversation's first request."""
        head = _head(sent)
        if head is None or len(body.raw) > LARGEST:
            return
        before = Before(b"", sent.outline, place, tokens, now_us, owner.task)
        self._bodies.put((owner.tenant, head), Kin(before, body))
        for end in _ends(sent, body):
            self._ends.put((owner.tenant, end), head)


def _head(sent: Sent) -> bytes | None:
    """What names a whole head under the fields that select the cache; None where there is none."""
    return sent.chain[1] if sent.outline.head else None


def _ends(sent: Sent, body: Body) -> tuple[bytes, bytes]:
    """The first and last bytes of the head's system messages, else of its tools, under the same fields."""
    outline = sent.outline
    selects = sent.chain[0]
    if not outline.heads:
        head = outline.elements[: outline.tools * WIDTH]
        return selects + b"first" + head[:WIDTH], selects + b"last" + head[-WIDTH:]
    messages, order = body.items("messages"), outline.order
    first, last = (at if order is None else order[at] for at in (0, outline.heads - 1))
    start, end = bytes(memoryview(messages[first])[:_ALIKE]), bytes(memoryview(messages[last])[-_ALIKE:])
    return selects + b"<" + start, selects + b">" + end
