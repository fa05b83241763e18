"""Reads the notes a model wrote into the parts of a summary, however it has set them.

Models write headings as Markdown, in bold or as JSON, number them, put a greeting before and a fence
around them. What is read is always written anew, one point a line, so that nothing in an answer can pass
for a heading of the record it becomes part of.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.clusters import head_of
from ctxgate.compression.said import repaired
from ctxgate.compression.summary import TITLES, Summary, SummaryFault, fault_of, is_placeholder, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_POINT: Final = 800
"""Bytes of one point; a longer one is cut."""

_MOST_POINTS: Final = 400
_NAMES: Final = {
    "goal": ("goal", "goals", "task", "objective", "objectives"),
    "constraints": ("constraints", "constraint", "rules", "requirements", "user constraints"),
    "decisions": ("decisions", "decision", "key decisions", "decisions made"),
    "state": ("state", "current state", "status", "progress", "findings", "summary"),
    "open_items": ("open items", "open_items", "next steps", "todo", "to do", "pending", "remaining", "open"),
    "files": ("files touched", "files", "files changed", "files modified", "files_touched"),
}
_PART: Final = {name: part for part, names in _NAMES.items() for name in names}
_HEADING: Final = re.compile(
    r"\s{0,8}(?:[-*+] )?(?:#{1,6}\s{1,4})?(?:\d{1,2}[.)]\s{1,4})?(?P<open>[*_]{0,3})"
    r"(?P<name>[A-Za-z][A-Za-z_ ]{2,24})(?P<shut>[*_]{0,3})\s{0,4}(?P<colon>:?)[*_]{0,3}(?P<rest>.{0,4000})$"
)
_POINT: Final = re.compile(r"\s{0,16}(?:[-*+\u2022\u2013]|\d{1,3}[.)])\s{1,8}(?:\[[ xX]\]\s{1,4})?")
_FENCED: Final = re.compile(r"\s{0,8}(?:```|~~~)[\w-]{0,20}\s{0,8}$")
_THOUGHT: Final = re.compile(r"</think(?:ing)?>|<\|channel\|>final<\|message\|>", re.IGNORECASE)
_THINKS: Final = re.compile(r"\s{0,16}<think(?:ing)?>", re.IGNORECASE)
_WHOLE: Final = re.compile(r"[.!?\u3002\uff01\uff1f)\]\"'`]$")
_SENTENCE_END: Final = re.compile(r"[.!?](?=\s)|[\u3002\uff01\uff1f]")


@dataclass(frozen=True, slots=True)
class Reading:
    """The parts of an answer, or why it must not be used; one of the two is None."""

    summary: Summary | None
    fault: SummaryFault | None = None


def read_answer(answer: str, source_bytes: int, *, cut: bool = False) -> Reading:
    """Read the notes that are to stand for `source_bytes` of messages.

    `cut`: the engine stopped at its output limit, so the last point is not whole. Never raises.
    """
    text = _said_at_last(repaired(answer)[0])
    fault = fault_of(text, source_bytes)
    if fault is not None:
        return Reading(None, fault)
    parts = _from_json(text) or _from_lines(text)
    if cut:
        _drop_last(parts)
    summary = Summary(**{name: tuple(points) for name, points in parts.items()})
    fault = fault_of(listed(summary), source_bytes)
    return Reading(summary) if fault is None else Reading(None, fault)


def _said_at_last(text: str) -> str:
    """The answer without what the model thought first; nothing of one that never stopped thinking."""
    *thoughts, said = _THOUGHT.split(text)
    if not thoughts and _THINKS.match(said):
        return ""
    return said.strip()


def _from_json(text: str) -> dict[str, list[str]]:
    """The parts of a JSON object whose members are named as the parts are; empty for any other text."""
    lines = [line for line in text.split("\n") if not _FENCED.match(line)]
    try:
        value: Any = json.loads("\n".join(lines))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    parts: dict[str, list[str]] = {}
    for name, member in value.items():
        part = _part_of(str(name))
        if part is not None:
            for point in member if isinstance(member, list) else [member]:
                _add(parts, part, point if isinstance(point, str) else json.dumps(point, ensure_ascii=False))
    return parts


def _from_lines(text: str) -> dict[str, list[str]]:
    """The parts under their headings; all of it is state where there is no heading."""
    found = list(_lines(text))
    if not any(part for part, _ in found):
        found = [("state", line) for _, line in found]
    parts: dict[str, list[str]] = {}
    for part, line in found:
        if part is None:  # a greeting
            continue
        begins = _POINT.match(line)
        if begins is None and line[:2] == "  " and parts.get(part):  # goes on with the point before
            _add(parts, part, f"{parts[part].pop()} {line}")
        else:
            _add(parts, part, line[begins.end() :] if begins else line)
    return parts


def _lines(text: str) -> Iterator[tuple[str | None, str]]:
    """The lines that say something, each with the part it stands in."""
    part: str | None = None
    for line in text.split("\n"):
        if not line.strip() or _FENCED.match(line):
            continue
        heading = _HEADING.match(line)
        named = _part_of(heading["name"]) if heading else None
        marked = heading is not None and (heading["colon"] or heading["open"] or line.lstrip()[:1] == "#")
        alone = heading is not None and not heading["rest"].strip(" *_:")
        if heading is None or named is None or not (marked or alone) or not (heading["colon"] or alone):
            yield part, line
            continue
        part = named
        if not alone:
            yield part, heading["rest"].strip()
        else:
            yield part, ""


def _part_of(name: str) -> str | None:
    return _PART.get(" ".join(name.lower().replace("_", " ").split()))


def _add(parts: dict[str, list[str]], part: str, text: str) -> None:
    point = " ".join(text.split())
    if len(point.encode()) > LONGEST_POINT:
        point = f"{head_of(point, LONGEST_POINT - 4).rstrip()} ..."
    points = parts.setdefault(part, [])
    if not is_placeholder(point) and len(points) < _MOST_POINTS:
        points.append(point)


def _drop_last(parts: dict[str, list[str]]) -> None:
    """Take away the point that the output limit cut off, or its last sentence where it is the only one."""
    for part, _ in reversed(TITLES):
        points = parts.get(part)
        if not points:
            continue
        if not _WHOLE.search(points[-1]):
            last = points.pop()
            ends = [end.end() for end in _SENTENCE_END.finditer(last)]
            if ends and not any(parts.values()):
                points.append(last[: ends[-1]])
        return
