"""Fail on what must not be committed: machine paths, registry hosts, unfinished work, unexplained ignores."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from tree import ROOT, project_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Rule(NamedTuple):
    """A pattern that no line may match; `tests` says whether tests are held to it too."""

    pattern: re.Pattern[str]
    message: str
    tests: bool = True


RULES: Final = (
    Rule(re.compile(r"(?<![\w.~-])/(?:home|root|Users)/\w"), "a path of somebody's machine", tests=False),
    Rule(re.compile(r"(?<![\w.~-])/tmp/\w"), "a fixed scratch path; use tempfile", tests=False),
    Rule(re.compile(r"pypi\.org|pythonhosted\.org|npmjs\.org"), "a package registry's host"),
    Rule(re.compile(r"\b(?:TODO|FIXME|XXX)\b"), "unfinished work; finish it or open an issue"),
    Rule(re.compile(r"#\s*noqa:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*\s*$"), "a lint exception without its reason"),
    Rule(
        re.compile(r"#\s*(?:type|pyright):\s*ignore\[[\w, -]+\]\s*$"),
        "an ignored type error without its reason",
    ),
)

# Data, and this file, which spells the words it looks for.
_SKIPPED_NAMES: Final = frozenset({"tokenizer.json", "check_words.py"})
_SHORTEST_OWN_PATH: Final = 3  # parts; "/" or "/src" would match too much


def rules() -> tuple[Rule, ...]:
    """The rules, with this checkout's own path among the machine paths where it is specific enough."""
    if len(ROOT.parts) < _SHORTEST_OWN_PATH:
        return RULES
    return (*RULES, Rule(re.compile(re.escape(str(ROOT)) + r"(?![\w-])"), "the path of this checkout"))


def findings(path: Path, checked: tuple[Rule, ...]) -> Iterator[str]:
    """One message per line of `path` that breaks a rule; binary files have none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    name = path.relative_to(ROOT)
    in_tests = name.parts[0] == "tests"
    for number, line in enumerate(text.splitlines(), 1):
        for rule in checked:
            if (rule.tests or not in_tests) and rule.pattern.search(line):
                yield f"{name}:{number}: {rule.message}"


def main() -> int:
    """Check the tree; 1 when something was found."""
    checked = rules()
    files = [path for path in project_files() if path.name not in _SKIPPED_NAMES]
    messages = [message for path in files for message in findings(path, checked)]
    for message in messages:
        print(message)
    print(f"words: {len(files)} files, {len(messages)} findings")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
