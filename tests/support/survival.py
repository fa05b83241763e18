"""How many exact strings of dropped messages are still in a prompt, or come back by one recall.

    found = survival(dropped, prompt_text(messages), recall=lambda query: texts_of_the_five_best(query))
    assert found["rule"].share_in_prompt == 1
    assert found["path"].share >= 0.9

What counts as an exact string is said twice: by `compression.identifiers.found_in`, and by `plain_strings`,
a few lines that share nothing with it, so that a gap in the one does not hide a loss.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.identifiers import IdentifierKind, found_in
from ctxgate.compression.said import read_said
from ctxgate.compression.summary import is_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import msgspec

    Recall = Callable[[str], str]
    """From a query to the texts of the best passages, joined."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Of `total` different strings, how many stand in the prompt, and how many others one recall brings."""

    total: int
    in_prompt: int
    recalled: int
    lost: tuple[str, ...]

    @property
    def share_in_prompt(self) -> float:
        return self.in_prompt / self.total if self.total else 1.0

    @property
    def share(self) -> float:
        """In the prompt or recalled; 1 where there is nothing that could be lost."""
        return (self.in_prompt + self.recalled) / self.total if self.total else 1.0

    def __str__(self) -> str:
        return f"{self.in_prompt} + {self.recalled} of {self.total} ({self.share:.1%})"


def survival(
    dropped: Iterable[bytes | msgspec.Raw], prompt: str, recall: Recall | None = None
) -> dict[str, Rate]:
    """The rates of every kind of `found_in`, by the kind's name."""
    return rates(strings(dropped), prompt, recall)


def plain_survival(
    dropped: Iterable[bytes | msgspec.Raw], prompt: str, recall: Recall | None = None
) -> dict[str, Rate]:
    """The rates of the kinds of `plain_strings`."""
    return rates(plain_strings(dropped), prompt, recall)


def rates(wanted: Mapping[str, Iterable[str]], prompt: str, recall: Recall | None = None) -> dict[str, Rate]:
    """The rate of each kind; a string of several lines is looked for whatever its indentation."""
    flat = _flat(prompt)
    found: dict[str, Rate] = {}
    for kind, texts in wanted.items():
        every = list(dict.fromkeys(texts))
        missing = [text for text in every if text not in prompt and _flat(text) not in flat]
        lost = missing if recall is None else [text for text in missing if not _brings(recall, text)]
        found[kind] = Rate(len(every), len(every) - len(missing), len(missing) - len(lost), tuple(lost))
    return found


def strings(messages: Iterable[bytes | msgspec.Raw]) -> dict[str, list[str]]:
    """The exact strings of messages by kind, as `found_in` defines them; a record is no source."""
    wanted: dict[str, list[str]] = {kind.value: [] for kind in IdentifierKind}
    for raw in messages:
        for kind, text in _strings(bytes(raw)):
            wanted[kind].append(text)
    return wanted


@lru_cache(2**14)  # a session is measured at one compaction after the other
def _strings(raw: bytes) -> tuple[tuple[str, str], ...]:
    said = read_said(raw)
    return () if is_record(said.text) else tuple((each.kind.value, each.text) for each in found_in(said))


def prompt_text(messages: Iterable[bytes | msgspec.Raw]) -> str:
    """What a model reads of messages: their texts, and the values of their calls' arguments."""
    parts: list[str] = []
    for said in map(read_said, messages):
        parts.append(said.text)
        for call in said.calls:
            parts += [call.name, call.arguments, *_values(call.arguments)]
    return "\n".join(parts)


_PLAIN_PATH: Final = re.compile(r"(?<![\w/.-])(?:/[\w.@-]+){2,}\.\w{1,6}\b")
_PLAIN_ERROR: Final = re.compile(
    r"^\s*(?:(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception)|Error|error|ERROR|fatal|FAILED)\b[:\[ ].*$"
    r"|^.*(?:No such file or directory|command not found|with code [1-9]).*$",
    re.MULTILINE,
)
_PLAIN_RULE: Final = re.compile(r"[^.!?\n]*\b(?:[Nn]ever|[Aa]lways|[Dd]o not|[Dd]on't|[Mm]ust)\b[^.!?\n]*")


def plain_strings(messages: Iterable[bytes | msgspec.Raw]) -> dict[str, list[str]]:
    """Exact strings by plain definitions of their own.

    Absolute paths with an extension, `command` arguments of one short line, lines of tool results that
    begin like an error (not with a member of that name, as in source code) or tell of a failure, orders of
    the user.
    """
    wanted: dict[str, list[str]] = {"path": [], "command": [], "error": [], "rule": []}
    for raw in messages:
        message: dict[str, Any] = json.loads(bytes(raw))
        content = message.get("content")
        text = content if isinstance(content, str) else ""
        wanted["path"] += _PLAIN_PATH.findall(text)
        if message["role"] == "tool":
            wanted["error"] += [line.strip()[:300] for line in _PLAIN_ERROR.findall(text)]
        if message["role"] == "user" and "```" not in text:
            wanted["rule"] += [rule.strip() for rule in _PLAIN_RULE.findall(text)]
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            command = arguments.get("command") if isinstance(arguments, dict) else None
            if isinstance(command, str) and "\n" not in command and " " in command and len(command) <= 300:
                wanted["command"].append(command.strip())
    return wanted


def future_need(
    dropped: Sequence[bytes | msgspec.Raw], later: Iterable[bytes | msgspec.Raw]
) -> dict[str, list[str]]:
    """The exact strings of dropped messages that later assistant messages name, by kind."""
    said = "\n".join(prompt_text([raw]) for raw in later if json.loads(bytes(raw)).get("role") == "assistant")
    return {
        kind: [text for text in dict.fromkeys(texts) if text in said]
        for kind, texts in strings(dropped).items()
    }


def _brings(recall: Recall, text: str) -> bool:
    found = recall(text)
    return text in found or _flat(text) in _flat(found)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _values(arguments: str) -> list[str]:
    try:
        value: Any = json.loads(arguments)
    except ValueError:
        return []
    stack, found = [value], []
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict):
            stack += each.values()
        elif isinstance(each, list):
            stack += each
    return found
