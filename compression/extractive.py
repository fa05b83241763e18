"""A summary made by code from what was said: no model, and the same bytes for the same messages.

Sentences are chosen, never written: the user's requests and rules, what the assistant says it decided or
left open, the sentences nearest to the whole, and for each tool result a line by its kind. What is chosen
is cut to a budget part by part.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.centrality import ranked
from ctxgate.compression.clusters import head_of
from ctxgate.compression.error_lines import is_error
from ctxgate.compression.highlights import highlights
from ctxgate.compression.identifiers import estimated_tokens
from ctxgate.compression.summary import Summary, is_record, without_markup
from ctxgate.compression.user_rules import user_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ctxgate.compression.said import Call, Said

_LONGEST: Final = 320  # bytes of one chosen sentence
_LONGEST_TASK: Final = 1200
_SHARES: Final = {"goal": 4, "constraints": 4, "decisions": 4, "state": 5, "open_items": 2, "files": 3}
_LINE_TOKENS: Final = 2  # what a line needs beside its text
_LEAST_TOKENS: Final = 30  # a shorter piece of a text says nothing
_LEAST_REQUEST: Final = 12  # characters
_LEAST_SENTENCE: Final = 25
_MOST: Final = 60  # sentences of one part that are ranked

_SENTENCE: Final = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s{1,9}(?=\S)")
_FENCE: Final = re.compile(r"\s{0,8}(?:```|~~~)")
_MARKS: Final = re.compile(r"^[\s>#*\u2022+-]{0,12}(?:\d{1,3}[.)] )?")
_OPEN_BOX: Final = re.compile(r"\s{0,12}[-*+] \[ \] (\S.{0,300})")
_DECIDED: Final = re.compile(
    r"\b(?:decided?|decision|chose|chosen|instead of|because|root cause"
    r"|the (?:problem|issue|bug|fix|reason) (?:is|was)|turns out|going with"
    r"|(?:we|i)(?:'ll| will| should| can) (?:use|keep|move|remove|replace|add|rename|split|make)"
    r"|approach|means that|so that|rather than|switched|fixed|refactored|moved|renamed|replaced|removed"
    r"|created|added|updated|committed|implemented|confirmed|cancelled|booked|refund(?:ed)?)\b",
    re.IGNORECASE,
)
_OPEN: Final = re.compile(
    r"\b(?:next(?: step)?s?|remaining|still (?:need|have|fail|missing|to)|todo|to do|not yet|pending"
    r"|left to do|will need to|need to|later|follow[- ]?up|unresolved|want me to|should i"
    r"|would you like|waiting for)\b",
    re.IGNORECASE,
)
_PATH_KEYS: Final = ("path", "file_path", "filepath", "filename", "file", "target_file", "notebook_path")
_WRITES: Final = re.compile(
    r"writ|edit|creat|replac|insert|patch|delet|remov|mov|renam|append|apply", re.IGNORECASE
)
_LOOKS: Final = frozenset({"view", "read", "show", "open", "list"})


def extract(
    messages: Sequence[Said],
    budget: int,
    *,
    task: Said | None = None,
    rules: bool = True,
    tokens_of: Callable[[str], int] = estimated_tokens,
) -> Summary | None:
    """The summary of a range of messages in about `budget` tokens; None where there is nothing to say.

    `task` is the first user message where it is not in the range. Each part gets its share, and what the
    parts before it left. Without `rules` no part repeats the user's rules, for they stand elsewhere.
    """
    own = [message for message in messages if not (message.role == "user" and is_record(message.text))]
    spoken = list(_spoken(own))
    texts = {
        "goal": _goal(own, task),
        "constraints": _rules(own) if rules else [],
        "decisions": _chosen([text for text in spoken if _DECIDED.search(text)]),
        "state": _state(own, spoken),
        "open_items": _open_items(own, spoken),
        "files": _files(own),
    }
    left, parts = budget, sum(_SHARES.values())
    found: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for name, share in _SHARES.items():
        taken = _fitting([text for text in texts[name] if text not in seen], left * share // parts, tokens_of)
        left -= sum(tokens_of(text) + _LINE_TOKENS for text in taken)
        parts -= share
        seen.update(taken)
        found[name] = tuple(_in_order(taken) if name == "goal" else taken)
    return Summary(**found) if any(found.values()) else None


def _fitting(texts: Iterable[str], room: int, tokens_of: Callable[[str], int]) -> list[str]:
    """The texts, best first, that fit into `room` tokens together; too long a first one is cut."""
    taken: list[str] = []
    for text in texts:
        cost = tokens_of(text) + _LINE_TOKENS
        if cost > room and not taken and room > _LEAST_TOKENS:
            text = _clean(text, room * 2)  # noqa: PLW2901 - two bytes per token fit whatever the encoding
            cost = tokens_of(text) + _LINE_TOKENS
        if cost <= room:
            taken.append(text)
            room -= cost
    return taken


def _in_order(taken: Sequence[str]) -> list[str]:
    """The task first, then the requests in the order in which they were made."""
    return [*taken[:1], *taken[:0:-1]]


def _goal(messages: Sequence[Said], task: Said | None) -> list[str]:
    """The task, then the user's requests, the latest first; a word of agreement is none."""
    asked = [message.text for message in messages if message.role == "user"]
    first = task.text if task is not None else (asked.pop(0) if asked else "")
    later = [_clean(text, _LONGEST) for text in asked if len(text.strip()) >= _LEAST_REQUEST]
    return [text for text in dict.fromkeys([_clean(first, _LONGEST_TASK), *later[:-13:-1]]) if text]


def _rules(messages: Sequence[Said]) -> list[str]:
    every = [rule for message in messages if message.role == "user" for rule in user_rules(message.text)]
    return list(dict.fromkeys(without_markup(rule) for rule in every))


def _state(messages: Sequence[Said], spoken: Sequence[str]) -> list[str]:
    """What the assistant said last, the results last seen, and the sentences nearest to the whole."""
    last = list(spoken[-3:])
    recent = messages[-max(len(messages) // 3, 8) :]
    results = [line for message in recent if message.role == "tool" for line in _result(message)]
    media = [line for message in messages for line in _media(message.text)]
    reports = [line for line in results if is_error(line)][-3:]
    return list(dict.fromkeys([*last, *media[-4:], *reports, *_chosen(spoken)[:8], *_chosen(results)]))


def _result(message: Said) -> Iterator[str]:
    for line in highlights(message.text):
        cleaned = _clean(line, _LONGEST)
        if len(cleaned) > 12:
            yield cleaned


def _media(text: str) -> Iterator[str]:
    """The placeholders of parts that are no text."""
    for line in text.split("\n"):
        if _MEDIA.fullmatch(line):
            yield f"A part that is no text: {line}"


_MEDIA: Final = re.compile(r"\[[a-z_]{1,30} [0-9a-f]{16}\]")


def _open_items(messages: Sequence[Said], spoken: Sequence[str]) -> list[str]:
    boxes: dict[str, None] = {}
    for message in messages[-max(len(messages) // 3, 8) :]:
        for line in message.text.split("\n"):
            box = _OPEN_BOX.match(line)
            if box:
                boxes[_clean(box.group(1), _LONGEST)] = None
    late = [text for text in spoken[len(spoken) // 2 :] if _OPEN.search(text)]
    return [*late[-3:][::-1], *list(boxes)[-12:]]


def _files(messages: Sequence[Said]) -> list[str]:
    """The files that calls name: the changed ones first, each with how often; then the read ones."""
    changed: Counter[str] = Counter()
    read: Counter[str] = Counter()
    for message in messages:
        for call in message.calls:
            for path, is_change in _touched(call):
                (changed if is_change else read)[path] += 1
    lines = [
        f"{path} (changed{f' {count} times' if count > 1 else ''})" for path, count in changed.most_common()
    ]
    return [*lines, *(f"{path} (read)" for path, _ in read.most_common() if path not in changed)]


def _touched(call: Call) -> Iterator[tuple[str, bool]]:
    try:
        arguments: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return
    if not isinstance(arguments, dict):
        return
    verb = arguments.get("command") if isinstance(arguments.get("command"), str) else ""
    for key in _PATH_KEYS:
        path = arguments.get(key)
        if isinstance(path, str) and 0 < len(path) <= _LONGEST and "\n" not in path:
            looks = verb in _LOOKS or not _WRITES.search(f"{call.name} {verb}")
            yield without_markup(path), not looks


def _spoken(messages: Iterable[Said]) -> Iterator[str]:
    """The sentences of the assistant, outside of code."""
    for message in messages:
        if message.role != "assistant":
            continue
        fenced = False
        for line in message.text.split("\n"):
            if _FENCE.match(line):
                fenced = not fenced
            elif not fenced:
                bare = _MARKS.sub("", line[:4000])
                yield from (
                    _clean(part, _LONGEST)
                    for part in _SENTENCE.split(bare)
                    if len(part.strip()) >= _LEAST_SENTENCE and not part.rstrip().endswith(":")
                )


def _chosen(texts: Sequence[str]) -> list[str]:
    """Texts in the order of their worth; of equal ones the last stands for all."""
    unique = list(dict.fromkeys(reversed(texts)))[::-1]
    return [unique[at] for at in ranked(unique, _MOST)]


def _clean(text: str, limit: int) -> str:
    """One line without markup, of at most `limit` bytes."""
    line = " ".join(without_markup(text[: limit * 4]).split())
    return line if len(line.encode()) <= limit else f"{head_of(line, limit - 4).rstrip()} ..."
