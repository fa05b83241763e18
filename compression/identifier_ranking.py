"""Which exact strings of one kind are worth their room.

A string is worth more the later, the more often and the more plainly it was named, for each character it
takes. A longer one that holds shorter ones is worth what all of them are: a path its directories and the
forms of it that begin further in, a command the shorter one it goes on from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxgate.compression.identifier_types import IdentifierKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ctxgate.compression.identifier_types import Identifier

_SCALE: Final = 1 << 20
_LINE: Final = 8  # characters that a line takes beside its text


def best_first(identifiers: Sequence[Identifier], latest: int) -> list[Identifier]:
    """The identifiers, all of one kind, in the order in which they should be written.

    `latest` is the index of the last message. One that stands inside another comes directly behind it.
    """
    worths = [_worth(each, latest) for each in identifiers]
    holder = _holders(identifiers, worths)
    total = list(worths)
    for at in sorted(holder, key=lambda at: len(identifiers[at].text)):  # the shortest first: sums pass on
        total[holder[at]] += total[at]
    density = [
        worth * _SCALE // (len(each.text) + _LINE) for worth, each in zip(total, identifiers, strict=True)
    ]
    inside: dict[int, list[int]] = {}
    for at, by in holder.items():
        inside.setdefault(by, []).append(at)
    roots = [at for at in range(len(identifiers)) if at not in holder]
    order: list[int] = []
    waiting = sorted(roots, key=lambda at: (density[at], -at))
    while waiting:
        at = waiting.pop()
        order.append(at)
        waiting += sorted(inside.get(at, ()), key=lambda each: (density[each], -each))
    return [identifiers[at] for at in order]


def _worth(each: Identifier, latest: int) -> int:
    """How likely a string is needed again: by how late, how often and by whom it was named."""
    recent = 64 * (each.last + 1) // (latest + 1)
    return recent + 6 * min(each.count, 8) + 24 * each.told


def _holders(identifiers: Sequence[Identifier], worths: Sequence[int]) -> dict[int, int]:
    """For each string that stands inside another one of the same kind, the best such one."""
    place = {each.text: at for at, each in enumerate(identifiers)}
    holder: dict[int, int] = {}
    for at, each in enumerate(identifiers):
        for part in _parts(each):
            inner = place.get(part)
            if inner is None or inner == at:
                continue
            known = holder.get(inner)
            if known is None or (worths[at], -len(each.text)) > (
                worths[known],
                -len(identifiers[known].text),
            ):
                holder[inner] = at
    return holder


def _parts(each: Identifier) -> Iterator[str]:
    """Shorter strings that a string holds: what is cut off at a separator from either side."""
    text = each.text
    if each.kind is IdentifierKind.PATH:
        separators = [at for at, char in enumerate(text) if char == "/"]
        for at in separators:
            yield text[:at]
            yield text[: at + 1]
            yield text[at:]
            yield text[at + 1 :]
    elif each.kind is IdentifierKind.COMMAND:
        for at, char in enumerate(text):
            if char in " \n":
                yield text[:at]
