"""Conversations over a made-up engine that tells of its cache as the real one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxgate.inference.kv_events import Batch, Removed, Stored
from ctxgate.routing.kv_sessions import Dispatched, KvSessions, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.inference.kv_events import Event

PLACE = ("standard", "standard-0")
BLOCK = 16


def hash_of(tokens: Sequence[int], seed: int = 0) -> int:
    """An engine's hash of the block that these tokens end with: of all of them."""
    return hash((seed, *tokens)) & (2**64 - 1)


class Engine:
    """A cache without bounds that stores prompts and answers and tells of it, as the real one does."""

    def __init__(self, sessions: KvSessions, seed: int = 0) -> None:
        self.sessions = sessions
        self.seed = seed
        self.cached: set[int] = set()
        self.held_back: list[Batch] | None = None

    def read(self, tokens: Sequence[int], session: str | None, prompt: int) -> int:
        """Compute a prompt of `prompt` tokens and its answer behind it; the tokens found."""
        hashes = [hash_of(tokens[:end], self.seed) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        found = 0
        while found < (prompt - 1) // BLOCK and hashes[found] in self.cached:
            found += 1
        in_prompt, computed = prompt // BLOCK, (len(tokens) - 1) // BLOCK
        self.store(hashes, found, in_prompt, session)
        for at in range(in_prompt, computed):
            self.store(hashes, at, at + 1, session)
        return found * BLOCK

    def store(self, hashes: Sequence[int], start: int, end: int, session: str | None) -> None:
        if start < end:
            parent = hashes[start - 1] if start else None
            self.tell(Stored(tuple(hashes[start:end]), parent, BLOCK, "GPU", session))
            self.cached.update(hashes[start:end])

    def evict(self, tokens: Sequence[int], blocks: int) -> None:
        """Drop all blocks of a path behind so many, the last one first."""
        for end in range(len(tokens) // BLOCK, blocks, -1):
            block = hash_of(tokens[: end * BLOCK], self.seed)
            if block in self.cached:
                self.cached.remove(block)
                self.tell(Removed((block,), "GPU"))

    def tell(self, *events: Event) -> None:
        batch = Batch(events)
        if self.held_back is None:
            self.sessions.apply(PLACE, batch)
        else:
            self.held_back.append(batch)

    def let_go(self) -> None:
        batches, self.held_back = self.held_back or [], None
        for batch in batches:
            self.sessions.apply(PLACE, batch)


class Talk:
    """Conversations over one engine. A message is its tokens; a prompt ends with an opening of two tokens."""

    def __init__(self, seed: int = 0) -> None:
        self.sessions = KvSessions()
        self.sessions.place(PLACE).begin(complete=True)
        self.engine = Engine(self.sessions, seed)

    def chain(self, messages: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
        return tuple(repr(messages[: end + 1]).encode() for end in range(len(messages)))

    def prompt(self, messages: Sequence[Sequence[int]]) -> list[int]:
        return [token for message in messages for token in message] + [1, 2]

    def send(self, messages: Sequence[Sequence[int]], session: str = "A") -> Dispatched:
        return self.sessions.sent(PLACE, session, self.chain(messages))

    def ask(
        self,
        messages: Sequence[Sequence[int]],
        answer: Sequence[int] = (),
        session: str = "A",
        ending: str = "stop",
    ) -> tuple[int | None, int]:
        """One request: the tokens expected, and those found."""
        expected = self.sessions.expected(PLACE, self.chain(messages))
        sent = self.send(messages, session)
        tokens = [*self.prompt(messages), *answer]
        found = self.engine.read(tokens, session, len(tokens) - len(answer))
        outcome = Outcome(len(tokens) - len(answer), found, len(answer), ending)
        self.sessions.settled(sent, outcome)
        return expected, found


def message(seed: int, length: int) -> tuple[int, ...]:
    return tuple(seed * 1000 + at for at in range(length))
