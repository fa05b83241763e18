"""What one tool result says in a line or two, by what kind of text it is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.clusters import head_of
from ctxgate.compression.error_lines import is_error
from ctxgate.compression.structure import Kind, is_signature, kind_of, unnumbered

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST: Final = 240  # bytes of one line
_SIGNATURES: Final = 6
_FACTS: Final = 8
_ERRORS: Final = 3
_DIFF_FILE: Final = re.compile(r"\+\+\+ (?:b/)?(\S{1,200})")


def highlights(text: str) -> list[str]:
    """A few lines of at most `LONGEST` bytes; none for a text that is empty."""
    lines = text.split("\n")
    kind = kind_of(text, lines)
    if kind is Kind.JSON:
        found = _facts(text)
        if found:
            return [head_of(found, LONGEST)]
    by_kind = {Kind.DIFF: _diff, Kind.CODE: _code, Kind.TABLE: _table}
    found_lines = [*by_kind[kind](lines)] if kind in by_kind else []
    found_lines += _reports(lines, plain=kind not in by_kind)
    return [head_of(line, LONGEST) for line in dict.fromkeys(found_lines)]


def _facts(text: str) -> str:
    """The first plain members of a JSON object, or how many items an array has."""
    try:
        value: Any = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""
    if isinstance(value, list):
        inner = f", the first {_members(value[0])}" if value and isinstance(value[0], dict) else ""
        return f"JSON array of {len(value)} items{inner}"
    return f"JSON {_members(value)}" if isinstance(value, dict) else ""


def _members(value: dict[str, Any]) -> str:
    plain = [
        f"{name}: {part}"
        for name, part in value.items()
        if isinstance(part, str | int | float | bool) and part != ""
    ]
    nested = [f"{name} ({len(part)})" for name, part in value.items() if isinstance(part, dict | list)]
    return (
        "object with " + ", ".join([*plain[:_FACTS], *nested[:_FACTS]])
        if plain or nested
        else "object, empty"
    )


def _diff(lines: Sequence[str]) -> list[str]:
    files = list(dict.fromkeys(found.group(1) for found in map(_DIFF_FILE.match, lines) if found))
    added = sum(line.startswith("+") and not line.startswith("+++") for line in lines)
    removed = sum(line.startswith("-") and not line.startswith("---") for line in lines)
    return [f"diff of {', '.join(files[:8]) or 'one file'}: {added} lines added, {removed} removed"]


def _code(lines: Sequence[str]) -> list[str]:
    names = [unnumbered(line).strip() for line in lines if is_signature(line)]
    names = [name.rstrip("{: ") for name in names if not name.startswith(("@", "#"))]
    return [f"code with {'; '.join(names[:_SIGNATURES])}"] if names else []


def _table(lines: Sequence[str]) -> list[str]:
    rows = [line for line in lines if line.strip()]
    return [f"table of {len(rows)} rows: {rows[0].strip()}"] if rows else []


def _reports(lines: Sequence[str], *, plain: bool) -> list[str]:
    """Error lines, and the last line of a text that has no other form."""
    found = list(dict.fromkeys(line.strip() for line in lines if is_error(line)))[-_ERRORS:]
    if plain:
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        found += [last] if last else []
    return found
