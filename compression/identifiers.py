"""The exact strings of a conversation, collected by code: what a summary in prose loses.

Paths, shell commands, numbers with units, URLs, ids, error lines, and the user's rules word for word.
`found_in` reads one message (and can be remembered for it), `collected` puts messages together and ranks
what they hold, `block` writes what fits a budget. All of it is linear in the text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression import identifier_patterns as patterns
from ctxgate.compression.error_lines import LOOKED_AT, is_error, same_kind
from ctxgate.compression.identifier_ranking import best_first
from ctxgate.compression.identifier_types import Found, Identifier, IdentifierKind
from ctxgate.compression.user_rules import user_rules

__all__ = (
    "TITLE",
    "Block",
    "Found",
    "Identifier",
    "IdentifierKind",
    "block",
    "collected",
    "commands",
    "error_lines",
    "estimated_tokens",
    "found_in",
    "readable",
    "rules_block",
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ctxgate.compression.said import Call, Said


@dataclass(frozen=True, slots=True)
class Block:
    """The written block, empty if there was nothing to write, and how many strings found no room in it."""

    text: str
    left_out: int


TITLE: Final = "Exact strings from the messages above this point (collected by code, verbatim):"
_HEADINGS: Final = {
    IdentifierKind.RULE: "What the user asked to hold:",
    IdentifierKind.ERROR: "Errors that were reported:",
    IdentifierKind.COMMAND: "Commands that were run:",
    IdentifierKind.PATH: "Paths:",
    IdentifierKind.URL: "URLs:",
    IdentifierKind.ID: "Ids:",
    IdentifierKind.NUMBER: "Numbers:",
}
_LONGEST_COMMAND: Final = 400
_COMMAND_KEYS: Final = frozenset({"command", "cmd", "script", "commands", "shell_command", "code", "bash"})
_ID_KEY: Final = re.compile(r"(?:^|_)(?:id|ids|key|uuid|sha|hash|number|ref|code)$|Id$", re.IGNORECASE)
_PROMPT: Final = re.compile(r"^\s{0,4}(?:\$|%|\u276f|\u279c) +(\S.{1,300})$", re.MULTILINE)
_MISSES: Final = 20  # strings too long for what is left, after which no shorter one is looked for
_LEAST: Final = 3  # characters; shorter strings are found everywhere

# What a block has room for, in parts of what the rules leave: a kind that needs less leaves it to the others.
_SHARES: Final = {
    IdentifierKind.ERROR: 3,
    IdentifierKind.COMMAND: 5,
    IdentifierKind.PATH: 10,
    IdentifierKind.URL: 1,
    IdentifierKind.ID: 2,
    IdentifierKind.NUMBER: 1,
}


def estimated_tokens(text: str) -> int:
    """Tokens of exact strings, estimated from above: three bytes each."""
    return -(-len(text.encode()) // 3)


def found_in(said: Said) -> tuple[Found, ...]:
    """The exact strings of one message, each once, in the order of their first place."""
    found: dict[tuple[IdentifierKind, str], bool] = {}

    def add(kind: IdentifierKind, texts: Iterable[str], told: bool) -> None:
        for text in texts:
            if len(text) >= _LEAST:
                key = (kind, text)
                found[key] = found.get(key, False) or told

    told = said.role == "user"
    if told:
        add(IdentifierKind.RULE, user_rules(said.text), told=True)
    if said.role in ("user", "tool"):
        add(IdentifierKind.ERROR, error_lines(said.text), told)
    if said.role in ("user", "assistant"):
        add(IdentifierKind.COMMAND, (each.strip() for each in _PROMPT.findall(said.text)), told)
    for text, by_call in [(said.text, told), *((readable(call), True) for call in said.calls)]:
        add(IdentifierKind.URL, patterns.urls(text), by_call)
        add(IdentifierKind.PATH, patterns.paths(text), by_call)
        add(IdentifierKind.ID, patterns.ids(text), by_call)
        add(IdentifierKind.NUMBER, patterns.numbers(text), by_call)
    for call in said.calls:
        add(IdentifierKind.COMMAND, commands(call), told=True)
        add(IdentifierKind.ID, _id_arguments(call), told=True)
    return tuple(Found(kind, text, by) for (kind, text), by in found.items())


def collected(messages: Iterable[tuple[int, Iterable[Found]]]) -> list[Identifier]:
    """The exact strings of the messages, each with its index, best first within each kind.

    Better is what stands in later messages and in more of them, what the user or a call named, and what
    takes less room; a string that holds others counts for them, and they come behind it. Of errors that
    differ in numbers only, one comes before the second of any other. Rules stand in the order in which
    they were given.
    """
    merged: dict[tuple[IdentifierKind, str], tuple[int, int, bool]] = {}
    latest = 0
    for at, found in messages:
        latest = max(latest, at)
        for each in found:
            key = (each.kind, each.text)
            count, _, told = merged.get(key, (0, 0, False))
            merged[key] = (count + 1, at, told or each.told)
    by_kind: dict[IdentifierKind, list[Identifier]] = {kind: [] for kind in IdentifierKind}
    for (kind, text), (count, last, told) in merged.items():
        by_kind[kind].append(Identifier(kind, text, count, last, told))
    for kind in _SHARES:
        by_kind[kind] = best_first(by_kind[kind], latest)
    by_kind[IdentifierKind.ERROR] = _varied(by_kind[IdentifierKind.ERROR])
    return [each for identifiers in by_kind.values() for each in identifiers]


def block(
    identifiers: Iterable[Identifier],
    budget: int,
    tokens_of: Callable[[str], int] = estimated_tokens,
    *,
    already: str = "",
) -> Block:
    """Write the identifiers within `budget` tokens, rules always and whatever the budget.

    A string that stands inside another one that was written, or inside `already`, is not written again.
    """
    by_kind: dict[IdentifierKind, list[str]] = {kind: [] for kind in IdentifierKind}
    for each in identifiers:
        if each.text not in already:
            by_kind[each.kind].append(each.text)
    written: dict[IdentifierKind, list[str]] = {kind: [] for kind in IdentifierKind}
    written[IdentifierKind.RULE] = by_kind[IdentifierKind.RULE]
    headings = [_HEADINGS[kind] for kind, texts in by_kind.items() if texts]
    left = budget - tokens_of("\n".join([TITLE, *headings])) - len(headings)
    left -= sum(tokens_of(f"{_line(text)}\n") for text in by_kind[IdentifierKind.RULE])
    filler = _Filler(by_kind, written, tokens_of)
    parts = sum(_SHARES.values())
    for kind, share in _SHARES.items():  # each kind its own share first
        left -= filler.fill(kind, max(left, 0) * share // parts)
        parts -= share
    for kind in _SHARES:  # then what is left over
        left -= filler.fill(kind, max(left, 0))
    sections = [_section(kind, texts) for kind, texts in written.items() if texts]
    return Block("\n".join([TITLE, *sections]) if sections else "", filler.left_out())


def rules_block(identifiers: Iterable[Identifier]) -> str:
    """The user's rules, word for word, under their heading; empty where there are none."""
    rules = [each.text for each in identifiers if each.kind is IdentifierKind.RULE]
    return _section(IdentifierKind.RULE, rules) if rules else ""


def commands(call: Call) -> list[str]:
    """The shell commands of a tool call: what its arguments name so, without the bodies of here-documents."""
    arguments = _arguments(call)
    if not isinstance(arguments, dict):
        return []
    found: list[str] = []
    for name, value in arguments.items():
        if name in _COMMAND_KEYS:
            found += [
                each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)
            ]
    if found and all(len(each.split()) == 1 for each in found) and len(found) > 1:
        found = [" ".join(found)]  # a list of words is one command
    return [_short(each) for each in found if len(each.split()) > 1 or "/" in each]


def error_lines(text: str) -> Iterator[str]:
    """The lines that report errors, without the white space around them."""
    for line in text.split("\n"):
        if is_error(line):
            yield line.strip()[:LOOKED_AT]


class _Filler:
    """Writes the strings of each kind in their order, as far as the tokens given reach."""

    def __init__(
        self,
        waiting: dict[IdentifierKind, list[str]],
        written: dict[IdentifierKind, list[str]],
        tokens_of: Callable[[str], int],
    ) -> None:
        self._waiting = {kind: texts for kind, texts in waiting.items() if kind in _SHARES}
        self._written = written
        self._tokens_of = tokens_of
        self._text = "\n".join(written[IdentifierKind.RULE])

    def fill(self, kind: IdentifierKind, room: int) -> int:
        """Write strings of a kind into `room` tokens. Returns the tokens used."""
        used = 0
        missed: list[str] = []
        texts = iter(self._waiting[kind])
        for text in texts:
            if text in self._text:
                continue
            cost = self._tokens_of(f"{_line(text)}\n")
            if used + cost > room:
                missed.append(text)
                if len(missed) > _MISSES:
                    break
                continue
            used += cost
            self._written[kind].append(text)
            self._text += f"\n{text}"
        self._waiting[kind] = [*missed, *texts]
        return used

    def left_out(self) -> int:
        return sum(map(len, self._waiting.values()))


def _section(kind: IdentifierKind, texts: Iterable[str]) -> str:
    return "\n".join([_HEADINGS[kind], *map(_line, texts)])


def _varied(errors: list[Identifier]) -> list[Identifier]:
    """The same order, but errors of one kind take turns with those of the others."""
    seen: Counter[str] = Counter()
    turns: list[tuple[int, Identifier]] = []
    for each in errors:
        kind = same_kind(each.text)
        turns.append((seen[kind], each))
        seen[kind] += 1
    turns.sort(key=lambda turn: turn[0])
    return [each for _, each in turns]


def _line(text: str) -> str:
    return "- " + text.replace("\n", "\n  ")


def _arguments(call: Call) -> Any:
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None


def readable(call: Call) -> str:
    """The arguments of a call as text without JSON's escapes: only the values, a line each."""
    out: list[str] = []
    stack = [_arguments(call)]
    if stack == [None]:
        return call.arguments
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            out.append(value)
        elif isinstance(value, dict):
            stack.extend(reversed(value.values()))
        elif isinstance(value, list):
            stack.extend(reversed(value))
    return "\n".join(out)


def _id_arguments(call: Call) -> list[str]:
    """Whole values of arguments that are named as ids."""
    arguments = _arguments(call)
    if not isinstance(arguments, dict):
        return []
    return [
        value
        for name, value in arguments.items()
        if isinstance(value, str) and _ID_KEY.search(name) and len(value) <= 80 and " " not in value
    ]


def _short(command: str) -> str:
    """A command as it is, or its first lines where it carries a text along."""
    command = command.strip()
    if len(command) <= _LONGEST_COMMAND:
        return command
    first = command[:_LONGEST_COMMAND]
    return first.rsplit("\n", 1)[0] if "\n" in first else first
