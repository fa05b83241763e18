"""Fail when a link between the project's documents leads nowhere."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

from tree import ROOT, project_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+\s+(.+?)\s*$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The names of a document's headings as links spell them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in _HEADING.findall(_FENCE.sub("", text))
    }


def dead_links(path: Path) -> Iterator[str]:
    """One message per relative link of `path` whose file or heading does not exist."""
    text = path.read_text(encoding="utf-8")
    for link in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            yield f"{path.relative_to(ROOT)}: {link}: no such file"
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{path.relative_to(ROOT)}: {link}: no such heading"


def main() -> int:
    """Check every Markdown file; 1 when a link is dead."""
    files = [path for path in project_files() if path.suffix == ".md"]
    messages = [message for path in files for message in dead_links(path)]
    for message in messages:
        print(message)
    print(f"docs: {len(files)} documents, {len(messages)} dead links")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
