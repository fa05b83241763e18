"""Which gateway processes are alive: one lock file each, held until the process ends.

The kernel drops an advisory lock with its process, however that dies, so a lock that can be taken
names a dead process; a reused process id cannot fool it. Files lie in `<database>.locks/`.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SETUP: Final = ".setup"  # taken, briefly, to start, stop and recover


class Incarnation:
    """This process's life, as other processes of the same machine see it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._threads = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._setup = _lock_file(folder / _SETUP)
        with self.exclusively():
            self._held: int | None = _lock_file(folder / name)
            fcntl.flock(self._held, fcntl.LOCK_EX)

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep other processes from starting, stopping or recovering meanwhile; blocks."""
        with self._threads:  # a file lock does not keep threads of one process apart
            fcntl.flock(self._setup, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._setup, fcntl.LOCK_UN)

    def is_dead(self, name: str) -> bool:
        """Whether the process of that name has ended. Call under `exclusively`."""
        if name == self.name:
            return False
        try:
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def dead(self) -> list[str]:
        """Dead processes that left their lock file. Call under `exclusively`."""
        names = sorted(path.name for path in self.folder.iterdir() if path.name != _SETUP)
        return [name for name in names if self.is_dead(name)]

    def forget(self, name: str) -> None:
        """Remove a dead process's lock file. Call under `exclusively`."""
        (self.folder / name).unlink(missing_ok=True)

    def end(self) -> None:
        """Give this process's own lock up, as a clean stop does. Idempotent."""
        if self._held is None:
            return
        with self.exclusively():
            self.forget(self.name)
            os.close(self._held)
        self._held = None
        os.close(self._setup)


def _lock_file(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
