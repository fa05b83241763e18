"""YAML with positions: every value knows its line, column and dotted field; problems are collected.

Built on PyYAML's safe composer, which stops at nodes: no tag ever constructs an object, and a
scalar keeps the characters that were written. Texts of problems never repeat a value of the file.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STR: Final = "tag:yaml.org,2002:str"
NULL: Final = "tag:yaml.org,2002:null"
BOOL: Final = "tag:yaml.org,2002:bool"
INT: Final = "tag:yaml.org,2002:int"
MERGE: Final = "tag:yaml.org,2002:merge"

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+-]{0,63}")
_SECRET_PREFIX: Final = re.compile(
    r"(?:cg|sk|pk|rk|gsk|hf|xai|ghp|gho|github|glpat|xox.|AKIA|eyJ|Bearer)[-_ A-Za-z0-9]"
)
_LONG_RUN: Final = re.compile(r"[A-Za-z0-9]{20,}")
_QUOTED: Final = re.compile(r"'(?!<)(?:[^'\\]|\\.){2,}'|\"(?:[^\"\\]|\\.){2,}\"")


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing to mend. Line and column count from 1; `field` is the dotted path, "" for the whole file.

    Line 0 stands for a file that cannot be read at all.
    """

    file: str
    line: int
    column: int
    field: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}: " if self.line else f"{self.file}: "
        return where + (f"{self.field}: {self.message}" if self.field else self.message)


class ConfigError(ValueError):
    """A configuration that cannot be used; `problems` holds everything that was found, by position."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class Unreadable(Exception):
    """A value was reported as a problem and has no reading; its container goes on with the next one."""


@dataclass(slots=True)
class Report:
    """Collects the problems and warnings of one file."""

    file: str
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """A node of the file, the dotted path that leads to it, and the report it answers to."""

    node: yaml.Node
    path: str
    report: Report
    key: yaml.Node | None = None  # the key in front of the node: where something absent is reported

    @property
    def line(self) -> int:
        """The line of the node, from 1."""
        return int(self.node.start_mark.line) + 1

    def problem(self, message: str, *, at: yaml.Node | None = None, path: str | None = None) -> Problem:
        """A problem here, or at another node of the same file."""
        mark = (at or self.node).start_mark
        return Problem(
            self.report.file, mark.line + 1, mark.column + 1, self.path if path is None else path, message
        )

    def complain(self, message: str, *, at: yaml.Node | None = None, path: str | None = None) -> None:
        """Report a problem and go on."""
        self.report.problems.append(self.problem(message, at=at, path=path))

    def warn(self, message: str) -> None:
        """Report something that works but is probably not meant."""
        self.report.warnings.append(self.problem(message, at=self.key))

    def fail(self, message: str) -> NoReturn:
        """Report a problem and give this value up."""
        self.complain(message)
        raise Unreadable

    def inside(self, name: str) -> str:
        """The path of a field below this place."""
        shown = label(name)
        if "." in shown:
            shown = f'"{shown}"'
        return f"{self.path}.{shown}" if self.path else shown

    def members(self) -> Iterator[tuple[str, Place]]:
        """The entries of a mapping; keys that are repeated or not text are reported and left out."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"must be a mapping, not {describe(self.node)}")
        seen: dict[str, int] = {}
        for key, value in self.node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != STR:
                self._refuse_key(key)
                continue
            path = self.inside(key.value)
            if key.value in seen:
                self.complain(f"appears twice; the first is on line {seen[key.value]}", at=key, path=path)
                continue
            seen[key.value] = key.start_mark.line + 1
            yield key.value, Place(value, path, self.report, key)

    def items(self) -> Iterator[Place]:
        """The entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail(f"must be a list, not {describe(self.node)}")
        for index, value in enumerate(self.node.value):
            yield Place(value, f"{self.path}[{index}]", self.report)

    def _refuse_key(self, key: yaml.Node) -> None:
        if key.tag == MERGE:
            self.complain("merge keys (<<) are not supported; an alias (*name) for a whole value is", at=key)
        else:
            self.complain(f"a name must be text, not {describe(key)}; put it in quotes", at=key)


def compose(text: str, file: str) -> Place:
    """The root of one YAML document.

    Raises ConfigError for text that is not a single YAML document.
    """
    report = Report(file)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise ConfigError([Problem(file, line, column, "", f"not valid YAML: {_reason(error)}")]) from None
    except yaml.reader.ReaderError as error:
        before = text[: int(error.position)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise ConfigError(
            [Problem(file, line, column, "", "has a character that YAML does not allow")]
        ) from None
    except RecursionError:
        raise ConfigError([Problem(file, 1, 1, "", "is nested too deeply")]) from None
    except (yaml.YAMLError, ValueError, OverflowError):  # numbers in escapes and directives that overflow
        raise ConfigError(
            [Problem(file, 1, 1, "", "not valid YAML: an escape or directive is malformed")]
        ) from None
    if node is None:
        raise ConfigError([Problem(file, 1, 1, "", "is empty")])
    return Place(node, "", report)


def looks_like_secret(text: str) -> bool:
    """Whether a text has the form of a credential, by its prefix or by a long run of mixed characters."""
    if len(text) >= 20 and _SECRET_PREFIX.match(text):
        return True
    runs = _LONG_RUN.findall(text)
    return any(re.search("[0-9]", run) and re.search("[A-Za-z]", run) for run in runs)


def label(name: str) -> str:
    """A name of the file as problems may show it: names of credential form are only measured."""
    if _PLAIN_NAME.fullmatch(name) and not looks_like_secret(name):
        return name
    return f"<{len(name)} characters>"


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` where a known name is close, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {label(close[0])}?" if close else ""


def describe(node: yaml.Node) -> str:
    """What a node is, in words, without its value."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if node.tag == NULL:
        return "empty"
    if node.tag == STR:
        return "text"
    if node.tag == BOOL:
        return "true or false"
    kinds = {"int": "a number", "float": "a number", "timestamp": "a date"}
    return kinds.get(node.tag.rpartition(":")[2], "a value of another type")


_OPENED: Final = {
    "while parsing a flow mapping": ("{", "}"),
    "while parsing a flow sequence": ("[", "]"),
}


def _reason(error: yaml.MarkedYAMLError) -> str:
    """Plain words for common slips, else PyYAML's without the pieces of the file that they quote."""
    problem = error.problem or ""
    if problem.startswith("found character '\\t'"):
        return "a tab stands where only spaces may; indent with spaces"
    if error.context in _OPENED and error.context_mark and problem.startswith("expected ','"):
        opening, closing = _OPENED[error.context]
        line = error.context_mark.line + 1
        return (
            f"the {opening} of line {line} is not closed: a comma or {closing} is missing before this place"
        )
    if error.context == "while scanning a quoted scalar" and error.context_mark:
        return f"the quoted text that begins on line {error.context_mark.line + 1} is not closed"
    if problem == "mapping values are not allowed here":
        return (
            "a name and its value cannot stand here: the line is indented too deep, or a text with a colon "
            "is not in quotes"
        )
    if problem.startswith("expected <block end>") and error.context_mark:
        return _misplaced(error.context_mark, of_list=error.context == "while parsing a block collection")
    words = "; ".join(part for part in (error.context, error.problem) if part)
    return _QUOTED.sub("(...)", words) or "syntax error"


def _misplaced(begins: yaml.Mark, *, of_list: bool) -> str:
    """Where the entries of a mapping or list stand that a line is indented out of."""
    line, column = begins.line + 1, begins.column + 1
    if of_list:
        return f"each entry of the list that begins on line {line} starts with '- ' in column {column}"
    return (
        f"this line begins in no column where one may: the entries beside it, from line {line} on, begin "
        f"in column {column}"
    )
