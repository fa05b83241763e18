"""Puts the blocks of a text in the order that their change rates call for, and takes some of them out.

Blocks of slots that an order does not name keep their place. Those it names for the tail leave a
PLACEHOLDER there, behind the label that their slot fixes. A unit with another rank goes behind all that
are not named, by rank and otherwise in the order it had; it goes as a whole, with the highest rank of
its blocks. Nothing is added and nothing is lost: white space between blocks goes along, but what ends a
text ends it still, and a line that leaves a paragraph does not take its blank line away from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.rates import TAIL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.compression.blocks import Block
    from ctxgate.compression.rates import Order


@dataclass(frozen=True, slots=True)
class Arranged:
    """The blocks in their new order, and for each where it stood and the text that was taken out of it."""

    blocks: tuple[Block, ...]
    origin: tuple[int, ...]
    taken: tuple[str | None, ...] = field(repr=False)
    moved: int  # how many of them stand behind one that they stood before

    def changed(self) -> bool:
        """Whether the text is another one."""
        return self.moved > 0 or any(self.taken)


def arranged(blocks: Sequence[Block], order: Order, *, tail: bool = True) -> Arranged:
    """The blocks of one text in a given order. Without `tail` nothing is taken out."""
    origin = _places(blocks, order)
    gaps = _gaps(blocks, origin)
    sent: list[Block] = []
    taken: list[str | None] = []
    for at in origin:
        block = blocks[at]
        words = _words(block) if tail and order.get(block.slot) == TAIL else None
        if words is not None or gaps[at] != block.gap:
            text = block.text if words is None else block.text[: block.label] + PLACEHOLDER
            block = replace(block, text=text, gap=gaps[at])
        sent.append(block)
        taken.append(words)
    return Arranged(tuple(sent), tuple(origin), tuple(taken), _moved(origin))


def _words(block: Block) -> str | None:
    """What the tail takes of a block, if anything can be taken."""
    words = block.text[block.label :]
    return None if not words or PLACEHOLDER in block.text or HEADING in block.text else words


def _places(blocks: Sequence[Block], order: Order) -> list[int]:
    """The blocks' old places in their new order."""
    ranks: dict[int, int] = {}
    first: dict[int, int] = {}
    for at, block in enumerate(blocks):
        rank = order.get(block.slot, 0)
        ranks[block.unit] = max(ranks.get(block.unit, 0), 0 if rank == TAIL else rank)
        first.setdefault(block.unit, at)

    def place(at: int) -> tuple[bool, int, int, int]:
        rank = ranks[blocks[at].unit]
        return blocks[at].edge, rank, first[blocks[at].unit] if rank else at, at

    return sorted(range(len(blocks)), key=place)


def _moved(origin: Sequence[int]) -> int:
    """How many blocks stand behind one that they stood before."""
    count, most = 0, -1
    for at in origin:
        count += at < most
        most = max(most, at)
    return count


def _gaps(blocks: Sequence[Block], origin: Sequence[int]) -> list[str]:
    """The white space behind each block, by its old place."""
    gaps = [block.gap for block in blocks]
    new = {at: place for place, at in enumerate(origin)}
    for at in range(1, len(blocks)):
        # What stood inside a paragraph leaves; the paragraph's end is then behind the line before it.
        if (
            new[at] != new[at - 1] + 1
            and blocks[at].unit != blocks[at - 1].unit
            and gaps[at - 1].count("\n") < gaps[at].count("\n")
            and new[at] > new[at - 1]
        ):
            gaps[at - 1], gaps[at] = gaps[at], gaps[at - 1]
    if origin and origin[-1] != len(blocks) - 1:
        last = len(blocks) - 1
        gaps[last], gaps[origin[-1]] = gaps[origin[-1]], gaps[last]
    return gaps
