"""Compares two prompts of completions, each a text without any structure that is known. Pure."""

from __future__ import annotations

from typing import Final

from ctxgate.compression.diverge import common_prefix, volatile_at_difference
from ctxgate.compression.divergence import Divergence, DivergenceKind

FIELD: Final = "prompt"
_ANCHOR: Final = 64  # last bytes of the first prompt by which its end is found again in the second
_AROUND: Final = 1024  # bytes on each side of a difference that are searched for volatile text


def diverge_texts(before: bytes, after: bytes) -> Divergence | None:
    """Where the second prompt leaves the first; None where it is another prompt altogether.

    Both are JSON texts of a `prompt`: of a string, or of an array of token ids. Prompts of which less than
    half is the same are not taken for versions of one. Linear.
    """
    one = before[:-1]  # its end, a quotation mark or bracket, stands elsewhere in a prompt that goes on
    kept = common_prefix(one, after)
    if kept == len(one):
        return Divergence(DivergenceKind.EXTENDS, rendered=False, kept_bytes=kept, shared_messages=1)
    held = _held(one, after, kept)
    if 2 * (kept + held) < len(one):
        return None
    volatile = volatile_at_difference(*(_text(side, kept) for side in (before, after)))
    return Divergence(
        DivergenceKind.HISTORY_EDITED if volatile is None else DivergenceKind.VOLATILE_IN_HEAD,
        FIELD,
        0,
        kept,
        volatile,
        kept_bytes=kept,
        avoidable_bytes=held,
    )


def _held(one: bytes, after: bytes, kept: int) -> int:
    """Bytes of the second prompt, behind the difference, that end with the first one's end."""
    anchor = one[max(kept + 1, len(one) - _ANCHOR) :]
    found = after.rfind(anchor, kept) if anchor else -1
    if found < 0:
        return 0
    end = found + len(anchor)
    return common_prefix(one[kept:][::-1], after[kept:end][::-1])


def _text(side: bytes, at: int) -> str:
    """The text around a difference, with the line ends that JSON spells out."""
    start = max(at - _AROUND, 1)
    around = side[start:at], side[at : at + _AROUND]
    return "".join(part.decode("utf-8", "ignore").replace("\\n", "\n") for part in around)
