"""What an exact comparison of two prompts could find at most, so that most need not be made.

A message that says something else than the one in its place is told from one that only spells it
otherwise by a look at its texts. Where that is not certain, nothing is said.

Cost: the differing messages are decoded, and only the first few of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.diverge import common_prefix
from ctxgate.compression.divergence import DivergenceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Raw

    from ctxgate.compression.divergence import Divergence
    from ctxgate.compression.sent import Outline
    from ctxgate.inference.wire import Body

DECODED: Final = 8  # pairs of messages; those behind them count as if they could be the same
_DECODED_BYTES: Final = 2**14  # of one message; a longer one counts so too
_OF_MESSAGES: Final = frozenset(
    {
        DivergenceKind.SYSTEM_CHANGED,
        DivergenceKind.HISTORY_EDITED,
        DivergenceKind.HISTORY_REORDERED,
        DivergenceKind.HISTORY_TRUNCATED,
    }
)
_ABSENT: Final = msgspec.Raw(b"")


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: msgspec.Raw = _ABSENT
    tool_calls: msgspec.Raw = _ABSENT


_MESSAGE: Final = msgspec.json.Decoder(_Message)
_CALLS: Final = msgspec.json.Decoder(list[_Call])
_TEXT: Final = msgspec.json.Decoder(str)
_ANY: Final = msgspec.json.Decoder()


def at_most(coarse: Divergence, before: Body, after: Body, one: Outline, two: Outline) -> Divergence | None:
    """A difference found by digests, with the bytes that an exact comparison would find at most.

    None where the exact difference may be another one, or none that reaches the prompt.
    """
    at = coarse.index
    if at is None or coarse.kind not in _OF_MESSAGES or one.order is not None or two.order is not None:
        return None
    if at >= min(one.messages, two.messages):
        return None
    ones, twos = before.items("messages")[at:], after.items("messages")[at:]
    if not says_something_else(ones[0], twos[0]):
        return None
    a, b = bytes(ones[0]), bytes(twos[0])
    offset = common_prefix(a, b)
    held = _suffix(a, b, offset) + _held_at_most(ones, twos, one, two, at)
    return replace(coarse, offset=offset, kept_bytes=coarse.kept_bytes + offset, avoidable_bytes=held)


def says_something_else(before: Raw, after: Raw) -> bool:
    """Whether two messages certainly differ in what they say, and not only in how it is written."""
    if max(memoryview(before).nbytes, memoryview(after).nbytes) > _DECODED_BYTES:
        return False
    try:
        one, two = _MESSAGE.decode(before), _MESSAGE.decode(after)
        if one.content != two.content and _is_text(one.content) and _is_text(two.content):
            return _TEXT.decode(one.content) != _TEXT.decode(two.content)
        if one.tool_calls == two.tool_calls or not (_is_list(one.tool_calls) and _is_list(two.tool_calls)):
            return False
        ones, twos = _CALLS.decode(one.tool_calls), _CALLS.decode(two.tool_calls)
        return len(ones) != len(twos) or any(map(_is_other_call, ones, twos))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _is_other_call(one: _Call, two: _Call) -> bool:
    a, b = one.function, two.function
    if a.name != b.name:
        return True
    # Values that Python takes to be equal, such as 1 and 1.0, may still be other ones to a template.
    return a.arguments != b.arguments and bool(_ANY.decode(a.arguments) != _ANY.decode(b.arguments))


def _is_text(value: Raw) -> bool:
    return memoryview(value)[:1] == b'"'


def _is_list(value: Raw) -> bool:
    return memoryview(value)[:1] == b"["


def _suffix(a: bytes, b: bytes, start: int) -> int:
    return common_prefix(a[start:][::-1], b[start:][::-1])


def _held_at_most(ones: Sequence[Raw], twos: Sequence[Raw], one: Outline, two: Outline, at: int) -> int:
    """Bytes of the second prompt's messages, from the differing one on, that the first may hold too."""
    known = frozenset(one.digests(one.tools + at))
    sizes = two.sizes[two.tools + at :]
    new = [number for number, digest in enumerate(two.digests(two.tools + at)) if digest not in known]
    certain = [
        number
        for number in new
        if not number
        or number >= len(ones)
        or (number < DECODED and says_something_else(ones[number], twos[number]))
    ]
    return sum(sizes) - sum(sizes[number] for number in certain)
