"""Compares two messages, or two tools, field by field: is it the same, and does the prompt see it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.canonical import json_equal, same_rendering

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from msgspec import Raw

HEAD_ROLES: Final = frozenset({"system", "developer"})
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY: Final = msgspec.json.Decoder(list[msgspec.Raw])
_STRING: Final = msgspec.json.Decoder(str)
_NULL: Final = msgspec.Raw(b"null")
# Marks for a gateway or a provider's cache; no template prints them.
_MARKS: Final = frozenset({"cache_control", "ctxgate"})
_NO_CONTENT: Final = (b"null", b'""', b"[]")


@dataclass(frozen=True, slots=True)
class Difference:
    """A field whose bytes differ. `meaning`: other content, not only other characters for it.

    `rendered`: it reaches the prompt. The texts are decoded where the field is text.
    """

    field: str
    meaning: bool
    rendered: bool
    before: str = ""
    after: str = ""


def difference_of_messages(before: Raw, after: Raw) -> Difference:
    """The most telling difference of two messages of different bytes: of meaning, of rendering, any."""
    return _most_telling(_message_differences(before, after), before, after)


def difference_of_tools(before: Raw, after: Raw) -> Difference:
    """The same for two tools."""
    return _most_telling(_tool_differences(before, after), before, after)


def role(message: Raw) -> str:
    """The message's role, empty where it has none."""
    return text_of(members_of(message).get("role", _NULL)) or ""


def content_text(content: Raw) -> str | None:
    """The text that content renders to: a string's, or text parts joined by line feeds. None for others."""
    if bytes(memoryview(content)[:1]) != b"[":
        return text_of(content)
    texts = [_part_text(part) for part in items_of(content)]
    known = [text for text in texts if text is not None]
    return "\n".join(filter(None, known)) if len(known) == len(texts) else None


def _most_telling(found: Iterator[Difference], before: Raw, after: Raw) -> Difference:
    best: Difference | None = None
    for one in found:
        if one.meaning:
            return one
        if best is None or (one.rendered and not best.rendered):
            best = one
    # Only what stands between the members differs, or their order, which no reader of an object sees.
    if best is not None:
        return best
    alike = json_equal(bytes(before), bytes(after))
    return Difference("", not alike, not alike, _raw_text(before), _raw_text(after))


def _message_differences(before: Raw, after: Raw) -> Iterator[Difference]:
    one, two = members_of(before), members_of(after)
    for name in (*two, *(name for name in one if name not in two)):
        a, b = one.get(name, _NULL), two.get(name, _NULL)
        if a == b:
            if (name in one) is not (name in two):
                yield Difference(name, meaning=False, rendered=False)
        elif name == "content":
            yield from _content_differences(a, b)
        elif name == "tool_calls":
            yield from _call_differences(a, b)
        else:
            yield _value_difference(name, a, b)


def _content_differences(a: Raw, b: Raw) -> Iterator[Difference]:
    if bytes(a) in _NO_CONTENT and bytes(b) in _NO_CONTENT:
        yield Difference("content", meaning=False, rendered=False, before=_raw_text(a), after=_raw_text(b))
        return
    one, two = content_text(a), content_text(b)
    if one is None or two is None:
        yield _value_difference("content", a, b)
    elif one == two:
        yield Difference("content", meaning=False, rendered=False, before=_raw_text(a), after=_raw_text(b))
    else:
        yield Difference(_content_field(a, b), meaning=True, rendered=True, before=one, after=two)


def _content_field(a: Raw, b: Raw) -> str:
    """`content`, or the one part in which two arrays first differ."""
    for at, (one, two) in enumerate(zip(items_of(a), items_of(b), strict=False)):
        if one != two and not json_equal(bytes(one), bytes(two)):
            return f"content[{at}].text" if _part_text(one) is not None else f"content[{at}]"
    return "content"


def _call_differences(a: Raw, b: Raw) -> Iterator[Difference]:
    ones, twos = items_of(a), items_of(b)
    for at, (one, two) in enumerate(zip(ones, twos, strict=False)):
        if one != two:
            yield from _call_difference(f"tool_calls[{at}]", members_of(one), members_of(two))
    if len(ones) != len(twos):
        shorter = min(len(ones), len(twos))
        rest = (ones[shorter:], twos[shorter:])
        texts = ("".join(_raw_text(call) for call in calls) for calls in rest)
        yield Difference(f"tool_calls[{shorter}]", True, True, *texts)
    elif not ones:
        yield Difference("tool_calls", meaning=False, rendered=False)


def _call_difference(path: str, one: Mapping[str, Raw], two: Mapping[str, Raw]) -> Iterator[Difference]:
    for name, a, b in _pairs(one, two):
        if name != "function":
            yield _value_difference(f"{path}.{name}", a, b)
            continue
        for inner, c, d in _pairs(members_of(a), members_of(b)):
            field = f"{path}.function.{inner}"
            yield (
                _arguments_difference(field, c, d) if inner == "arguments" else _value_difference(field, c, d)
            )


def _arguments_difference(field: str, a: Raw, b: Raw) -> Difference:
    """Arguments are JSON inside a string; vLLM reads them and writes them anew, in the order they have."""
    one, two = text_of(a), text_of(b)
    if one is None or two is None:
        return _value_difference(field, a, b)
    raw = one.encode("utf-8", "surrogatepass"), two.encode("utf-8", "surrogatepass")
    return Difference(field, not json_equal(*raw), not same_rendering(*raw), one, two)


def _tool_differences(before: Raw, after: Raw) -> Iterator[Difference]:
    for name, a, b in _pairs(members_of(before), members_of(after)):
        if name != "function":
            yield _value_difference(name, a, b)
            continue
        for inner, c, d in _pairs(members_of(a), members_of(b)):
            yield _value_difference(f"function.{inner}", c, d)


def _pairs(one: Mapping[str, Raw], two: Mapping[str, Raw]) -> Iterator[tuple[str, Raw, Raw]]:
    """Members of different bytes, in the second object's order; an absent one is null."""
    for name in (*two, *(name for name in one if name not in two)):
        a, b = one.get(name, _NULL), two.get(name, _NULL)
        if a != b:
            yield name, a, b


def _value_difference(field: str, a: Raw, b: Raw) -> Difference:
    raw = bytes(a), bytes(b)
    one, two = text_of(a), text_of(b)
    texts = (one, two) if one is not None and two is not None else (_raw_text(a), _raw_text(b))
    if field.rpartition(".")[2] in _MARKS:
        return Difference(field, False, False, *texts)
    return Difference(field, not json_equal(*raw), not same_rendering(*raw), *texts)


def _part_text(part: Raw) -> str | None:
    members = members_of(part)
    if not members:
        return text_of(part)
    kind = text_of(members.get("type", _NULL))
    return text_of(members.get("text", _NULL)) if kind in (None, "text") else None


def members_of(value: Raw) -> dict[str, Raw]:
    """An object's members as slices, none for anything else."""
    try:
        return _OBJECT.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def items_of(value: Raw) -> list[Raw]:
    """An array's elements as slices, none for anything else."""
    try:
        return _ARRAY.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


def text_of(value: Raw) -> str | None:
    """A string's text, None for anything else."""
    try:
        return _STRING.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _raw_text(value: Raw) -> str:
    return bytes(value).decode("utf-8", "replace")
