"""Whether the ledger's file is still the one that was opened.

SQLite goes on writing to a file that was deleted or replaced, without an error: those rows are gone
with the process.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)


class FileWatch:
    """Compares what lies under a path now with what lay there at the start."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where nothing lies there."""
        self._path = path
        self._opened = _identity(path)
        self.lost = False

    def check(self) -> None:
        """Look again; a change is logged once."""
        try:
            lost = _identity(self._path) != self._opened
        except (FileNotFoundError, NotADirectoryError):
            lost = True
        except OSError:  # it cannot be seen now, as in a hiccup of the file system: that says nothing
            return
        if lost and not self.lost:
            log.critical(
                "%s was deleted or replaced: no writes until that file is back or the gateway restarts",
                self._path,
            )
        elif self.lost and not lost:
            log.warning("%s is back", self._path)
        self.lost = lost


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
