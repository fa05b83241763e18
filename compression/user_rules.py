"""What a user told the agent to do or never to do: the sentences, word for word.

An imperative keeps its condition: the heading of its list, and the sentence before or after it that only
makes sense together with it. Code and output that a user pasted hold no rules.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ctxgate.compression.clusters import cut_after, cut_before

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST: Final = 2000  # characters of one rule
_LONGEST_HEADING: Final = 250

_ORDER: Final = re.compile(
    r"\b(?:always|never|must(?:n't| not)?|do not|don['\u2019]?t|cannot|make sure|be sure|ensure"
    r"|avoid|from now on|under no circumstances|not allowed|forbidden|required|only"
    r"|should(?: ?n['\u2019]?t| not)?|at all times"
    r"|every time|instead of|nothing else|have to|needs? to|remember|keep in mind|going forward"
    r"|no more than|at most|unless|refrain|stick to|important|can['\u2019]?t|prefer"
    r"|before you|after you|stop)\b",
    re.IGNORECASE,
)
_FORBIDS: Final = re.compile(r"\b(?:never|always|must|do not|don['\u2019]?t)\b", re.IGNORECASE)
_TELLS: Final = re.compile(
    r"\b(?:i|we|they|he|she) (?:do not|don['\u2019]?t|can['\u2019]?t|cannot) "
    r"(?:know|remember|recall|have|see|think|understand|mind|find|get|stream)\b"
    r"|\b(?:i|we|they|he|she) (?:need to|have to|should)\b",
    re.IGNORECASE,
)
_RULES: Final = re.compile(
    r"\b(?:rules?|requirements?|constraints?|guidelines?|conventions?|instructions?|musts?)\b", re.IGNORECASE
)
_SENTENCE_END: Final = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])[\"')\]]{0,3}\s{1,9}(?=\S)")
_FENCE: Final = re.compile(r"^\s{0,8}(?:```|~~~)")
_CODE: Final = re.compile(
    r"^\s{0,40}(?:at [\w.<>$ ]{1,80}\(|import .{0,200}(?: from |;$)|from [\w.]{1,80} import |#include"
    r"|(?:export )?(?:const|let|var) \w{1,60} ?[:=]|return\b.{0,200};"
    r"|(?:async )?(?:def|class|function) \w{1,60} ?[({:]"
    r"|(?:public|private|protected|static) .{0,200}[({;=]|throw new |raise \w{1,60}\("
    r"|[\w.-]{1,40}@[\w.-]{1,40}[:$]|[$%\u279c] |\{?\s{0,4}\"[\w-]{1,60}\": ?)"
    r"|\{\s{0,4}$|[=()].{0,200};\s{0,4}$|^\s{0,8}[\w.]{1,60}(?:Error|Exception):"
)
_JOINED: Final = re.compile(
    r"(?:and|but|so|then|otherwise|else|except|unless|because|however|also|in that case|if not"
    r"|only if|even if|that includes|this (?:means|includes|applies)|for example)\b",
    re.IGNORECASE,
)
_ITEM: Final = re.compile(r"\s{0,12}(?:[-*+\u2022]|\d{1,3}[.)])\s")


def user_rules(text: str) -> list[str]:
    """The sentences of a user's message that order, forbid or limit something, in order."""
    found: list[str] = []
    for heading, line in _lines(text):
        spans = _sentences(line)
        joined: list[tuple[int, int]] = []
        for at, (start, stop) in enumerate(spans):
            if not (_RULES.search(heading) or _orders(line[start:stop])):
                continue
            first, last = _with_condition(line, spans, at)
            if joined and first <= joined[-1][1]:
                first = joined.pop()[0]
            joined.append((first, last))
        for first, last in joined:
            rule = line[spans[first][0] : spans[last][1]]
            found.append(_bounded(f"{heading} {rule}" if heading else rule))
    return list(dict.fromkeys(found))


def _orders(sentence: str) -> bool:
    """Whether a sentence is an order. A question asks, unless it forbids; who speaks of himself tells."""
    looked_at = _TELLS.sub("", sentence)
    if _ORDER.search(looked_at) is None:
        return False
    return not looked_at.rstrip().endswith("?") or _FORBIDS.search(looked_at) is not None


def _with_condition(line: str, spans: list[tuple[int, int]], at: int) -> tuple[int, int]:
    """The sentences that belong to the one at `at`: one it leans on, and up to two that lean on it."""
    first = at - 1 if at and _JOINED.match(line, spans[at][0]) else at
    last = at
    while last + 1 < len(spans) and last - at < 2 and _JOINED.match(line, spans[last + 1][0]):
        last += 1
    return first, last


def _sentences(line: str) -> list[tuple[int, int]]:
    """Where the sentences of a line begin and end."""
    found: list[tuple[int, int]] = []
    start = 0
    for end in _SENTENCE_END.finditer(line):
        found.append((start, end.start() + len(end.group().rstrip())))
        start = end.end()
    found.append((start, len(line)))
    return found


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """The lines of prose, each with the heading of the list it is an item of."""
    heading = ""
    fenced = False
    for line in text.split("\n"):
        if _FENCE.match(line):
            fenced = not fenced
            continue
        stripped = line.strip()
        if fenced or not stripped or _CODE.search(line[:400]):
            continue
        item = _ITEM.match(line) is not None
        if not item:
            heading = ""
        yield heading, stripped
        if stripped.endswith(":") and not item:
            heading = stripped if len(stripped) <= _LONGEST_HEADING else ""


def _bounded(rule: str) -> str:
    """A rule within `LONGEST`: what stands around its order, cut between words."""
    if len(rule) <= LONGEST:
        return rule
    cue = _ORDER.search(rule)
    middle = cue.start() if cue else 0
    start = max(0, min(middle - LONGEST // 3, len(rule) - LONGEST))
    if start:
        start = rule.find(" ", start, middle) + 1 or cut_after(rule, start)
    stop = cut_before(rule, start + LONGEST)
    if stop < len(rule):
        stop = max(rule.rfind(" ", middle, stop), 0) or stop
    return rule[start:stop].strip()
