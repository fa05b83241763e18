"""Compares two chat requests in the order in which their prompt is rendered, and names where they part.

First what selects the cache (model, salt) and what the chat template reads, then the tools, then the
system and developer messages, then the others. vLLM moves system messages to the front only where a
developer message is among them; else they count where they stand.

Cost: linear in the bytes. Equal elements are compared as bytes and never decoded.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, AnyStr, Final

import msgspec

from ctxgate.compression.canonical import canonical_form, json_equal
from ctxgate.compression.compacted import is_compacted
from ctxgate.compression.diff_parts import (
    HEAD_ROLES,
    Difference,
    difference_of_messages,
    difference_of_tools,
    role,
)
from ctxgate.compression.divergence import Divergence, DivergenceKind, excerpt
from ctxgate.compression.volatile import VolatileKind, find_volatile
from ctxgate.inference.wire import NotJson

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from msgspec import Raw

    from ctxgate.inference.wire import Body

# Fields of the request that chat templates read.
TEMPLATE_FIELDS: Final = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
_FIELDS: Final = (
    ("model", DivergenceKind.MODEL_CHANGED),
    ("cache_salt", DivergenceKind.SALT),
    *((name, DivergenceKind.TEMPLATE_CHANGED) for name in TEMPLATE_FIELDS),
)
# The two texts are different elements, not two versions of one.
_MOVED: Final = (
    DivergenceKind.TOOLS_REORDERED,
    DivergenceKind.HISTORY_REORDERED,
    DivergenceKind.HISTORY_TRUNCATED,
    DivergenceKind.HISTORY_COMPACTED,
)
_NULL: Final = msgspec.Raw(b"null")
# Characters before and behind a difference that are searched for volatile text: a long text takes a while.
_NEAR: Final = (256, 192)
_FAR: Final = (1024, 1024)
# What may begin farther away than that. Whether a number counts or numbers a list, farther text tells.
_LONG: Final = (VolatileKind.GIT, VolatileKind.HEADER)
_SPACE: Final = re.compile(r"\s")


class NotChat(ValueError):
    """A body without an array of messages."""


@dataclass(frozen=True, slots=True)
class _Side:
    """The parts of one body that make its prompt, in rendered order. Messages carry their index."""

    tools: list[Raw]
    messages: list[tuple[int, Raw]]


@dataclass(frozen=True, slots=True)
class _Site:
    """A difference and where it is; `at` counts in rendered order, tools first, -1 before all."""

    kind: DivergenceKind
    path: str
    at: int
    index: int | None = None
    rendered: bool = True
    volatile: VolatileKind | None = None
    sides: tuple[Raw | None, Raw | None] = field(default=(None, None), repr=False)
    texts: tuple[str, str] = field(default=("", ""), repr=False)


def diverge(before: Body, after: Body, *, rendered_only: bool = False) -> Divergence:
    """The first difference of `after` from `before`, of kind `extends` where there is none.

    With `rendered_only`, differences that do not reach the prompt are passed over. Raises `NotChat`.
    """
    one, two = _side(before, "first"), _side(after, "second")
    for site in _sites(before, after, one, two):
        if site.rendered or not rendered_only:
            return _measured(site, one, two)
    kept = sum(map(_size, two.tools)) + sum(_size(raw) for _, raw in two.messages[: len(one.messages)])
    shared = min(len(one.messages), len(two.messages))
    return Divergence(DivergenceKind.EXTENDS, rendered=False, kept_bytes=kept, shared_messages=shared)


def _side(body: Body, which: str) -> _Side:
    try:
        messages = list(enumerate(body.items("messages")))
    except msgspec.DecodeError as error:
        raise NotChat(f"the {which} body has no array `messages`") from error
    # Roles are only read where the merge that they decide can happen.
    if b'"developer"' in body.raw and any(role(raw) == "developer" for _, raw in messages):
        messages.sort(key=lambda pair: role(pair[1]) not in HEAD_ROLES)
    try:
        tools = body.items("tools") if body.has("tools") else []
    except msgspec.DecodeError as error:
        raise NotChat(f"`tools` of the {which} body is no array") from error
    return _Side(tools, messages)


def _sites(before: Body, after: Body, one: _Side, two: _Side) -> Iterator[_Site]:
    yield from _field_sites(before, after)
    if one.tools != two.tools:
        yield from _tool_sites(one.tools, two.tools)
    yield from _message_sites(one.messages, two.messages, len(two.tools))


def _field_sites(before: Body, after: Body) -> Iterator[_Site]:
    for name, kind in _FIELDS:
        a, b = before.get(name) or _NULL, after.get(name) or _NULL
        if a != b and not json_equal(bytes(a), bytes(b)):
            yield _Site(kind, name, -1, sides=(a, b), texts=(_decoded(a), _decoded(b)))


def _tool_sites(ones: list[Raw], twos: list[Raw]) -> Iterator[_Site]:
    forms = [_form(tool) for tool in ones], [_form(tool) for tool in twos]
    known = frozenset(forms[0]), frozenset(forms[1])
    for at, (a, b) in enumerate(zip(ones, twos, strict=False)):
        if a == b:
            continue
        moved = forms[1][at] in known[0] and forms[0][at] in known[1]
        if moved and forms[0][at] != forms[1][at]:
            texts = (_decoded(a), _decoded(b))
            yield _Site(DivergenceKind.TOOLS_REORDERED, f"tools[{at}]", at, at, sides=(a, b), texts=texts)
            return
        yield _tool_site(at, a, b)
    if len(ones) != len(twos):
        at = min(len(ones), len(twos))
        one, two = next(iter(ones[at:]), None), next(iter(twos[at:]), None)
        texts = (_decoded(one), _decoded(two))
        yield _Site(DivergenceKind.TOOLS_CHANGED, f"tools[{at}]", at, at, sides=(one, two), texts=texts)


def _tool_site(at: int, a: Raw, b: Raw) -> _Site:
    found = difference_of_tools(a, b)
    kind = DivergenceKind.TOOLS_CHANGED if found.meaning else DivergenceKind.TOOLS_RESERIALIZED
    volatile = None
    if found.meaning and found.field in ("function.description", "function.parameters"):
        volatile = volatile_at_difference(found.before, found.after)
    if volatile is not None:
        kind = DivergenceKind.VOLATILE_IN_HEAD
    return _site(kind, f"tools[{at}]", at, at, found, volatile, (a, b))


def _message_sites(ones: list[tuple[int, Raw]], twos: list[tuple[int, Raw]], tools: int) -> Iterator[_Site]:
    head = True  # nothing but system and developer messages so far
    for at, ((_, a), (index, b)) in enumerate(zip(ones, twos, strict=False)):
        in_head = head
        head = head and role(b) in HEAD_ROLES
        if a == b:
            continue
        found = difference_of_messages(a, b)
        if not found.meaning:
            kind = DivergenceKind.HISTORY_RESERIALIZED
            yield _site(kind, f"messages[{index}]", tools + at, index, found, None, (a, b))
        elif in_head and not HEAD_ROLES.isdisjoint((role(a), role(b))):
            yield _head_site(tools + at, index, found, a, b)
            return
        else:
            yield _history_site(tools + at, index, found, ones[at:], twos[at:])
            return
    if len(twos) < len(ones):
        at = len(twos)
        gone = (ones[at][1], None)
        yield _Site(DivergenceKind.HISTORY_TRUNCATED, f"messages[{at}]", tools + at, at, False, sides=gone)


def _head_site(at: int, index: int, found: Difference, a: Raw, b: Raw) -> _Site:
    volatile = None
    if found.field.startswith("content") and role(a) == role(b):
        volatile = volatile_at_difference(found.before, found.after)
    kind = DivergenceKind.SYSTEM_CHANGED if volatile is None else DivergenceKind.VOLATILE_IN_HEAD
    return _site(kind, f"messages[{index}]", at, index, found, volatile, (a, b))


def _history_site(
    at: int, index: int, found: Difference, ones: list[tuple[int, Raw]], twos: list[tuple[int, Raw]]
) -> _Site:
    """The rest of two histories whose next messages differ in meaning."""
    numbers: dict[bytes, int] = {}
    rest = [[numbers.setdefault(bytes(raw), len(numbers)) for _, raw in side] for side in (ones, twos)]
    a, b = ones[0][1], twos[0][1]
    path = f"messages[{index}]"
    if not Counter(rest[0]) - Counter(rest[1]) and not _is_subsequence(rest[0], rest[1]):
        kind = DivergenceKind.HISTORY_REORDERED
    elif _overlap(rest[0][1:], rest[1]):
        kind = DivergenceKind.HISTORY_TRUNCATED
    elif is_compacted(*rest, *([_size(raw) for _, raw in side] for side in (ones, twos))):
        kind = DivergenceKind.HISTORY_COMPACTED
    else:
        return _site(DivergenceKind.HISTORY_EDITED, path, at, index, found, None, (a, b))
    return _Site(kind, path, at, index, sides=(a, b), texts=(_decoded(a), _decoded(b)))


def volatile_at_difference(before: str, after: str) -> VolatileKind | None:
    """The kind of the volatile span in which two texts first differ, None unless both have one there."""
    at = common_prefix(before, after)
    kind = _kind_at(before, after, at, _NEAR)
    if kind is None:
        return _kind_at(before, after, at, _FAR, _LONG)
    return kind if kind is not VolatileKind.COUNTER else _kind_at(before, after, at, _FAR, (kind,))


def _kind_at(
    before: str, after: str, at: int, around: tuple[int, int], kinds: Collection[VolatileKind] | None = None
) -> VolatileKind | None:
    """The kind of a span, of these `kinds`, that both texts have at a place, looked for `around` it."""
    start = max(at - around[0], 0)
    if start and (space := _SPACE.search(before, start, at)):
        start = space.end()  # half a word may look like something else

    def spans(text: str, kinds: Collection[VolatileKind] | None) -> set[tuple[int, VolatileKind]]:
        found = find_volatile(text[start : at + around[1]], kinds)
        return {(span.start, span.kind) for span in found if span.start <= at - start <= span.end}

    one = spans(before, kinds)
    both = one & spans(after, {kind for _, kind in one}) if one else one
    return max(both)[1] if both else None


def common_prefix(a: AnyStr, b: AnyStr) -> int:
    """How many leading characters or bytes two texts share. Linear, without a loop over them."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _site(
    kind: DivergenceKind,
    path: str,
    at: int,
    index: int,
    found: Difference,
    volatile: VolatileKind | None,
    sides: tuple[Raw, Raw],
) -> _Site:
    full = f"{path}.{found.field}" if found.field else path
    return _Site(kind, full, at, index, found.rendered, volatile, sides, (found.before, found.after))


def _measured(site: _Site, one: _Side, two: _Side) -> Divergence:
    a, b = (b"" if side is None else bytes(side) for side in site.sides)
    offset = 0 if site.index is None else common_prefix(a, b)
    elements = [*two.tools, *(raw for _, raw in two.messages)]
    held, shared = _held(site, one, two)
    avoidable = sum(_size(elements[at]) for at in held)
    if site.index is not None:
        avoidable += -offset if site.at in held else common_prefix(a[offset:][::-1], b[offset:][::-1])
    place = 0 if site.kind in _MOVED else common_prefix(*site.texts)
    return Divergence(
        kind=site.kind,
        field=site.path,
        index=site.index,
        offset=offset,
        volatile=site.volatile,
        rendered=site.rendered,
        kept_bytes=sum(map(_size, elements[: max(site.at, 0)])) + offset,
        avoidable_bytes=avoidable,
        shared_messages=shared,
        before_excerpt=excerpt(site.texts[0], place),
        after_excerpt=excerpt(site.texts[1], place),
    )


def _held(site: _Site, one: _Side, two: _Side) -> tuple[set[int], int]:
    """Elements of the second body, from the site on, that the first holds too; and `shared_messages`."""
    at = max(site.at, 0)
    tools = len(two.tools)
    start = max(at - tools, 0)
    left = Counter(map(_form, one.tools[at:]))
    held = set()
    for number, tool in enumerate(two.tools[at:], at):
        form = _form(tool)
        if left[form]:
            left[form] -= 1
            held.add(number)
    messages = _held_messages(one.messages[start:], two.messages[start:])
    held.update(tools + start + number for number in messages)
    last = start + max(messages) + 1 if messages else start
    return held, max((index + 1 for index, _ in two.messages[:last]), default=0)


def _held_messages(ones: list[tuple[int, Raw]], twos: list[tuple[int, Raw]]) -> set[int]:
    """Positions in `twos` of messages that are in `ones`: in their place, else anywhere by their bytes."""
    held = set()
    for number, ((_, a), (_, b)) in enumerate(zip(ones, twos, strict=False)):
        if a == b or not difference_of_messages(a, b).meaning:
            held.add(number)
    left = Counter(bytes(raw) for number, (_, raw) in enumerate(ones) if number not in held)
    for number, (_, b) in enumerate(twos):
        if number not in held and left[bytes(b)]:
            left[bytes(b)] -= 1
            held.add(number)
    return held


def _overlap(before: Sequence[int], after: Sequence[int]) -> int:
    """How many of the last of `before` are the first of `after` (Knuth, Morris and Pratt; linear)."""
    borders = [0]
    for number in after[1:]:
        borders.append(_step(after, borders, borders[-1], number))
    matched = 0
    for number in before:
        matched = _step(after, borders, matched, number)
    return matched


def _step(pattern: Sequence[int], borders: Sequence[int], matched: int, number: int) -> int:
    while matched and (matched == len(pattern) or pattern[matched] != number):
        matched = borders[matched - 1]
    return matched + (pattern[matched] == number)


def _is_subsequence(short: Sequence[int], long: Sequence[int]) -> bool:
    rest = iter(long)
    return all(number in rest for number in short)


def _form(tool: Raw) -> bytes:
    """What two tools that mean the same have in common."""
    raw = bytes(tool)
    try:
        return canonical_form(raw)
    except NotJson:
        return raw


def _decoded(value: Raw | None) -> str:
    return "" if value is None else bytes(value).decode("utf-8", "replace")


def _size(raw: Raw) -> int:
    return memoryview(raw).nbytes
