"""The thread of the recall process that embeds: questions first, then windows in small batches."""

from __future__ import annotations

import logging
import threading
from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.recall_index import RecallIndex
from ctxgate.gateway import recall_dense

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_WAITING: Final = 60_000  # windows: some 30 MB of text, which takes half an hour
_BATCH: Final = 1_500  # characters that are embedded at a time: what a question may have to wait for

log = logging.getLogger(__name__)


class Conversation:
    """The index of a conversation, and its vectors as far as they are made."""

    def __init__(self) -> None:
        self.index = RecallIndex()
        self.vectors = recall_dense.Vectors()

    @property
    def size(self) -> int:
        """Bytes of memory, roughly."""
        return self.index.size + self.vectors.size


class Embedding:
    """A thread that embeds: questions first, then windows in small batches.

    `make` loads the model; where that or its use fails, nothing is embedded and the failure is logged.
    Windows that come while `most` of them wait are not embedded.
    """

    def __init__(self, make: Callable[[], Any], most: int = MOST_WAITING) -> None:
        self._make = make
        self._most = most
        self._change = threading.Condition()
        self._windows: deque[tuple[Conversation, int, str]] = deque()
        self._questions: deque[tuple[str, list[Any], threading.Event]] = deque()
        self._stopped = False
        self.broken = False
        self._thread = threading.Thread(target=self._run, name="embedding", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Windows that are not embedded yet."""
        return len(self._windows)

    def add(self, conversation: Conversation, numbers: range, texts: list[str]) -> None:
        """Embed windows sometime."""
        with self._change:
            if not self.broken and len(self._windows) + len(numbers) <= self._most:
                self._windows.extend((conversation, n, text) for n, text in zip(numbers, texts, strict=True))
                self._change.notify()

    def vector(self, question: str, within_s: float) -> Any | None:
        """The vector of a question, or None where it is not made in time."""
        found: list[Any] = []
        done = threading.Event()
        with self._change:
            if self.broken or within_s <= 0:
                return None
            self._questions.append((question, found, done))
            self._change.notify()
        done.wait(within_s)
        return found[0] if found else None

    def forget(self, conversations: list[Conversation]) -> None:
        """Embed nothing more of these."""
        gone = set(map(id, conversations))
        with self._change:
            self._windows = deque(each for each in self._windows if id(each[0]) not in gone)

    def join(self, timeout_s: float) -> None:
        """Wait until nothing is embedded any more, because the model failed."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            embedder = self._make()
        except Exception:  # whatever the model's failure, terms alone still answer
            log.exception("the model cannot be loaded: nothing is embedded")
        else:
            self._embed(embedder)
        with self._change:
            self.broken = True
            self._windows.clear()

    def _embed(self, embedder: Any) -> None:
        try:
            while True:
                self._step(embedder)
        except Exception as error:  # noqa: BLE001 - as above; its text is not logged: it may quote a prompt
            log.error("the model failed: nothing is embedded from now on: %s", type(error).__name__)

    def _step(self, embedder: Any) -> None:
        with self._change:
            self._change.wait_for(lambda: self._questions or self._windows)
            question = self._questions.popleft() if self._questions else None
            batch = [] if question is not None else self._batch()
        if question is not None:
            text, found, done = question
            found.append(embedder.embedded([text]))
            done.set()
            return
        vectors = embedder.embedded([text for _, _, text in batch])
        at = 0
        for conversation, group in groupby(batch, key=lambda each: each[0]):
            numbers = [number for _, number, _ in group]
            conversation.vectors.add(numbers, vectors[at : at + len(numbers)])
            at += len(numbers)

    def _batch(self) -> list[tuple[Conversation, int, str]]:
        batch = [self._windows.popleft()]
        size = len(batch[0][2])
        while self._windows and size + len(self._windows[0][2]) <= _BATCH:
            batch.append(self._windows.popleft())
            size += len(batch[-1][2])
        return batch
