"""Text that changes from request to request, found by its form: clocks, ids, counters and the like.

Meant for the head of a prompt (system and developer messages, tool descriptions), where one such span
makes everything behind it new to the prefix cache. Form alone cannot know that a text *will* change: the
detector reports what the field's clients are known to put there, and leaves alone what instructions hold
for good (versions, RFC and line numbers, years, examples, numbered steps).

Cost: linear in the text. Every pattern is bounded in width and in the number of ways it can match from
one place (a test counts them), and the words before a match are looked at for at most 64 characters.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ctxgate.compression import volatile_context as context
from ctxgate.compression import volatile_patterns as patterns
from ctxgate.compression.volatile_git import git_blocks

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterable, Iterator


class VolatileKind(StrEnum):
    """What a volatile span is."""

    CLOCK = "clock"  # a date with a time, or a time of day
    DATE = "date"  # a date alone, said to be today's
    EPOCH = "epoch"  # seconds or milliseconds since 1970
    UUID = "uuid"
    HASH = "hash"  # hex or base64: digests, nonces, tokens
    COUNTER = "counter"  # step 17, request #5
    PATH = "path"  # a temporary folder, or a path with a process id
    PID = "pid"
    GIT = "git"  # status, branch, commit
    USAGE = "usage"  # tokens left, cost so far
    HEADER = "header"  # a line of the client about this one request, such as x-anthropic-billing-header


@dataclass(frozen=True, slots=True)
class VolatileSpan:
    """`text[start:end]` is what changes; offsets are characters.

    `label` is the constant text before it on its line, at most 64 characters.
    """

    start: int
    end: int
    kind: VolatileKind
    label: str = ""


def find_volatile(text: str, kinds: Collection[VolatileKind] | None = None) -> tuple[VolatileSpan, ...]:
    """Every volatile span, in order and without overlaps; of overlapping ones, the more telling.

    With `kinds`, only those are looked for.
    """
    taken: list[tuple[int, int, VolatileKind]] = []
    for kind, find in _FINDERS:
        if kinds is None or kind in kinds:
            taken = _merged(taken, ((start, end, kind) for start, end in find(text)))
    return tuple(
        VolatileSpan(start, end, kind, context.before(text, start).lstrip()) for start, end, kind in taken
    )


def masked(text: str, spans: Iterable[VolatileSpan]) -> str:
    """The text with each span replaced by its kind in brackets: what stays when clocks move on."""
    parts: list[str] = []
    position = 0
    for span in spans:
        parts += (text[position : span.start], f"[{span.kind.value}]")
        position = span.end
    return "".join((*parts, text[position:]))


def _merged(
    taken: list[tuple[int, int, VolatileKind]], found: Iterable[tuple[int, int, VolatileKind]]
) -> list[tuple[int, int, VolatileKind]]:
    """Both lists in order; what overlaps an earlier finder's span is dropped."""
    merged: list[tuple[int, int, VolatileKind]] = []
    at = 0
    for span in sorted(found):
        while at < len(taken) and taken[at][0] < span[1]:
            merged.append(taken[at])
            at += 1
        if not merged or merged[-1][1] <= span[0]:
            merged.append(span)
    return merged + taken[at:]


def _plain(pattern: re.Pattern[str]) -> Callable[[str], Iterator[tuple[int, int]]]:
    """Matches that tell by themselves, but for examples of a form."""

    def find(text: str) -> Iterator[tuple[int, int]]:
        for match in pattern.finditer(text):
            if not context.is_example(context.before(text, match.start())):
                yield match.span()

    return find


def _labelled(
    pattern: re.Pattern[str], labelled: Callable[[str], bool]
) -> Callable[[str], Iterator[tuple[int, int]]]:
    """Matches whose words before them say what they are."""

    def find(text: str) -> Iterator[tuple[int, int]]:
        for match in pattern.finditer(text):
            if labelled(context.before(text, match.start())):
                yield match.span()

    return find


def _values(pattern: re.Pattern[str]) -> Callable[[str], Iterator[tuple[int, int]]]:
    """The group `value` of matches that hold their own label."""

    def find(text: str) -> Iterator[tuple[int, int]]:
        for match in pattern.finditer(text):
            if not context.is_limit(context.before(text, match.start())):
                yield match.span("value")

    return find


def _hashes(text: str) -> Iterator[tuple[int, int]]:
    for match in patterns.HEX.finditer(text):
        if patterns.is_mixed_hex(match[0]) and not context.is_example(context.before(text, match.start())):
            yield match.span()
    for match in patterns.BASE64.finditer(text):
        before = context.before(text, match.start())
        if patterns.is_dense(match[0]) and (context.names_secret(before) or match[0].endswith("=")):
            yield match.span()


def _counters(text: str) -> Iterator[tuple[int, int]]:
    """Numbered words, unless the text numbers a list with them or refers to one."""
    found = [match for match in patterns.COUNTER.finditer(text) if not context.refers(text, match.start())]
    numbers: dict[str, set[str]] = {}
    for match in patterns.NUMBERED.finditer(text):
        numbers.setdefault(match["word"].lower(), set()).add(match["value"])
    for match in found:
        word = match["word"]
        if word is None or match["mark"] or len(numbers.get(word.lower(), ())) < 2:
            yield match.span("value")


def _paths(text: str) -> Iterator[tuple[int, int]]:
    for pattern in (patterns.TEMP_PATH, patterns.PROCESS_PATH):
        for match in pattern.finditer(text):
            if patterns.is_changing_path(match["name"]):
                yield match.span("name")


_FINDERS: Final[tuple[tuple[VolatileKind, Callable[[str], Iterable[tuple[int, int]]]], ...]] = (
    (VolatileKind.HEADER, _values(patterns.HEADER)),
    (VolatileKind.GIT, git_blocks),
    (VolatileKind.CLOCK, _plain(patterns.CLOCK)),
    (VolatileKind.CLOCK, _labelled(patterns.TIME, context.says_now)),
    (VolatileKind.DATE, _labelled(patterns.DATE, context.says_now)),
    (VolatileKind.UUID, _plain(patterns.UUID)),
    (VolatileKind.PATH, _paths),
    (VolatileKind.HASH, _hashes),
    (VolatileKind.GIT, _values(patterns.GIT_BRANCH)),
    (VolatileKind.GIT, _values(patterns.GIT_COMMIT)),
    (VolatileKind.EPOCH, _labelled(patterns.EPOCH, context.says_time)),
    (VolatileKind.EPOCH, _plain(patterns.EPOCH_MILLIS)),
    (VolatileKind.USAGE, _values(patterns.USAGE)),
    (VolatileKind.USAGE, _values(patterns.USAGE_AFTER)),
    (VolatileKind.PID, _values(patterns.PID)),
    (VolatileKind.COUNTER, _counters),
)
