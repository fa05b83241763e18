"""The question that the last message of a prompt puts to what was dropped."""

from __future__ import annotations

from typing import Final

from ctxgate.compression.error_lines import is_error

LONGEST: Final = 2_000
"""Characters of a message that are looked at: its beginning, its errors, its end."""

MEANING: Final = 1_000
"""Characters whose meaning is looked at."""

_HEAD, _ERRORS, _TAIL = LONGEST // 2, LONGEST // 4, LONGEST // 4


def question_of(text: str) -> str:
    """A message cut down to what it is likely about."""
    if len(text) <= LONGEST:
        return text
    head, middle, tail = text[:_HEAD], text[_HEAD:-_TAIL], text[-_TAIL:]
    errors: list[str] = []
    room = _ERRORS
    for line in middle.split("\n"):
        if len(line) < room and is_error(line):
            errors.append(line.strip())
            room -= len(line) + 1
    return "\n".join([head, *errors, tail])


def meaning_of(text: str) -> str:
    """What of a message is embedded: one idea, not a whole file."""
    return text if len(text) <= MEANING else text[: MEANING // 2] + "\n" + text[-MEANING // 2 :]
