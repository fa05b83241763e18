"""The beginning of a prompt under a name that is the same in every turn, whatever the clock says.

A conversation is known by its head and its first user message. Clients write clocks, ids and counters into
the head anew in every turn; with them a name would hold for one turn only. Here the head's volatile spans,
and whatever the client marks `volatile`, do not count; nor do the spelling of a message and cache marks.

A beginning that is known costs one fast hash of its bytes. A head that changes is searched again, in the
sections that are new (`declared_spans`).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import xxhash

from ctxgate.compression.declared_spans import Sections, declared
from ctxgate.compression.dialects.chat import facts_of
from ctxgate.compression.diff_parts import HEAD_ROLES
from ctxgate.compression.marks import MarkError, Stability, read_marks
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.recent import Recent
from ctxgate.compression.texts import MARKS, MessageTexts
from ctxgate.compression.volatile import VolatileKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec

    from ctxgate.compression.expressions import Expression

NAME_BYTES: Final = 32
REMEMBERED: Final = 100_000  # beginnings, by all their messages
SEARCHED: Final = 2**16  # characters of a text in which volatile spans are looked for
# Where a beginning ends that has no user message.
_MESSAGES: Final = 64
_BYTES: Final = 2**20
_WINDOW: Final = 1024  # bytes of a prompt that is one text
_KEPT: Final = 768  # characters of it that count: a span that grows pushes others out of the window
_MASK: Final = "[...]"
_GOES_ON: Final = b""
_ALL: Final = frozenset(VolatileKind)


class Beginnings:
    """Names beginnings of prompts. What it remembers never changes a result.

    `seed` should be a secret of the process: whoever could make two beginnings collide could have one
    taken for the other, within one owner. `sections` may be shared with whoever searches the same heads.
    """

    def __init__(self, seed: int = 0, sections: Sections | None = None, limit: int = REMEMBERED) -> None:
        self._seed = seed
        self._known: Recent[bytes, bytes] = Recent(limit)
        self._links: Recent[tuple[str, bool, bytes], tuple[bytes, str]] = Recent(limit)
        self._sections = sections or Sections()

    def of_messages(
        self, owner: str, messages: Sequence[msgspec.Raw], patterns: tuple[Expression, ...] = ()
    ) -> bytes:
        """The name of a chat prompt up to its first user message, 32 bytes.

        `owner` is part of it. `patterns` find volatile text of the head beside the detector; an owner's are
        always the same. Without a user message the beginning ends after 64 messages, or with the one that
        takes it past 1 MiB.
        """
        hasher = xxhash.xxh3_128(owner.encode() + b"\0", seed=self._seed)
        keys: list[bytes] = []
        for message in messages[:_MESSAGES]:
            hasher.update(memoryview(message))
            keys.append(hasher.digest())
            found = self._known.get(keys[-1])
            if found:
                return found
            if found is None:
                break
        else:
            hasher.update(b"end")
            found = self._known.get(hasher.digest())
            if found is not None:
                return found
        return self._named(owner, messages, patterns)

    def of_text(
        self, owner: str, prompt: msgspec.Raw | bytes, patterns: tuple[Expression, ...] = ()
    ) -> bytes:
        """The name of a prompt that is no chat: of its first 1024 bytes."""
        start = bytes(memoryview(prompt)[:_WINDOW])
        key = xxhash.xxh3_128_digest(owner.encode() + b"\0text\0" + start, self._seed)
        found = self._known.get(key)
        if found is None:
            text = start.decode("utf-8", "replace")
            if start.startswith(b'"'):
                text = self._masked(text, patterns)[: _KEPT if len(start) == _WINDOW else None]
            found = _name(owner, [text.encode()])
            self._known.put(key, found)
        return found

    def _named(self, owner: str, messages: Sequence[msgspec.Raw], patterns: tuple[Expression, ...]) -> bytes:
        """The name of a beginning that is new, and every prefix of it as one that goes on."""
        hasher = xxhash.xxh3_128(owner.encode() + b"\0", seed=self._seed)
        links: list[bytes] = []
        size, head = 0, True
        for message in messages[:_MESSAGES]:
            view = memoryview(message)
            hasher.update(view)
            size += view.nbytes
            link, role = self._remembered(owner, message, patterns, head=head)
            links.append(link)
            head = head and role in HEAD_ROLES
            if role == "user" or size > _BYTES or len(links) == _MESSAGES:
                break
            self._known.put(hasher.digest(), _GOES_ON)
        else:
            hasher.update(b"end")
        found = _name(owner, links)
        self._known.put(hasher.digest(), found)
        return found

    def _remembered(
        self, owner: str, raw: msgspec.Raw, patterns: tuple[Expression, ...], *, head: bool
    ) -> tuple[bytes, str]:
        key = (owner, head, xxhash.xxh3_128_digest(memoryview(raw), self._seed))
        found = self._links.get(key)
        if found is None:
            found = self._link(raw, patterns, head=head)
            self._links.put(key, found)
        return found

    def _link(self, raw: msgspec.Raw, patterns: tuple[Expression, ...], *, head: bool) -> tuple[bytes, str]:
        """What names one message, and its role. `head`: whether it stands in the head if its role says so."""
        facts, message = facts_of(raw), MessageTexts.read(raw)
        in_head = head and facts.role in HEAD_ROLES
        if message is None or not (in_head or facts.marked):
            return facts.lasting, facts.role
        for at, text in [*message.texts()]:
            if in_head:
                message.put(at, self._masked(text, patterns))
        for at in _volatile(message, facts.role) if facts.marked else ():
            message.put(at, _MASK)
        message.unmark(*MARKS)
        return facts_of(message.raw()).lasting, facts.role

    def _masked(self, text: str, patterns: tuple[Expression, ...]) -> str:
        """A text with a constant in place of each volatile span."""
        policy = Policy(Level.DECLARED, kinds=_ALL, patterns=patterns)
        searched, rest = text[:SEARCHED], text[SEARCHED:]
        parts: list[str] = []
        position = 0
        for span in declared(searched, policy, self._sections):
            parts += (searched[position : span.start], _MASK)
            position = span.end
        return "".join((*parts, searched[position:], rest))


def _volatile(message: MessageTexts, role: str) -> list[int]:
    """The parts that the client marks so; none where its marks are not understood."""
    try:
        marks = read_marks(message, role, "")
    except MarkError:
        return []
    return [at for at, said in enumerate(marks.parts) if said is Stability.VOLATILE]


def _name(owner: str, links: Sequence[bytes]) -> bytes:
    digest = blake2b(owner.encode() + b"\0", digest_size=NAME_BYTES, person=b"ctxgate root")
    for link in links:
        digest.update(b"%d:" % len(link) + link)
    return digest.digest()
