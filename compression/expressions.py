"""Regular expressions that an operator writes, matched in time linear in the text.

They run on the head of prompts in a process that serves everybody, so that no text, however unlucky, may
take long. RE2 keeps that promise for every expression it takes; a backtracking engine keeps it for none.
What cannot be had in linear time (look-around, back-references) is refused when the expression is read.
Pure; the engine is loaded with the first expression.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST: Final = 512  # characters of an expression
MOST_MATCHES: Final = 256
"""Matches in one text: each may look at all of the text behind it, so that their number is bounded too."""
_MEMORY: Final = 2**20  # bytes for the expression and what its automaton remembers
_LARGEST: Final = 4096  # instructions: where the automaton runs out of memory, time grows with these
_LINES: Final = "(?m)"  # `^` and `$` are the ends of lines
_VALUE: Final = "value"

# RE2 reads these as plain text and other engines as a repetition: neither reading is meant for certain.
_NO_BOUND: Final = re.compile(r"(?<!\\)(?:\\\\)*\{(?:,\d*|\d{5,}(?:,\d*)?|\d+,\d{5,})\}")
_ADVICE: Final = (
    (r"\(\?<?[=!]|\(\?<$", "it has no look-around. Match the words around as well, and name the part meant"),
    (r"\(\?P|\\[1-9]", "it has no back-references, and names groups `(?P<name>...)`"),
    (r"\(\?>", "it has no atomic groups, and needs none: it never goes back"),
    (r"operator: [*+?}{,\d]{2,}$", "it has no possessive and no doubled repetitions"),
    (r"\(\?[a-zA-Z-]", "its flags are `i`, `m`, `s` and `U`; there is no verbose mode"),
    (r"\\Z", r"the end of the text is `\z`"),
    (r"\\[uUN]", r"a character by its number is `\x{263A}`"),
    (r"repetition size", "a repetition has at most 1,000 rounds, nested ones multiplied"),
)


class BadExpression(ValueError):
    """A text that is no expression of this kind, or too costly a one; says why, and what to write instead."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression, known by its text."""

    pattern: str
    _engine: Any = field(repr=False, compare=False)
    _group: int = field(default=0, repr=False, compare=False)

    @classmethod
    def compile(cls, pattern: str) -> Expression:
        """The expression of a text in RE2's syntax. Raises `BadExpression`."""
        if len(pattern) > LONGEST:
            raise BadExpression(f"is longer than {LONGEST} characters")
        if _NO_BOUND.search(pattern):
            raise BadExpression("has a repetition that is none: write {0,n}, with an n of at most 1000")
        return _compiled(pattern)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of what each match means, in characters: its group `value`, else all of it.

        Empty ones are left out. Only the first `MOST_MATCHES` matches are looked at.
        """
        try:
            text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, which UTF-8 has no form for
            text = text.encode("utf-8", "replace").decode()
        for match in islice(self._engine.finditer(text), MOST_MATCHES):
            start, end = match.span(self._group)
            if start < end:
                yield start, end


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Expression:
    import re2  # noqa: PLC0415 - only configurations with expressions need it

    options = re2.Options()
    options.max_mem = _MEMORY
    options.log_errors = False  # they would quote the configuration on the error output
    try:
        engine = re2.compile(_LINES + pattern, options)
    except re2.error as error:
        raise BadExpression(f"is no regular expression of RE2: {_reason(error)}") from None
    except UnicodeEncodeError:
        raise BadExpression("is no regular expression of RE2: half a surrogate pair") from None
    if engine.programsize > _LARGEST:
        raise BadExpression("is too large: it repeats too much, too often")
    if engine.search("") is not None:
        raise BadExpression("matches the empty text, so it would match everywhere")
    return Expression(pattern, engine, engine.groupindex.get(_VALUE, 0))


def _reason(error: Exception) -> str:
    """RE2's words, and what to do about the usual ones."""
    said = error.args[0] if error.args else ""
    words = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
    words = words.replace(_LINES, "", 1)
    hint = next((hint for form, hint in _ADVICE if re.search(form, words)), None)
    return words if hint is None else f"{words}; {hint}"
