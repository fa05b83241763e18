"""What each replica has read of which prompts, and so what it should find of the next one in its cache.

A prompt comes as a chain: one opaque hash per element (what selects the cache, the whole head, each message
behind it), each covering all before it, so that two prompts share a prefix at least as far as their chains
agree. How much of a long element they share its chunks tell (`prefix_chunks`). The index keeps, per place
(a pool and a replica), how many tokens the prompt had at each hash.

A reply's usage tells the tokens of a whole prompt. Points between two such ends are apportioned by bytes,
and corrected when a reply tells how much of the prompt was found in the cache. The engine keeps what it
generates, too: how far the next prompt reaches into an answer is learned from the hits that follow.

What a cache has no room for any more is not expected (`lru_stack`). A prompt that is under way counts as
read until its attempt is settled (`prefix_ahead`).

Cost: some dozen look-ups for each replica that knows a beginning, two for any other; one pass over the
chain when a prompt's usage is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ctxgate.inference.record import Record
from ctxgate.routing.prefix_place import LINK_BYTES, PlaceMemory
from ctxgate.routing.snapshot import Knowledge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ctxgate.routing.lru_stack import Use
    from ctxgate.routing.prefix_chunks import Chunks
    from ctxgate.routing.prefix_points import Point

Place: TypeAlias = "tuple[str, str]"
"""A pool and a replica of it, by name."""

ENTRIES: Final = 100_000  # per place: some hundred conversations of hundreds of messages
ALL_ENTRIES: Final = 1_000_000  # of all places together
DEFAULT_BLOCK: Final = 16  # tokens; vLLM's own default on GPUs
_CHECKED: Final = 64  # prompts learned between two looks at the size of all places
# Until a block is known a shortfall below two of the largest usual ones (128, on CPUs) says nothing.
_UNSURE: Final = 256


class Expected(Record, frozen=True):
    """What a replica should find of a prompt in its cache.

    `tokens` are whole blocks that it should still hold, those of an answer included that the prompt may go
    on from. The first `elements` of the chain are known there. `counted`: the engine has told their
    tokens, to a block; else they are apportioned. `used_us` is when they were last read and `foreign` how
    many tokens the replica has newly written for other prompts since. `known` are whole blocks of the
    prompt's own that were read there, evicted or not. `ahead`: the last elements are only under way, and
    `known` is 0.
    """

    tokens: int
    elements: int
    counted: bool
    used_us: int
    foreign: int
    known: int
    ahead: bool = False


class Hits(NamedTuple):
    """What several places should find of a prompt: by place the tokens, and the most links that one knows."""

    tokens: dict[Place, int]
    elements: int


class PrefixIndex:
    """Points of prompts by place. `entries` bounds how many are kept for each, `all_entries` for all.

    No clock of its own: times are microseconds of any one clock.
    """

    def __init__(
        self, entries: int = ENTRIES, block: int = DEFAULT_BLOCK, all_entries: int = ALL_ENTRIES
    ) -> None:
        self._half = max(1, entries // 2)
        self._all = all_entries
        self._block = block
        self._places: dict[Place, PlaceMemory] = {}  # as many as are configured
        self._learned = 0

    # ---- what is expected ----------------------------------------------------------------------------

    def expected(
        self, place: Place, chain: Sequence[bytes], chunks: Chunks | None = None, guess: int = 0
    ) -> Expected | None:
        """The longest prefix that a place is known to have read, or is about to.

        None where nothing is: not even a prompt of the same model. A hit is whole blocks and leaves the
        last token to be computed. `chunks` are those of the first element that no place knows. `guess`: how
        many links are known there, where that is likely.
        """
        memory = self._places.get(place)
        if memory is None or not chain:
            return None
        depth = memory.reach(chain, guess) if guess else None
        if depth is None:
            depth = memory.depth(chain[::-1])
        return self._of(memory, chain, depth, chunks) if depth else None

    def hits(self, places: Iterable[Place], chain: Sequence[bytes], chunks: Chunks | None = None) -> Hits:
        """The tokens of `expected` for several places; those of which nothing is known are left out."""
        found: dict[Place, int] = {}
        deepest, depth, memories = 0, len(chain), self._places
        behind: Sequence[bytes] = ()
        for place in places if chain else ():
            memory = memories.get(place)
            reached = 0 if memory is None else memory.reach(chain, depth)
            if memory is None or reached == 0:
                continue
            if reached is None:  # mostly it is the head, and no more, for many places
                behind = behind or chain[::-1]
                reached = memory.depth(behind)
            depth = reached
            found[place] = self._held(memory, chain, depth, memory.last(chain[depth - 1]), chunks)
            deepest = max(deepest, depth)
        return Hits(found, deepest)

    def _of(self, memory: PlaceMemory, chain: Sequence[bytes], depth: int, chunks: Chunks | None) -> Expected:
        last = memory.last(chain[depth - 1])
        held = self._held(memory, chain, depth, last, chunks)
        if last is None:
            return Expected(held, depth, False, 0, 0, 0, ahead=True)
        (tokens, counted), use = last
        block = memory.block or self._block
        known = max(tokens - (depth == len(chain)), 0) // block * block
        return Expected(held, depth, counted, use.at_us, memory.written - use.written, known)

    def _held(
        self,
        memory: PlaceMemory,
        chain: Sequence[bytes],
        depth: int,
        last: tuple[Point, Use] | None,
        chunks: Chunks | None,
    ) -> int:
        """Whole blocks that should be found of a prompt whose first `depth` links are known."""
        link, whole, block = chain[depth - 1], depth == len(chain), memory.block or self._block
        if last is None:
            return max(memory.ahead.tokens[link][0] - whole, 0) // block * block
        (tokens, _), use = last
        if whole:
            tokens = max(tokens - 1, 0)
        elif use.answer and use.end == link:
            tokens += memory.kept_of(use.answer - 1)
        if memory.size is not None and not memory.fits(use, tokens):
            tokens = min(tokens, memory.resident(chain, depth))
        held = tokens // block * block
        if chunks is not None and (shared := memory.shared(chain, depth, chunks)) is not None:
            held = max(held, self._of_chunks(memory, (*chain[:depth], shared[1]), shared[0]))
        return held

    def _of_chunks(self, memory: PlaceMemory, other: Sequence[bytes], tokens: int) -> int:
        """What is held of a prompt that another one shares for so many tokens, to within its last link."""
        use = memory.use(other[-1])
        if use is not None and not memory.fits(use, tokens):
            tokens = min(tokens, memory.resident(other, len(other)))
        block = memory.block or self._block
        return tokens // block * block

    # ---- what is learned -----------------------------------------------------------------------------

    def dispatched(
        self,
        ticket: str,
        place: Place,
        chain: Sequence[bytes],
        sizes: Sequence[int],
        *,
        prompt: int,
        now_us: int,
    ) -> None:
        """Note that an attempt is on its way to a place with a prompt of about so many tokens.

        `ticket` names the attempt. Its prompt counts as read there until `withdraw`, or for ten minutes.
        """
        if not chain or len(chain) > self._half:
            return
        memory = self._memory(place)
        depth = memory.depth(chain[::-1])
        point = memory.point(chain[depth - 1]) if depth else None
        while depth and point is None:  # other prompts under way have more of it
            depth -= 1
            point = memory.point(chain[depth - 1]) if depth else None
        start = 0 if point is None else point.tokens
        memory.ahead.begin(ticket, chain[depth:], sizes[depth:], (start, prompt), now_us)

    def withdraw(self, ticket: str, place: Place) -> None:
        """An attempt is settled: what it has read is to be learned, or it has read nothing."""
        memory = self._places.get(place)
        if memory is not None and memory.ahead.tokens:
            memory.ahead.end(ticket)

    def learn(  # noqa: PLR0913 - figures of one reply, two of them with a default
        self,
        place: Place,
        chain: Sequence[bytes],
        sizes: Sequence[int],
        *,
        prompt: int,
        cached: int | None,
        now_us: int,
        answer: int = 0,
        chunks: Chunks | None = None,
    ) -> None:
        """Note that a place has read a prompt of so many tokens and found `cached` of them (None: untold).

        `sizes` are the elements' bytes, one for each link of the chain. `answer` is how many tokens were
        generated behind it.
        """
        if not chain or len(chain) > self._half:
            return
        memory = self._memory(place)
        if len(memory.young) + len(chain) > self._half:
            memory.age()
        memory.read(chain, sizes, prompt, cached, answer, now_us, chunks)
        self._learned += 1
        if not self._learned % _CHECKED:
            self._bound()

    def drop(self, place: Place) -> None:
        """The replica is gone, and with it what was told of it."""
        self._places.pop(place, None)

    def forget(self, place: Place) -> None:
        """Another engine answers there: nothing that was read before is in its cache."""
        memory = self._places.get(place)
        if memory is not None and memory.links:
            # What the configuration told stays until it tells anew.
            self._places[place] = fresh = PlaceMemory()
            fresh.size = memory.size
            fresh.tell_block(memory.block)

    # ---- what is told --------------------------------------------------------------------------------

    def tell_block(self, place: Place, tokens: int | None) -> None:
        """Note what a replica's configuration says of its block; None where it says nothing."""
        self._memory(place).tell_block(tokens)

    def tell_size(self, place: Place, tokens: int | None) -> None:
        """Note how many tokens a replica's cache has room for; None: unknown, and nothing is held evicted."""
        self._memory(place).size = tokens

    def tell_answers(self, place: Place, *, kept: bool) -> None:
        """Note whether a template prints an answer in the next turn as it was generated, until hits tell."""
        self._memory(place).expect_answers(1.0 if kept else 0.0)

    # ---- what is known -------------------------------------------------------------------------------

    def knowledge(self, place: Place) -> Knowledge:
        """DEGRADED where a prompt was read, else COLD; what events tell exactly is not known here."""
        memory = self._places.get(place)
        return Knowledge.DEGRADED if memory is not None and memory.links else Knowledge.COLD

    def trusts(self, place: Place) -> bool:
        """Whether the hits that a place reports may be its own cache's; where not, they teach nothing."""
        memory = self._places.get(place)
        return memory is None or memory.trusted

    @property
    def links(self) -> int:
        """How many links are kept, for all places."""
        return sum(memory.links for memory in self._places.values())

    @property
    def size_bytes(self) -> int:
        """About how much memory they take."""
        return self.links * LINK_BYTES

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

    def _memory(self, place: Place) -> PlaceMemory:
        memory = self._places.get(place)
        if memory is None:
            memory = self._places[place] = PlaceMemory()
        return memory

    def _known_block(self, place: Place) -> int | None:
        memory = self._places.get(place)
        return None if memory is None else memory.block

    def _bound(self) -> None:
        """Begin new generations, of the largest place first, until all places together are small enough."""
        while self.links > self._all:
            largest = max(self._places.values(), key=lambda memory: memory.links)
            before = largest.links
            largest.age()
            if largest.links == before:
                return  # all of it is under way
