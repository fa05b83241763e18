"""What the gateway and its recall process say to each other: length-prefixed msgpack over two pipes."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

PREFIX: Final = 4
"""Bytes of a frame's length, big-endian."""
LONGEST: Final = 2**28


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Index a conversation's messages, the client's JSON by id; those that are known already change nothing.

    `begins`: all that belongs to the conversation comes now, this first. Without it, a conversation that is
    not known stays so: half of one would answer as if it were whole.
    """

    conversation: bytes
    items: list[tuple[str, bytes]]
    begins: bool = False


class Ask(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What of a conversation answers a text best? To be said within so many seconds.

    `among`: the only messages that matter, by their ids; None: all of them.
    """

    number: int
    conversation: bytes
    text: str
    count: int
    within_s: float
    among: frozenset[str] | None = None


class Forget(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Drop the indexes of all conversations whose names begin so."""

    prefix: bytes


class Hit(msgspec.Struct, array_like=True, frozen=True):
    """A window: where it stands in which text, the check of what stands there, and how well it answers."""

    id: str
    start: int
    stop: int
    check: int
    relevance: float


class Told(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The answer to an `Ask`. `known`: the conversation is indexed. `dense`: its meaning was looked at."""

    number: int
    known: bool
    dense: bool
    hits: list[Hit]


Said: TypeAlias = "Add | Ask | Forget"
_SAID: Final = msgspec.msgpack.Decoder(Add | Ask | Forget)
_TOLD: Final = msgspec.msgpack.Decoder(Told)
_ENCODER: Final = msgspec.msgpack.Encoder()


def framed(message: Said | Told) -> bytes:
    """A message with its length before it."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(PREFIX, "big") + body


def length_of(prefix: bytes) -> int:
    """The length that a frame's first bytes tell. Raises ValueError for one that cannot be."""
    length = int.from_bytes(prefix, "big")
    if length > LONGEST:
        raise ValueError("a frame too long to be one")
    return length


def said(body: bytes) -> Said:
    """What the gateway said."""
    message: Said = _SAID.decode(body)
    return message


def told(body: bytes) -> Told:
    """What the process told."""
    return _TOLD.decode(body)
