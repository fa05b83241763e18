"""A recall process inside the test: the real indexes behind the messages that the gateway sends."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctxgate.gateway.archive import Deleted, Original
from ctxgate.gateway.recall_wire import Add, Ask, Forget, Told
from ctxgate.gateway.recall_worker import Inbox, Indexes, serve

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MESSAGES = {
    "a" * 24: {"role": "user", "content": "Please never touch the billing tables of the ledger."},
    "b" * 24: {"role": "tool", "tool_call_id": "c1", "content": "src/gate/main.py: listening on port 8421"},
    "c" * 24: {"role": "assistant", "content": "The deploy key of the mirror is d56a046e, as agreed."},
}
ORIGINALS = {id_: json.dumps(message).encode() for id_, message in MESSAGES.items()}


@dataclass
class NearProcess:
    """Answers at once, by `Indexes`. `dies` forgets everything, as a process that is started again does."""

    indexes: Indexes = field(default_factory=Indexes)
    starts: int = 0
    sent: list[Add | Forget] = field(default_factory=list)
    answers: bool = True
    closed: bool = False

    def send(self, message: Add | Forget) -> None:
        self.starts = max(self.starts, 1)
        self.sent.append(message)
        inbox = Inbox()
        inbox.put(message)
        work(inbox, self.indexes)

    async def room(self) -> None:
        pass

    async def ask(
        self,
        conversation: bytes,
        text: str,
        count: int,
        within_s: float,
        among: frozenset[str] | None = None,
    ) -> Told | None:
        if not self.answers:
            return None
        return self.indexes.answer(Ask(0, conversation, text, count, within_s, among), 0.0)

    async def close(self) -> None:
        self.closed = True

    def dies(self) -> None:
        self.indexes = Indexes()
        self.starts += 1


def work(inbox: Inbox, indexes: Indexes) -> list[Told]:
    """Do everything that is in the inbox; what was told."""
    told: list[Told] = []
    inbox.finish()
    serve(inbox, indexes, told.append)
    return told


@dataclass
class Shelf:
    """An archive in memory for one tenant's conversation; `fails` is raised by every method."""

    kept: dict[str, bytes] = field(default_factory=lambda: dict(ORIGINALS))
    fails: Exception | None = None
    read: int = 0

    async def keep(
        self,
        tenant: str,
        task: str,
        items: Mapping[str, bytes],
        now_us: int,
        conversation: bytes = b"",
        *,
        forms: Collection[bytes] = (),
        since_us: int | None = None,
    ) -> bool:
        self.kept |= items
        return True

    async def get(self, tenant: str, id_: str) -> bytes | None:
        self._check()
        return self.kept.get(id_)

    async def of_conversation(self, tenant: str, conversation: bytes) -> list[Original]:
        self._check()
        self.read += 1
        return [Original(id_, body) for id_, body in self.kept.items()]

    async def delete(self, tenant: str, task: str, now_us: int) -> Deleted:
        count = len(self.kept)
        self.kept.clear()
        return Deleted(count, ())

    async def expire(self, kept_before_us: int, limit: int) -> int:
        return 0

    def _check(self) -> None:
        if self.fails is not None:
            raise self.fails
