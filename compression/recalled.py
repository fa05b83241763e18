"""Snippets of dropped messages at the end of messages, frozen where they were put.

What is brought back for a message is claimed under the chain hash of the conversation up to it, and goes
out with every later request, from any process. That nothing was brought back is claimed as well, so that it
is never decided again: also for messages that were sent before anything was dropped.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import xxhash

from ctxgate.compression.ask import Ask
from ctxgate.compression.canonical import DIGEST_BYTES
from ctxgate.compression.recent import Recent
from ctxgate.compression.texts import end_of_content, escaped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxgate.compression.ask import Asking, Text
    from ctxgate.compression.dialects.chat import Facts

REMEMBERED: Final = 300_000  # messages of all conversations together, most of them without a snippet
REMEMBERED_BYTES: Final = 32 * 2**20  # of messages with one
NOTHING: Final = b""
_ROLES: Final = frozenset({"user", "tool"})


class RecalledMemory:
    """What one process remembers to save work; its contents never change a result."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.texts: Recent[tuple[bytes, bytes], tuple[bytes | None]] = Recent(
            REMEMBERED_BYTES, lambda text: len(text[0] or b"") + 200
        )
        self.forget()

    def forget(self) -> None:
        """Know nothing of the store any more: what is in use is asked for again, so that it is kept."""
        self.snippets: Recent[bytes, bytes] = Recent(REMEMBERED)


def places(facts: Sequence[Facts], gone: set[int]) -> list[int]:
    """The messages that can hold a snippet: those of users and tools behind the first dropped one."""
    first = min(gone, default=len(facts))
    return [at for at in range(first, len(facts)) if at not in gone and facts[at].role in _ROLES]


def key_of(chain_hash: bytes) -> bytes:
    """The key of the snippet at the end of a message, from the chain hash after it."""
    return blake2b(chain_hash, digest_size=DIGEST_BYTES, person=b"ctxgate recall").digest()


def decided(
    at: Sequence[int], hashes: Sequence[bytes], memory: RecalledMemory, fresh: Mapping[int, bytes]
) -> Asking[dict[int, bytes]]:
    """By message: the snippet to put there, where there is one.

    `fresh` are those found now, by message. What was decided before counts more; for every other message
    that nothing is known of, "nothing" is claimed.
    """
    snippets = memory.snippets  # what is forgotten meanwhile stays forgotten
    known = {each: snippets.get(hashes[each]) for each in at}
    keys = {each: key_of(hashes[each]) for each, text in known.items() if text is None}
    if keys:
        answer = yield Ask({key: fresh.get(each, NOTHING) for each, key in keys.items()})
        for each, key in keys.items():
            known[each] = answer[key]
            snippets.put(hashes[each], answer[key])
    return {each: text for each, text in known.items() if text}


def with_snippet(message: Text, snippet: bytes, memory: RecalledMemory) -> bytes | None:
    """A message with a snippet (UTF-8) at the end of its content; None where it takes none."""
    key = (xxhash.xxh3_128_digest(memoryview(message), memory.seed), snippet)
    known = memory.texts.get(key)
    if known is None:
        known = (_written(bytes(message), snippet.decode("utf-8", "replace")),)
        memory.texts.put(key, known)
    return known[0]


def _written(message: bytes, snippet: str) -> bytes | None:
    end = end_of_content(message)
    if end is None:
        return None
    return message[: end.start] + end.before + escaped(snippet) + end.after + message[end.stop :]
