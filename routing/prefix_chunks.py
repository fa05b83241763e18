"""Where two long elements that begin alike part, to a kilobyte: what one replica has read of them. Pure.

Conversations share a long system prompt, or a document in the first message, and end it differently. Their
chains part at the whole element. Its chunks, each hash covering all before it, tell how far it was shared.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHUNK: Final = 1024  # bytes


class Chunks(Record, frozen=True):
    """The chunks of one element: `at` is its place in the prompt's chain, `size` its bytes.

    `links` has an opaque hash for each leading whole chunk.
    """

    at: int
    size: int
    links: tuple[bytes, ...]


class Shared(NamedTuple):
    """How much of an element another one, of this `link`, has: the first `size` bytes of its `of` bytes."""

    link: bytes
    size: int
    of: int


class ReadChunks:
    """The chunks that one replica has read, `most` at the most. Each names the last element that has it."""

    __slots__ = ("_elements", "_links", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._links: dict[bytes, bytes] = {}
        self._elements: dict[bytes, Chunks] = {}  # by link, the one read last at the end

    def __len__(self) -> int:
        return len(self._links)

    def put(self, link: bytes, chunks: Chunks) -> None:
        """Note that an element of this link was read."""
        if len(chunks.links) > self._most:
            return
        self._elements.pop(link, None)
        self._elements[link] = chunks
        self._links.update(dict.fromkeys(chunks.links, link))
        if len(self._links) > self._most:
            self._halve()

    def shared(self, chunks: Chunks) -> Shared | None:
        """The element that begins like this one for longest; None where none does for a whole chunk."""
        behind: Sequence[bytes] = chunks.links[::-1]
        at = bisect_left(behind, True, key=self._links.__contains__)
        if at == len(behind):
            return None
        link = self._links[behind[at]]
        return Shared(link, (len(behind) - at) * CHUNK, self._elements[link].size)

    def keep(self, known: Callable[[bytes], bool]) -> None:
        """Forget the elements that are not known any more."""
        self._rebuild({link: chunks for link, chunks in self._elements.items() if known(link)})

    def _halve(self) -> None:
        kept: dict[bytes, Chunks] = {}
        room = self._most // 2
        for link, chunks in reversed(self._elements.items()):
            room -= len(chunks.links)
            if kept and room < 0:
                break
            kept[link] = chunks
        self._rebuild(dict(reversed(kept.items())))

    def _rebuild(self, elements: dict[bytes, Chunks]) -> None:
        # A chunk stays with all that stand before it in the same element: `shared` relies on that.
        self._elements, self._links = elements, {}
        for link, chunks in elements.items():
            self._links.update(dict.fromkeys(chunks.links, link))
