"""Fail when a module has more than 400 lines or a function more than 50; the bench is excepted."""

from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING, Final

from tree import ROOT, python_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODULE_LINES: Final = 400
FUNCTION_LINES: Final = 50


def oversized(path: Path) -> Iterator[str]:
    """One message for the module and one for each function of `path` that is too long."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    lines = len(source.splitlines())
    if lines > MODULE_LINES:
        yield f"{name}: {lines} lines, at most {MODULE_LINES}"
    for node in ast.walk(ast.parse(source, str(name))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def main() -> int:
    """Check the tree; 1 when something is too long."""
    bench = ROOT / "tests" / "bench"
    files = [path for path in python_files() if not path.is_relative_to(bench)]
    messages = [message for path in files for message in oversized(path)]
    for message in messages:
        print(message)
    print(f"sizes: {len(files)} modules, {len(messages)} too long")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
