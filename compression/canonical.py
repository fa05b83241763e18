"""When two JSON texts are the same value to the engine, and a digest that says so.

The engine reads JSON with Python's `json` and its templates write it back with `json.dumps`. Two texts
are equal here when what it would write is equal up to the order of members:

- member order, white space and escapes do not count; of a repeated member the last one does;
- a number is what Python writes for it: `1.0`, `1e0` and `1.00` are one number, `1` and `1.0` are two,
  `-0.0` and `0.0` are two, `-0` and `0` are one; integers are exact at any size;
- a number beyond the range of a float is only equal to the same characters (written back, every such
  number would be `Infinity`, yet they are not one value to anybody else);
- strings are sequences of code points; a lone surrogate is a code point like any other, and differs
  from U+FFFD and from every other surrogate.

`NaN` and `Infinity` are not JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from math import isinf
from typing import Final, NoReturn, TypeAlias

from ctxgate.inference.wire import NotJson

DIGEST_BYTES: Final = 32
MAX_DEPTH: Final = 200  # containers inside one another; deeper texts count as no JSON, at any stack depth
MAX_INTEGER_DIGITS: Final = 4300  # more is refused by the engine's own reader

_Value: TypeAlias = "str | bool | _Number | list[_Value] | dict[str, _Value] | None"
_BRACKETS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Number:
    text: str


def json_equal(a: bytes, b: bytes) -> bool:
    """Whether two texts are the same JSON value. What is no JSON equals only the same bytes."""
    return _equal(a, b, ordered=False)


def same_rendering(a: bytes, b: bytes) -> bool:
    """Like `json_equal`, but members must stand in the same order too: a template prints both alike."""
    return _equal(a, b, ordered=True)


def canonical_digest(raw: bytes) -> bytes:
    """A digest of 32 bytes, equal exactly for JSON-equal texts. Raises `NotJson`."""
    return blake2b(canonical_form(raw), digest_size=DIGEST_BYTES).digest()


def canonical_form(raw: bytes, *, ordered: bool = False) -> bytes:
    """Bytes that are equal exactly for JSON-equal texts; they are no JSON. Raises `NotJson`.

    With `ordered` the order of members counts. Cost: linear in the bytes, but for sorting member names.
    """
    parts: list[bytes] = []
    todo: list[_Value | bytes] = [_parse(raw)]
    while todo:
        item = todo.pop()
        if isinstance(item, bytes):
            parts.append(item)
        elif isinstance(item, list):
            parts.append(b"[")
            todo.append(b"]")
            todo.extend(reversed(item))
        elif isinstance(item, dict):
            parts.append(b"{")
            todo.append(b"}")
            for name in reversed(item if ordered else sorted(item)):
                todo += (item[name], _string(name))
        else:
            parts.append(_scalar(item))
    return b"".join(parts)


def _equal(a: bytes, b: bytes, *, ordered: bool) -> bool:
    if a == b:
        return True
    try:
        return canonical_form(a, ordered=ordered) == canonical_form(b, ordered=ordered)
    except NotJson:
        return False


def _scalar(value: str | bool | _Number | None) -> bytes:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, _Number):
        return b"n%s;" % value.text.encode()
    return b"z" if value is None else b"t" if value else b"f"


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"s%d:%s" % (len(encoded), encoded)


def _parse(raw: bytes) -> _Value:
    try:
        text = raw.decode("utf-8", "surrogatepass")
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_depth(text)
        value: _Value = _DECODER.decode(text)
    except NotJson:
        raise
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError; its text may quote the input
        raise NotJson("not valid JSON") from error
    return value


def _check_depth(text: str) -> None:
    depth = 0
    for found in _BRACKETS.finditer(text):
        lexeme = found[0]
        depth += (lexeme in "[{") - (lexeme in "]}")
        if depth > MAX_DEPTH:
            raise NotJson("nested too deeply")


def _integer(text: str) -> _Number:
    if len(text.lstrip("-")) > MAX_INTEGER_DIGITS:
        raise NotJson("an integer of too many digits")
    return _Number("0" if text == "-0" else text)


def _float(text: str) -> _Number:
    value = float(text)
    return _Number(f"out of range {text}" if isinf(value) else repr(value))


def _refuse(name: str) -> NoReturn:
    raise NotJson(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(
    parse_int=_integer, parse_float=_float, parse_constant=_refuse, object_pairs_hook=dict
)
