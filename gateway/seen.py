"""One request's prompt as it goes out, beside the one before it in its conversation. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.sent import first_difference
from ctxgate.inference.record import Record
from ctxgate.routing.prefix_chunks import Chunks

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ctxgate.compression.divergence import Divergence
    from ctxgate.compression.previous import Before, Owner
    from ctxgate.compression.sent import Digester, Outline, Sent
    from ctxgate.inference.wire import Body

LONG: Final = 2048  # bytes of an element from which on a part of it may be known


@dataclass(slots=True)
class Lead:
    """The chunks of the first element that no replica knows, once they were asked for.

    `elements`: how many of them the replica that knows most knew when the replicas were compared.
    """

    asked: bool = False
    chunks: Chunks | None = None
    elements: int = 0


@dataclass(slots=True)
class Comparison:
    """Where a prompt leaves the one before it: from digests at once, from the bytes when they are read.

    `bodies`: the two, None where the earlier one is gone or both are read. `most`: the difference with
    the bytes that reading may find at most (see `bounds`), None where it may find another one. `reading`:
    the comparison of large ones, under way or done.
    """

    one: Outline
    two: Outline
    bodies: tuple[Body, Body] | None = None
    most: Divergence | None = None
    reading: Awaitable[Divergence] | None = None
    _best: Divergence | None = None
    _exact: bool = False

    @property
    def best(self) -> Divergence:
        """The difference as exact as it is known so far."""
        if self._best is None:
            self._best = first_difference(self.one, self.two)
        return self._best

    @property
    def exact(self) -> bool:
        """Whether it comes from the bytes."""
        return self._exact

    def read(self, found: Divergence) -> None:
        """Take the exact difference."""
        self._best, self._exact, self.bodies = found, True, None

    def is_slight(self, prompt: int, block: int) -> bool:
        """Whether what lies behind the difference certainly fills no block of a prompt of so many tokens."""
        most = self.most
        return (
            most is not None
            and most.index is not None
            and most.index >= max(self.one.heads, self.two.heads)
            and most.avoidable_bytes * prompt < block * self.two.size
        )


class Seen(Record, frozen=True):
    """A prompt as it goes out, the request before it, and where the two part, None where they do not.

    `kin`: the request before it is no part of its conversation. It began an earlier one, with another
    version of this head.
    """

    owner: Owner
    sent: Sent
    body: Body
    before: Before | None = None
    comparison: Comparison | None = None
    kin: bool = False
    lead: Lead = msgspec.field(default_factory=Lead)


def chunked(digester: Digester, seen: Seen, known: int) -> bool:
    """Make the chunks of what stands behind so many known links, once: whether there are any.

    Only a new conversation, or one that was edited, may share a part of what is new in it.
    """
    lead, at = seen.lead, max(known, 1)
    if lead.asked or (seen.before is not None and seen.comparison is None):
        return False
    lead.asked = True
    sent, body = seen.sent, seen.body
    if at >= len(sent.chain) or (size := sent.size_of(at)) < LONG:
        return False
    if body.has("messages"):
        elements = body.items("messages")
    else:  # a completions request: its prompt is one element
        elements = [body.get("prompt") or msgspec.Raw(b"null")]
    links = digester.chunks(sent, elements, at)
    lead.chunks = Chunks(at, size, links) if links else None
    return bool(links)
