"""What one replica has read: tokens of prompts by link, and which of them it should still hold. Pure."""

from __future__ import annotations

from bisect import bisect_left
from math import gcd
from typing import TYPE_CHECKING, Final

from ctxgate.routing.lru_stack import LruStack, Use
from ctxgate.routing.prefix_ahead import Ahead
from ctxgate.routing.prefix_chunks import ReadChunks
from ctxgate.routing.prefix_points import Point, apportioned, correct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.routing.prefix_chunks import Chunks

# Reported hits are multiples of the block. So many different ones, and their greatest common divisor is it.
_ENOUGH_HITS: Final = 8
# A replica that decodes what another one has read calls all but the last token of every prompt cached.
_SUSPECT: Final = 3
_LEAST_BLOCK: Final = 16
_PRIOR: Final = 256  # tokens of answers that are believed to be kept before any reply tells
_ANSWERS: Final = 100_000  # tokens of answers after which older experience counts half
_CHUNKS: Final = 50_000  # hashes of chunks; each counts as a link
LINK_BYTES: Final = 250  # measured on CPython 3.11; the test of a long conversation holds it to that


class PlaceMemory:
    """The points of one place, in two generations: what is not read for a whole one is forgotten.

    Every use of a prompt is noted at all of its links at once. So where a link is known those before it are
    known, too, and were read no earlier.
    """

    __slots__ = (
        "_answers",
        "_common",
        "_hits",
        "_kept",
        "_read",
        "_stack",
        "_suspect",
        "ahead",
        "block",
        "chunks",
        "old",
        "old_uses",
        "size",
        "uses",
        "written",
        "young",
    )

    def __init__(self) -> None:
        self.young: dict[bytes, Point] = {}
        self.old: dict[bytes, Point] = {}
        self.uses: dict[bytes, Use] = {}
        self.old_uses: dict[bytes, Use] = {}
        self.ahead = Ahead()
        self.chunks = ReadChunks(_CHUNKS)
        self.written = 0  # tokens computed, not found
        self.block: int | None = None  # tokens of a block, as told or learned
        self.size: int | None = None  # tokens that the cache has room for
        self._common = 0  # greatest common divisor of the hits reported
        self._hits: set[int] = set()  # different ones, as far as they are needed
        self._suspect = 0
        self._read = 0  # tokens of all prompts and answers, however often they were read
        self._stack = LruStack()
        self._kept, self._answers = float(_PRIOR), float(_PRIOR)

    # ---- reading -------------------------------------------------------------------------------------

    def depth(self, behind: Sequence[bytes]) -> int:
        """How many leading links of a chain are known, counting prompts under way.

        `behind` is the chain, its last link first: so that in each generation the unknown links come first.
        """
        count = len(behind)
        unknown = bisect_left(behind, True, key=self.young.__contains__)
        if self.old:
            unknown = bisect_left(behind, True, 0, unknown, key=self.old.__contains__)
        if unknown and behind[unknown - 1] in self.ahead.tokens:  # it goes on from what was read
            unknown = bisect_left(behind, True, 0, unknown, key=self.ahead.tokens.__contains__)
        return count - unknown

    def reach(self, chain: Sequence[bytes], guess: int) -> int | None:
        """The `depth` of a chain in a few look-ups, where it is 0 or as it was guessed; else None."""
        young, old, ahead = self.young, self.old, self.ahead.tokens
        first, link = chain[0], chain[guess - 1]
        if first not in young and first not in old and first not in ahead:
            return 0
        if link in young or link in old:
            if guess == len(chain):
                return guess
            behind = chain[guess]
            if behind not in young and behind not in old and behind not in ahead:
                return guess
        return None

    def use(self, link: bytes) -> Use | None:
        """The last time a link was read; None where it is not known or only under way."""
        return self.uses.get(link) or self.old_uses.get(link)

    def point(self, link: bytes) -> Point | None:
        """The tokens up to a link that was read."""
        return self.young.get(link) or self.old.get(link)

    def last(self, link: bytes) -> tuple[Point, Use] | None:
        """A link's tokens and last use; None where it is not known or only under way."""
        point = self.young.get(link)
        if point is not None:
            return point, self.uses[link]
        point = self.old.get(link)
        return None if point is None else (point, self.old_uses[link])

    def fits(self, use: Use, tokens: int) -> bool:
        """Whether a prompt of so many tokens is held for certain: there was no time to evict any of it."""
        return self.size is None or self._read - use.read + tokens <= self.size

    def resident(self, chain: Sequence[bytes], depth: int) -> int:
        """Tokens of the first `depth` links that the cache should still hold, as far as its size is told."""
        while depth:
            link = chain[depth - 1]
            last = self.last(link)
            if last is None:
                return 0
            point, use = last
            tokens = point.tokens + (use.answer if use.end == link else 0)
            if self.size is None:
                return tokens
            above = self._stack.above(use)
            room = -1 if above is None else self.size - above
            if room >= tokens:
                return tokens
            start = self._start(chain, depth, use)
            before = self.point(chain[start - 1]) if start else None
            begin = 0 if before is None else before.tokens
            if room > 0:
                return min(tokens, begin + room)
            depth = start
        return 0

    def shared(self, chain: Sequence[bytes], depth: int, chunks: Chunks | None) -> tuple[int, bytes] | None:
        """The tokens of a prompt whose first `depth` links are known, with what chunks add; and whose.

        None where they add nothing.
        """
        if chunks is None or chunks.at != depth or not self.chunks:
            return None
        found, before = self.chunks.shared(chunks), self.point(chain[depth - 1])
        point = None if found is None else self.point(found.link)
        if found is None or point is None or before is None:
            return None
        more = max(point.tokens - before.tokens, 0) * found.size // max(found.of, found.size)
        return before.tokens + more, found.link

    def kept_of(self, answer: int) -> int:
        """How many tokens of an answer the next prompt's rendering should find, from experience."""
        return int(answer * self._kept / self._answers)

    @property
    def trusted(self) -> bool:
        """False where every hit reported is the prompt less one token, as no engine's own cache can find."""
        return self._suspect < _SUSPECT

    @property
    def links(self) -> int:
        """How many links are kept, counting both generations."""
        return len(self.young) + len(self.old) + len(self.ahead.tokens) + len(self.chunks)

    # ---- learning ------------------------------------------------------------------------------------

    def read(
        self,
        chain: Sequence[bytes],
        sizes: Sequence[int],
        prompt: int,
        cached: int | None,
        answer: int,
        now_us: int,
        chunks: Chunks | None = None,
    ) -> None:
        """Note that a prompt was read, `cached` tokens of it from the cache (None: untold)."""
        cached = self._believed(prompt, cached)
        points = self._points(chain)
        known = len(points)
        while known and points[known - 1] is None:
            known -= 1
        shared = None if chunks is None or not known else self.shared(chain, known, chunks)
        if 0 < known < len(points) and cached is not None and shared is None:
            self._experience(chain[known - 1], cached)
        if known and self.size is not None:
            self._raise(chain, known, cached)
        if shared is None:
            correct(points, known, cached)  # else the hit ends inside an element
        elif (other := self.use(shared[1])) is not None and (before := points[known - 1]) is not None:
            self._stack.take(other, shared[0] - before.tokens)  # now it was read again
        self.written += max(prompt - (cached or 0), 0) + answer
        self._read += prompt + answer
        use = Use(now_us, self.written, self._read, (chain[-1], answer))
        if self.size is not None:
            block = self.block or _LEAST_BLOCK  # only full ones are kept, and the last token is in none
            self._stack.push(use, max(prompt + answer - 1, 0) // block * block)
        self.young.update(zip(chain, apportioned(points, sizes, prompt), strict=True))
        self.uses.update(dict.fromkeys(chain, use))
        if chunks is not None:
            self.chunks.put(chain[chunks.at], chunks)

    def age(self) -> None:
        """Begin a new generation."""
        self.old, self.young = self.young, {}
        self.old_uses, self.uses = self.uses, {}
        self.chunks.keep(self.old.__contains__)

    def tell_block(self, tokens: int | None) -> None:
        """Take what the engine's configuration says, until its hits say otherwise; None: it says nothing."""
        if len(self._hits) < _ENOUGH_HITS:
            self.block = tokens

    def expect_answers(self, share: float) -> None:
        """Take a share of the answers' tokens, 0 to 1, as the experience so far."""
        self._kept, self._answers = _PRIOR * share, float(_PRIOR)

    # ---- the parts of it -----------------------------------------------------------------------------

    def _believed(self, prompt: int, cached: int | None) -> int | None:
        """The hit reported, None where this replica's reports are not to be believed."""
        if not cached:
            return cached
        if cached >= prompt - 1 and cached % _LEAST_BLOCK:
            self._suspect += 1
        elif cached < prompt - 1:
            self._suspect = 0
        if not self.trusted:
            return None
        if not self._suspect:
            self._common = gcd(self._common, cached)
            if len(self._hits) < _ENOUGH_HITS:
                self._hits.add(cached)
            if len(self._hits) >= _ENOUGH_HITS:
                self.block = self._common
        return cached

    def _points(self, chain: Sequence[bytes]) -> list[Point | None]:
        points = [*map(self.young.get, chain)]
        if self.old and None in points:
            old = self.old
            points = [point or old.get(link) for link, point in zip(chain, points, strict=True)]
        return points

    def _experience(self, link: bytes, cached: int) -> None:
        """How far a hit reached into the answer behind the prompt that this one goes on from."""
        last = self.last(link)
        if last is None or not last[1].answer or last[1].end != link:
            return
        point, use = last
        block = self.block or _LEAST_BLOCK
        whole = point.tokens // block * block
        most = (point.tokens + use.answer - 1) // block * block - whole
        if not point.counted or most <= 0 or cached < whole:
            return
        if self._answers > _ANSWERS:
            self._kept, self._answers = self._kept / 2, self._answers / 2
        self._kept += min(cached - whole, most)
        self._answers += most

    def _raise(self, chain: Sequence[bytes], known: int, cached: int | None) -> None:
        """Take a prompt's beginning from the uses that read it before: now it was read again."""
        depth, block = known, self.block or _LEAST_BLOCK
        while depth:
            link = chain[depth - 1]
            last = self.last(link)
            if last is None:  # some of an older generation were forgotten
                depth -= 1
                continue
            point, use = last
            start = self._start(chain, depth, use)
            before = self.point(chain[start - 1]) if start else None
            tokens = point.tokens - (0 if before is None else before.tokens)
            if depth == known and cached is not None:
                # Less than a block was computed again: the first copy of it stays until it is evicted.
                again = point.tokens - cached
                tokens -= again if 0 < again <= block else 0
            if use.end == link:
                tokens += min(use.answer, max((cached or 0) - point.tokens, 0))
            self._stack.take(use, tokens)
            depth = start

    def _start(self, chain: Sequence[bytes], depth: int, use: Use) -> int:
        """How many links stand before those that were read last by the same use as the one at `depth`."""
        low, high = 0, depth - 1
        while low < high:
            middle = (low + high) // 2
            if self.use(chain[middle]) is use:
                high = middle
            else:
                low = middle + 1
        return low
