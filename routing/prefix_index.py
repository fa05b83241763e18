"""What each replica has read of which prompts, and so what it should find of the next one in its cache.

A prompt comes as a chain: one opaque hash per element (what selects the cache, the whole head, each message
behind it), each covering all before it, so that two prompts share a prefix at least as far as their chains
agree. Inside the head, of tools and system messages, nothing is known to be shared: whichever of them a
template prints first may differ. The index keeps, per place (a pool and a replica), how many tokens the
prompt had at each hash.

A reply's usage tells the tokens of a whole prompt. Points between two such ends are apportioned by bytes,
and corrected when a reply tells how much of the prompt was found in the cache. The engine's answers are
not in the index: a hit that reaches into one is more than was expected.

Cost: a look-up per element that is new, and one pass over the chain when its usage is known.
"""

from __future__ import annotations

from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

Place: TypeAlias = "tuple[str, str]"
"""A pool and a replica of it, by name."""

ENTRIES: Final = 100_000  # per place: some hundred conversations of hundreds of messages
DEFAULT_BLOCK: Final = 16  # tokens; vLLM's own default on GPUs
# Reported hits are multiples of the block. So many different ones, and their greatest common divisor is it.
_ENOUGH_HITS: Final = 8
# Until then a shortfall below two of the largest usual blocks (128, on CPUs) says nothing.
_UNSURE: Final = 256


class Use(NamedTuple):
    """One time that a replica read a prompt: when (microseconds), and what it had written by then."""

    at_us: int
    written: int


class Point(NamedTuple):
    """A prompt's tokens up to an element, counted by the engine or apportioned."""

    tokens: int
    counted: bool


class Expected(Record, frozen=True):
    """What a replica should find of a prompt in its cache.

    `tokens` are whole blocks. The first `elements` of the chain are known there. `counted`: the engine
    has told their tokens, to a block; else they are apportioned. `used_us` is when they were last read
    and `foreign` how many tokens the replica has newly written for other prompts since.
    """

    tokens: int
    elements: int
    counted: bool
    used_us: int
    foreign: int


class _Known:
    """The points of one place, in two generations: what is not read for a whole one is forgotten.

    Each use of a prompt is noted at all of its points at once.
    """

    __slots__ = ("common", "hits", "old", "old_uses", "told", "uses", "written", "young")

    def __init__(self) -> None:
        self.young: dict[bytes, Point] = {}
        self.old: dict[bytes, Point] = {}
        self.uses: dict[bytes, Use] = {}
        self.old_uses: dict[bytes, Use] = {}
        self.written = 0  # tokens computed, not found
        self.common = 0  # greatest common divisor of the hits reported
        self.hits: set[int] = set()  # different ones, as far as they are needed
        self.told: int | None = None  # the block, as the engine's configuration has it

    def get_all(self, chain: Sequence[bytes]) -> list[Point | None]:
        points = [*map(self.young.get, chain)]
        if None in points and self.old:
            points = [point or self.old.get(link) for link, point in zip(chain, points, strict=True)]
        return points

    def deepest(self, chain: Sequence[bytes]) -> tuple[int, Point, Use] | None:
        young, old = self.young, self.old
        for at in range(len(chain) - 1, -1, -1):
            link = chain[at]
            if link in young:
                return at, young[link], self.uses[link]
            if link in old:
                return at, old[link], self.old_uses[link]
        return None

    def put(self, chain: Sequence[bytes], points: Sequence[Point], use: Use) -> None:
        self.young.update(zip(chain, points, strict=True))
        self.uses.update(dict.fromkeys(chain, use))

    def age(self) -> None:
        self.old, self.young = self.young, {}
        self.old_uses, self.uses = self.uses, {}


class PrefixIndex:
    """Points of prompts by place. `entries` bounds how many are kept for each. No clock of its own."""

    def __init__(self, entries: int = ENTRIES, block: int = DEFAULT_BLOCK) -> None:
        self._half = max(1, entries // 2)
        self._block = block
        self._places: dict[Place, _Known] = {}  # as many as are configured

    def expected(self, place: Place, chain: Sequence[bytes]) -> Expected | None:
        """The longest prefix that a place is known to have read.

        None where nothing is: not even a prompt of the same model. A hit is whole blocks and leaves the
        last token to be computed.
        """
        known = self._places.get(place)
        found = None if known is None else known.deepest(chain)
        if known is None or found is None:
            return None
        at, point, use = found
        whole = at == len(chain) - 1
        tokens = self.whole_blocks(place, point.tokens - whole)
        return Expected(tokens, at + 1, point.counted, use.at_us, known.written - use.written)

    def learn(
        self,
        place: Place,
        chain: Sequence[bytes],
        sizes: Sequence[int],
        *,
        prompt: int,
        cached: int | None,
        now_us: int,
    ) -> None:
        """Note that a place has read a prompt of so many tokens and found `cached` of them (None: untold).

        `sizes` are the elements' bytes, one for each link of the chain.
        """
        if not chain or len(chain) > self._half:
            return
        known = self._known(place)
        if len(known.young) + len(chain) > self._half:
            known.age()
        if cached:
            known.common = gcd(known.common, cached)
            if len(known.hits) < _ENOUGH_HITS:
                known.hits.add(cached)
        points = known.get_all(chain)
        self._correct(points, cached)
        known.written += max(prompt - (cached or 0), 0)
        known.put(chain, _apportioned(points, sizes, prompt), Use(now_us, known.written))

    def tell_block(self, place: Place, tokens: int | None) -> None:
        """Note what a replica's configuration says of its block; None where it says nothing."""
        self._known(place).told = tokens

    def block(self, place: Place) -> int:
        """Tokens of a cache block there: learned from the hits reported, else as told, else 16."""
        return self._known_block(place) or self._block

    def least_shortfall(self, place: Place) -> int:
        """How many tokens a hit must fall short of what was expected before that means something."""
        return 2 * (self._known_block(place) or 0) or _UNSURE

    def whole_blocks(self, place: Place, tokens: int) -> int:
        """Tokens rounded down to blocks; never negative."""
        block = self.block(place)
        return max(tokens, 0) // block * block

    def _known(self, place: Place) -> _Known:
        known = self._places.get(place)
        if known is None:
            known = self._places[place] = _Known()
        return known

    def _known_block(self, place: Place) -> int | None:
        known = self._places.get(place)
        if known is None:
            return None
        return known.common if len(known.hits) >= _ENOUGH_HITS else known.told

    @staticmethod
    def _correct(points: list[Point | None], cached: int | None) -> None:
        """Where a prompt left what was known: the hit told is that place's tokens, to a block."""
        at = len(points) - 1
        while at >= 0 and points[at] is None:
            at -= 1
        point = points[at]
        if point is None or point.counted or not cached or at == len(points) - 1:
            return
        if point.tokens <= 2 * cached <= 4 * point.tokens:  # else part of it was not in the cache any more
            points[at] = Point(cached, True)


def _apportioned(points: Sequence[Point | None], sizes: Sequence[int], prompt: int) -> list[Point]:
    """Every point of a prompt; those behind the last one counted share the rest by bytes."""
    begin, start = 0, 0
    for at in range(len(points) - 2, -1, -1):
        point = points[at]
        if point is not None and point.counted and point.tokens <= prompt:
            begin, start = at + 1, point.tokens
            break
    ends = list(accumulate(sizes[begin:]))
    rest, size = prompt - start, max(ends[-1], 1)
    behind = [Point(start + rest * end // size, False) for end in ends]
    behind[-1] = Point(prompt, True)
    return _rising(points[:begin], start) + behind


def _rising(points: Sequence[Point | None], most: int) -> list[Point]:
    """Points of which none has fewer tokens than the one before it; mostly they are that already."""
    known = [point for point in points if point is not None]
    told = [point.tokens for point in known]
    if len(known) == len(points) and told == sorted(told) and (not told or told[-1] <= most):
        return known
    tokens, risen = 0, []
    for point in points:  # a forgotten one holds at least what the one before it did
        tokens = tokens if point is None else max(tokens, min(point.tokens, most))
        risen.append(Point(tokens, point is not None and point.counted))
    return risen
