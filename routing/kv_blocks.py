"""The cache blocks of one replica as a tree of hashes, each with the copies that are there now.

A block's hash covers all blocks before it, so equal paths are equal prompts, and prompts part where their
paths do. What was evicted stays in the tree for a while: stored again it is the same block, and prompts
that lead through it know where their hit ends.

Blocks in a row, without a fork, lie in one segment, so that a path of tens of thousands of blocks is some
hundred steps. Memory: about 115 bytes a block.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BLOCKS: Final = 400_000  # kept of one replica: 6.4 million tokens in blocks of 16
SEGMENT: Final = 256  # blocks of a segment, which is searched for one of them
_BLOCK_BYTES: Final = 115


class Flags:
    """One bit for each block of a segment, and how many of them are not set."""

    __slots__ = ("bits", "unset")

    def __init__(self) -> None:
        self.bits = bytearray()
        self.unset = 0

    def grow(self) -> None:
        """Add a block that is not set."""
        self.bits.append(0)
        self.unset += 1

    def put(self, at: int, *, value: bool) -> None:
        """Set a block, or take it back."""
        self.unset += self.bits[at] - value
        self.bits[at] = value

    def wipe(self) -> None:
        """Take all of them back."""
        self.unset = len(self.bits)
        self.bits = bytearray(self.unset)


class Segment:
    """Blocks in a row. The first one follows block `at` of `parent`.

    Without a parent it is a beginning or, where `torn`, lies behind blocks that are not known. `copies`
    counts those in the engine's own memory; `near` flags blocks with one there, `here` those with a copy in
    any tier. `used` tells when it was last stored, `dropped` that it is no longer in the tree.

    What lies behind a dropped segment is torn from then on; it is marked so when it is next looked at.
    """

    __slots__ = ("at", "copies", "dropped", "hashes", "here", "near", "parent", "torn", "used")

    def __init__(self, before: Node | None, *, torn: bool) -> None:
        self.parent = None if before is None else before.segment
        self.at = -1 if before is None else before.at
        self.torn = torn
        self.used = 0
        self.dropped = False
        self.hashes = array("Q")
        self.copies = array("I")
        self.here = Flags()
        self.near = Flags()

    def follow(self, before: Node) -> None:
        """What it lies behind has become known."""
        self.parent, self.at, self.torn = before.segment, before.at, False

    def drop(self) -> None:
        """It leaves the tree, and holds no memory for those that still point at it."""
        self.dropped = self.torn = True
        self.parent = None
        self.hashes, self.copies, self.here, self.near = array("Q"), array("I"), Flags(), Flags()

    def is_torn(self) -> bool:
        """Whether what it lies behind is not known, or is no more."""
        if self.parent is not None and self.parent.dropped:
            self.parent, self.torn = None, True
        return self.torn


class Node(NamedTuple):
    """One block: block `at` of a segment."""

    segment: Segment
    at: int


class Stretch(NamedTuple):
    """Blocks in a row as they were stored: the one before the first (None: a beginning), and the last."""

    before: Node | None
    last: Node


class Run(NamedTuple):
    """How many blocks of a path are there without a gap, from its beginning: in any tier, and near."""

    blocks: int
    near: int


class Blocks:
    """The tree of one replica. `tier` names the engine's own memory, `limit` bounds the blocks known.

    `strays` counts removals of what was not there; `overflowed`: blocks that are there had to be dropped.
    """

    def __init__(self, tier: str, limit: int = BLOCKS) -> None:
        self._tier = tier
        self._limit = limit
        self._known: dict[int, Segment] = {}
        self._there: dict[Segment, None] = {}  # with a block that is there: the longest unused first
        self._gone: dict[Segment, None] = {}  # without one: the longest gone first
        self._far: dict[int, dict[str, int]] = {}  # copies in other tiers
        self._stores = 0
        self.strays = 0
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._known)

    @property
    def size(self) -> int:
        """About how many bytes all this takes."""
        return (len(self._known) + len(self._far)) * _BLOCK_BYTES

    def store(self, hashes: Sequence[int], parent: int | None, tier: str) -> Stretch | None:
        """Add a copy of each of these blocks, which follow one another. None where there are none."""
        self._stores += 1
        first = before = self._place(parent)
        torn = parent is not None and before is None
        for each in hashes:
            node = self._place(each, before)
            if node is None:
                node = self._grown(each, before, torn=torn)
            elif node.at == 0 and node.segment.is_torn() and not torn:
                self._mend(node.segment, before)
            self._copied(node, each, tier)
            before, torn = node, False
        while len(self._known) > self._limit:
            self._drop_one()
        return Stretch(first, before) if hashes and before is not None else None

    def remove(self, hashes: Iterable[int], tier: str) -> None:
        """Take away one copy of each of these blocks."""
        for each in hashes:
            node = self._place(each)
            if node is None or not self._taken(node, each, tier):
                self.strays += 1
            elif not node.segment.copies[node.at] and each not in self._far:
                node.segment.here.put(node.at, value=False)
                if node.segment.here.unset == len(node.segment.hashes):
                    self._there.pop(node.segment, None)
                    self._gone[node.segment] = None

    def clear(self) -> None:
        """Take every copy away."""
        self._far.clear()
        for segment in self._there:
            segment.copies = array("I", bytes(segment.copies.itemsize * len(segment.copies)))
            segment.here.wipe()
            segment.near.wipe()
        self._gone |= self._there
        self._there = {}

    def copies(self, block: int, tier: str) -> int:
        """How many copies of a block a tier has."""
        if tier != self._tier:
            return self._far.get(block, {}).get(tier, 0)
        node = self._place(block)
        return 0 if node is None else node.segment.copies[node.at]

    def _place(self, block: int | None, before: Node | None = None) -> Node | None:
        """Where a block is; quickly so where it follows `before` in its segment."""
        segment = None if block is None else self._known.get(block)
        if segment is None or block is None:
            return None
        if before is not None and before.segment is segment:
            after = before.at + 1
            if after < len(segment.hashes) and segment.hashes[after] == block:
                return Node(segment, after)
        return Node(segment, segment.hashes.index(block))

    def _grown(self, block: int, before: Node | None, *, torn: bool) -> Node:
        """A new block behind another one, or as a beginning."""
        if before is not None and before.at + 1 == len(before.segment.hashes) < SEGMENT:
            segment = before.segment
        else:
            segment = Segment(before, torn=torn)
        segment.hashes.append(block)
        segment.copies.append(0)
        segment.here.grow()
        segment.near.grow()
        self._known[block] = segment
        return Node(segment, len(segment.hashes) - 1)

    @staticmethod
    def _mend(segment: Segment, before: Node | None) -> None:
        if before is None:
            segment.torn = False
        elif all(step.segment is not segment for step in path(before)):  # a broken stream may tell of a ring
            segment.follow(before)

    def _copied(self, node: Node, block: int, tier: str) -> None:
        segment, at = node
        if segment.used != self._stores:
            segment.used = self._stores
            self._gone.pop(segment, None)
            self._there.pop(segment, None)
            self._there[segment] = None
        segment.here.put(at, value=True)
        if tier == self._tier:
            segment.copies[at] += 1
            segment.near.put(at, value=True)
        else:
            copies = self._far.setdefault(block, {})
            copies[tier] = copies.get(tier, 0) + 1

    def _taken(self, node: Node, block: int, tier: str) -> bool:
        """Take one copy from a tier; False where it has none."""
        segment, at = node
        if tier == self._tier:
            if not segment.copies[at]:
                return False
            segment.copies[at] -= 1
            segment.near.put(at, value=segment.copies[at] > 0)
            return True
        copies = self._far.get(block)
        if copies is None or tier not in copies:
            return False
        copies[tier] -= 1
        if not copies[tier]:
            del copies[tier]
        if not copies:
            del self._far[block]
        return True

    def _drop_one(self) -> None:
        """Drop a segment: one of which nothing is there, else the longest unused one."""
        self.overflowed |= not self._gone
        segments = self._gone or self._there
        segment = next(iter(segments))
        del segments[segment]
        for block in segment.hashes:
            del self._known[block]
            self._far.pop(block, None)
        segment.drop()


def path(node: Node) -> Iterator[Node]:
    """The last block of each segment that the path to a block leads through, backwards from itself."""
    segment, at = node
    while True:
        torn = segment.is_torn()
        yield Node(segment, at)
        if torn or segment.parent is None:
            return
        segment, at = segment.parent, segment.at


def depth(node: Node) -> int | None:
    """How many blocks the path to a block has, itself included; None where its beginning is not known."""
    blocks = 0
    for step in path(node):
        blocks += step.at + 1
        if step.segment.torn:
            return None
    return blocks


def up(node: Node, steps: int) -> Node | None:
    """The block so many steps before another one on its path; None where the path is shorter."""
    for step in path(node):
        if step.at >= steps:
            return Node(step.segment, step.at - steps)
        steps -= step.at + 1
    return None


def common(one: Node, two: Node) -> int | None:
    """How many blocks two paths share; None where the beginning of one is not known."""
    if depth(one) is None or depth(two) is None:
        return None
    shared = 0
    for first, second in zip([*path(one)][::-1], [*path(two)][::-1], strict=False):
        if first.segment is not second.segment:
            break
        shared += min(first.at, second.at) + 1
        if first.at != second.at:
            break
    return shared


def run(node: Node) -> Run | None:
    """How much of the path to a block is there; None where its beginning is not known."""
    segment, at = node
    blocks = 0
    gone: list[tuple[Segment, int, int]] = []  # with a block that is not near: up to which, and blocks behind
    while True:  # `path` written out: this is asked for every request
        if segment.near.unset:
            gone.append((segment, at + 1, blocks))
        blocks += at + 1
        if segment.is_torn():
            return None
        if segment.parent is None:
            break
        segment, at = segment.parent, segment.at
    near = _leading(blocks, [(one.near, end, behind) for one, end, behind in gone])
    return Run(_leading(blocks, [(one.here, end, behind) for one, end, behind in gone]), near)


def _leading(blocks: int, gaps: Sequence[tuple[Flags, int, int]]) -> int:
    """How many of so many blocks come before the first gap; `gaps` begin at the path's end."""
    for flags, end, behind in reversed(gaps):
        if flags.unset and (first := flags.bits.find(0, 0, end)) >= 0:
            return blocks - behind - end + first
    return blocks
