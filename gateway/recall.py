"""Recall: what left a conversation's prompt is searched for what its last message asks, off the event loop.

The archive holds the originals; the recall process holds indexes of them, by conversation and tenant, and
tells places only. What is brought back is read from the archive then, so what was deleted there is gone
here too. After a restart, or when an index had to make room, it is made anew from the archive.

Nothing here makes a request fail or wait beyond the time it gives.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from ctxgate.compression.recall_gate import OPEN, Gate
from ctxgate.compression.recall_index import check_of
from ctxgate.compression.recall_snippet import Passage, Snippet, snippet
from ctxgate.compression.recall_text import searchable
from ctxgate.compression.recent import Recent
from ctxgate.compression.said import read_said
from ctxgate.gateway.ledger import LedgerError
from ctxgate.gateway.recall_wire import Add, Forget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.gateway.archive import Archive, Original
    from ctxgate.gateway.recall_wire import Hit, Told

OUTCOMES: Final = ("recalled", "nothing", "irrelevant", "unknown", "late", "store")
"""What came of a question: a snippet; nothing the prompt does not hold, or no room; nothing relevant
enough; a conversation that is not indexed yet; no answer in time; the archive did not answer."""

_CHUNK: Final = 64 * 2**10  # bytes of messages sent at once: what a question may have to wait behind
_NOT_SENT: Final[tuple[int, frozenset[str]]] = (-1, frozenset())
_LARGE: Final = 64 * 2**10  # bytes of originals that are read in a thread
_REMEMBERED: Final = 200_000  # ids that are known to be sent, of all conversations together

log = logging.getLogger(__name__)


class Process(Protocol):
    """The recall process; see `recall_process.RecallProcess`."""

    starts: int

    def send(self, message: Add | Forget) -> None: ...

    async def room(self) -> None: ...

    async def ask(
        self,
        conversation: bytes,
        text: str,
        count: int,
        within_s: float,
        among: frozenset[str] | None = None,
    ) -> Told | None: ...

    async def close(self) -> None: ...


class Recall:
    """Searches archived conversations. Belongs to one event loop.

    `noted` is called with one of OUTCOMES for every question.
    """

    def __init__(self, archive: Archive, process: Process, noted: Callable[[str], None]) -> None:
        self._archive = archive
        self._process = process
        self._noted = noted
        self._sent: Recent[bytes, tuple[int, frozenset[str]]] = Recent(
            _REMEMBERED, lambda sent: len(sent[1]) + 1
        )
        self._waiting: dict[bytes, tuple[str, bytes]] = {}
        self._indexing: asyncio.Task[None] | None = None
        self._closed = False

    def add(self, tenant: str, conversation: bytes) -> None:
        """Index, in the background, what the archive keeps of a conversation and is not indexed yet."""
        if self._closed:
            return
        self._waiting[_name(tenant, conversation)] = (tenant, conversation)
        if self._indexing is None or self._indexing.done():
            self._indexing = asyncio.get_running_loop().create_task(self._index_waiting())

    async def query(
        self,
        tenant: str,
        conversation: bytes,
        text: str,
        k: int,
        budget_tokens: int,
        within_s: float,
        gate: Gate = OPEN,
    ) -> Snippet | None:
        """What of a conversation's dropped messages bears on a text: at most `k` passages in `budget_tokens`.

        Waits `within_s` at most. None, with the reason counted, where there is nothing that passes the gate.
        """
        deadline = asyncio.get_running_loop().time() + within_s
        name = _name(tenant, conversation)
        if not self._believed(name):
            self.add(tenant, conversation)
        more = k * (1 + len(gate.without))  # the message that asks may fill the first places
        told = await self._process.ask(name, text, more, within_s, gate.among)
        if told is None:
            self._noted("late")
            return None
        if not told.known:
            self._noted("unknown")
            if self._believed(name):  # it had to make room for others
                self._sent.put(name, _NOT_SENT)
                self.add(tenant, conversation)
            return None
        try:
            async with asyncio.timeout_at(deadline):
                hits = [hit for hit in told.hits if gate.quotes(hit.id)][:k]
                passages = await self._passages(tenant, hits)
        except TimeoutError:
            self._noted("late")
            return None
        except LedgerError as error:
            log.warning("nothing is recalled: %s", type(error).__name__)
            self._noted("store")
            return None
        worthy = [passage for passage in passages if gate.passes(passage.text, passage.relevance)]
        found = snippet(worthy, budget_tokens, gate.held)
        self._noted("recalled" if found else "nothing" if worthy else "irrelevant")
        return found

    def _believed(self, name: bytes) -> bool:
        """Whether this life of the process was sent a conversation."""
        life, _ = self._sent.get(name) or _NOT_SENT
        return life == self._process.starts

    def forget(self, tenant: str) -> None:
        """Drop a tenant's indexes; they are made again from what the archive still holds."""
        prefix = _name(tenant, b"")
        self._sent = Recent(_REMEMBERED, lambda sent: len(sent[1]) + 1)
        if self._process.starts:
            self._process.send(Forget(prefix))

    async def close(self) -> None:
        """End the background work and the process."""
        self._closed = True
        if self._indexing is not None:
            self._indexing.cancel()
            await asyncio.gather(self._indexing, return_exceptions=True)
        await self._process.close()

    async def settled(self) -> None:
        """Wait until everything that was to be indexed is on its way to the process."""
        if self._indexing is not None:
            await asyncio.wait((self._indexing,))  # who waits no longer must not end it for all others

    async def _index_waiting(self) -> None:
        while self._waiting:
            name = next(iter(self._waiting))
            tenant, conversation = self._waiting.pop(name)
            try:
                originals = await self._archive.of_conversation(tenant, conversation)
            except LedgerError as error:
                log.warning("a conversation is not indexed: %s", type(error).__name__)
                continue
            await self._send(name, originals)

    async def _send(self, name: bytes, originals: Sequence[Original]) -> None:
        """Hand over what this life of the process has not got yet."""
        life, known = self._sent.get(name) or _NOT_SENT
        begins = life != self._process.starts
        if begins:
            known = frozenset()
        items: list[tuple[str, bytes]] = []
        size = 0
        for id_, body in originals:
            if id_ in known:
                continue
            items.append((id_, body))
            size += len(body)
            if size >= _CHUNK:
                await self._process.room()
                self._process.send(Add(name, items, begins))
                items, size, begins = [], 0, False
                await asyncio.sleep(0)
        if items or begins:
            self._process.send(Add(name, items, begins))
        ids = frozenset(original.id for original in originals)
        self._sent.put(name, (max(self._process.starts, 1), ids | known))

    async def _passages(self, tenant: str, hits: Sequence[Hit]) -> list[Passage]:
        """What stands at the places told. A place in a text that is gone, or another one, is left out."""
        bodies: dict[str, bytes] = {}
        for id_ in dict.fromkeys(hit.id for hit in hits):
            body = await self._archive.get(tenant, id_)
            if body is not None:
                bodies[id_] = body
        if sum(map(len, bodies.values())) > _LARGE:
            return await asyncio.to_thread(_quoted, hits, bodies)
        return _quoted(hits, bodies)


def _quoted(hits: Sequence[Hit], bodies: Mapping[str, bytes]) -> list[Passage]:
    texts: dict[str, tuple[str, str]] = {}
    for id_, body in bodies.items():
        said = read_said(body)
        texts[id_] = (said.role, searchable(said))
    found: list[Passage] = []
    for hit in hits:
        role, text = texts.get(hit.id, ("", ""))
        piece = text[hit.start : hit.stop]
        if piece and check_of(piece) == hit.check:
            found.append(Passage(hit.id, role, hit.start, piece, hit.relevance))
    return found


def _name(tenant: str, conversation: bytes) -> bytes:
    """A conversation of a tenant: no name of a tenant holds a NUL, so that none begins another's."""
    return tenant.encode() + b"\0" + conversation
