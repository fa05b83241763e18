"""What an exact comparison of two prompts could find at most, so that most need not be made.

A message that says something else than the one in its place is told from one that only spells it
otherwise by a look at its texts. Where that is not certain, nothing is said.

Cost: the differing messages are decoded, and only the first few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.divergence import Divergence, DivergenceKind
from ctxgate.compression.sent import WIDTH, common_bytes, common_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Raw

    from ctxgate.compression.sent import Outline
    from ctxgate.inference.wire import Body

DECODED: Final = 8  # pairs of messages; those behind them count as if they could be the same
_DECODED_BYTES: Final = 2**14  # of one message; a longer one counts so too


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function


class _Content(msgspec.Struct):
    content: str | list[msgspec.Raw] | None = None


class _Calls(msgspec.Struct):
    tool_calls: list[_Call] | None = None


_CONTENT: Final = msgspec.json.Decoder(_Content)
_CALLS: Final = msgspec.json.Decoder(_Calls)
_ANY: Final = msgspec.json.Decoder()


def at_most(before: Body, after: Body, one: Outline, two: Outline) -> Divergence | None:
    """The first difference, with as many bytes held behind it as an exact comparison would find at most.

    Its place and its `kept_bytes` are exact, its kind is a coarse one. None where the exact difference
    may be another one, or none that reaches the prompt.
    """
    if one.order is not None or two.order is not None or one.tools != two.tools or one.fields != two.fields:
        return None
    at = common_bytes(one.elements, two.elements) // WIDTH
    index = at - two.tools
    if not 0 <= index < min(one.messages, two.messages):
        return None
    ones, twos = before.items("messages")[index:], after.items("messages")[index:]
    if not says_something_else(ones[0], twos[0]):
        return None
    a, b = bytes(ones[0]), bytes(twos[0])
    offset = common_bytes(a, b)
    head = index < max(one.heads, two.heads)
    return Divergence(
        DivergenceKind.SYSTEM_CHANGED if head else DivergenceKind.HISTORY_EDITED,
        f"messages[{index}]",
        index,
        offset,
        kept_bytes=sum(two.sizes[:at]) + offset,
        avoidable_bytes=_common_suffix(a, b, min(len(a), len(b)) - offset)
        + _held_at_most(ones, twos, one, two, at),
    )


def says_something_else(before: Raw, after: Raw) -> bool:
    """Whether two messages certainly differ in what they say, and not only in how it is written."""
    if max(memoryview(before).nbytes, memoryview(after).nbytes) > _DECODED_BYTES:
        return False
    try:
        one, two = _CONTENT.decode(before).content, _CONTENT.decode(after).content
        if isinstance(one, str) and isinstance(two, str) and one != two:
            return True
        ones, twos = _CALLS.decode(before).tool_calls, _CALLS.decode(after).tool_calls
        if ones is None or twos is None:
            return False
        return len(ones) != len(twos) or any(map(_is_other_call, ones, twos))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _is_other_call(one: _Call, two: _Call) -> bool:
    a, b = one.function, two.function
    if a.name != b.name:
        return True
    # Values that Python takes to be equal, such as 1 and 1.0, may still be other ones to a template.
    return a.arguments != b.arguments and bool(_ANY.decode(a.arguments) != _ANY.decode(b.arguments))


def _common_suffix(a: bytes, b: bytes, most: int) -> int:
    """How many last bytes two texts share, up to a limit. Cheap where they are few."""
    size = 8
    while size < most and a[-size:] == b[-size:]:
        size *= 8
    size = min(size, most)
    return common_bytes(a[len(a) - size :][::-1], b[len(b) - size :][::-1])


def _held_at_most(ones: Sequence[Raw], twos: Sequence[Raw], one: Outline, two: Outline, at: int) -> int:
    """Bytes of the second prompt's messages that the first may hold too, from where the two differ on."""
    run = common_run(one, two, at + 1)
    held = sum(two.sizes[at + 1 : at + 1 + run])
    known = frozenset((*one.digests(at, at + 1), *one.digests(at + 1 + run)))
    if two.message(at - two.tools) in known:
        held += two.sizes[at]
    for number, digest in enumerate(two.digests(at + 1 + run), 1 + run):
        if digest in known:
            held += two.sizes[at + number]
        elif number < len(ones):
            near = number < run + DECODED
            if not (near and says_something_else(ones[number], twos[number])):
                held += two.sizes[at + number]
    return held
