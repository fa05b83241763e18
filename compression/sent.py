"""A prompt as it goes out, as digests: what a replica has read, and where the next prompt leaves it.

The elements of a prompt are, in rendered order: first what selects the cache and what chat templates
read beside messages and tools, as one; then each tool, then each message. An element is known by a fast
hash of its bytes. Two elements of equal digests render alike; other digests may only be another spelling,
which is for `diverge` to say, from the bytes.

Cost: one hash over the bytes. A message is decoded once, when it is new, to learn its role: where a
developer message is among them, vLLM moves all system messages to the front. The chain of a long prompt
is remembered, so that the next one of its conversation only adds to it.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec
import xxhash

from ctxgate.compression.compacted import is_compacted
from ctxgate.compression.diff_parts import HEAD_ROLES
from ctxgate.compression.diverge import TEMPLATE_FIELDS, common_prefix
from ctxgate.compression.divergence import Divergence, DivergenceKind
from ctxgate.compression.recent import Recent
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.inference.wire import Body

WIDTH: Final = 16  # bytes of a digest
ROLES_REMEMBERED: Final = 100_000
AROUNDS_REMEMBERED: Final = 100_000  # tools of all of them together, at some 80 bytes each
LINKS_REMEMBERED: Final = 300_000  # of long chains; most of them are kept for other uses anyway
CHUNK: Final = 1024  # bytes
CHUNKS: Final = 1024  # of one element
_LONG: Final = 64  # elements from which on it is worth remembering a chain
_NEW_ELEMENTS: Final = 24  # a turn brings fewer; a chain of more new ones is made from its beginning
_FIELDS: Final = (
    ("model", DivergenceKind.MODEL_CHANGED),
    ("cache_salt", DivergenceKind.SALT),
    *((name, DivergenceKind.TEMPLATE_CHANGED) for name in TEMPLATE_FIELDS),
)
_NAMES: Final = tuple(name for name, _ in _FIELDS)
_NULL: Final = b"null"
_FEW: Final = 1024  # bytes that are faster compared as one number than by halves


class _Message(msgspec.Struct):
    role: str = ""


_MESSAGE: Final = msgspec.json.Decoder(_Message)


class Outline(Record, frozen=True):
    """A prompt's elements, packed: what is kept of one that was sent.

    `fields` holds a digest for each of the fields before the elements, `elements` one for each tool and
    message in rendered order, `sizes` their bytes. The first `tools` elements are tools; `heads` is how
    many of the messages behind them are leading system or developer messages. `order` says which of the
    request's messages each one is; None: they go as they stand.
    """

    fields: bytes
    elements: bytes
    sizes: array[int]
    tools: int
    heads: int
    order: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"Outline(tools={self.tools}, heads={self.heads}, messages={self.messages})"

    @property
    def size(self) -> int:
        """Bytes of all tools and messages."""
        return sum(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def head(self) -> int:
        """How many elements the head has: tools, and leading system or developer messages."""
        return self.tools + self.heads

    @property
    def messages(self) -> int:
        """How many messages there are."""
        return len(self.sizes) - self.tools

    def message(self, at: int) -> bytes:
        """The digest of a message, counted in rendered order; negative numbers count from the end."""
        place = (at if at < 0 else self.tools + at) % len(self.sizes) * WIDTH
        return self.elements[place : place + WIDTH]

    def digests(self, start: int = 0, stop: int | None = None) -> list[bytes]:
        """The elements' digests, from one of them on, up to another one."""
        end = len(self.elements) if stop is None else min(stop * WIDTH, len(self.elements))
        return [self.elements[at : at + WIDTH] for at in range(start * WIDTH, end, WIDTH)]

    def last(self, count: int, width: int) -> list[bytes]:
        """Digests of up to `count` last messages, the last first, each behind the `width` - 1 before it."""
        end = len(self.elements) - width * WIDTH
        start = max(self.tools, len(self.sizes) - count) * WIDTH
        return [self.elements[at : at + width * WIDTH] for at in range(end, start - 1, -WIDTH)]

    def holds(self, message: bytes) -> bool:
        """Whether a message of this digest is among the messages."""
        at = self.elements.find(message, self.tools * WIDTH)
        while at % WIDTH and at > 0:  # found across two digests
            at = self.elements.find(message, at + 1)
        return at >= 0


class Sent(Record, frozen=True):
    """One outgoing prompt: its outline, and the chain of it.

    `chain` has a hash for the fields, one for the whole head where there is one (tools and leading system
    or developer messages: in which order these are printed is the template's business) and one for each
    message behind it. Each covers all before it.
    """

    outline: Outline
    chain: tuple[bytes, ...]

    @property
    def sizes(self) -> array[int]:
        """Bytes of each link of the chain, 0 for the fields."""
        sizes = self.outline.sizes
        if (head := self.outline.head) < 2:
            return array("Q", [0]) + sizes
        return array("Q", [0, sum(sizes[:head])]) + sizes[head:]

    def size_of(self, at: int) -> int:
        """Bytes of one link of the chain."""
        sizes, head = self.outline.sizes, self.outline.head
        if not at:
            return 0
        if head < 2:
            return sizes[at - 1]
        return sum(sizes[:head]) if at == 1 else sizes[at - 2 + head]


class _Around(NamedTuple):
    """A chat request but for its messages: digests of its fields and tools, and the bytes of these."""

    fields: bytes
    tools: tuple[bytes, ...]
    sizes: tuple[int, ...]

    def weight(self) -> int:
        """Elements, and as much as one for the rest."""
        return 1 + len(self.tools)


class Digester:
    """Makes outlines. `seed` should be a secret of the process: its digests are no proof of equality."""

    def __init__(self, seed: int = 0, roles: int = ROLES_REMEMBERED) -> None:
        self._seed = seed
        self._roles: Recent[bytes, str] = Recent(roles)
        self._chains: Recent[bytes, tuple[bytes, ...]] = Recent(LINKS_REMEMBERED, len)
        self._arounds: Recent[tuple[bytes, str | None], _Around] = Recent(AROUNDS_REMEMBERED, _Around.weight)
        self._null = self._digest(_NULL)

    def chat(self, body: Body, messages: Sequence[msgspec.Raw], salt: str | None = None) -> Sent:
        """The outline of a chat request. `salt` is the one that goes out, None: the body's own."""
        around = self._around(body, salt)
        count = len(around.tools)
        views = [memoryview(raw) for raw in messages]
        digests = [*map(xxhash.xxh3_128_digest, views, repeat(self._seed))]
        roles = self._roles_of(digests, messages)
        elements, sizes = [*around.tools, *digests], [*around.sizes, *[view.nbytes for view in views]]
        order = None
        if "developer" in roles:
            order = tuple(sorted(range(len(roles)), key=lambda at: roles[at] not in HEAD_ROLES))
            roles = [roles[at] for at in order]
            places = (*range(count), *(count + at for at in order))
            elements, sizes = [elements[at] for at in places], [sizes[at] for at in places]
        heads = 0
        while heads < len(roles) and roles[heads] in HEAD_ROLES:
            heads += 1
        return self._sent(around.fields, elements, array("Q", sizes), (count, heads, order))

    def text(self, body: Body, salt: str | None = None) -> Sent:
        """The outline of a completions request: its prompt is one element."""
        prompt = body.get("prompt") or msgspec.Raw(_NULL)
        sizes = array("Q", [memoryview(prompt).nbytes])
        return self._sent(self._fields(body, salt), [self._digest(prompt)], sizes, (0, 0, None))

    def chunks(self, sent: Sent, messages: Sequence[msgspec.Raw], at: int) -> tuple[bytes, ...]:
        """A hash for each leading whole chunk of a link of a chain, each covering all before it.

        `messages`: those of a chat, or the prompt of a completions request. `at` is the link's place in
        the chain, at least 1. Of a head only the system messages have chunks:
        they are shared where all tools are the same ones, whichever a template prints first. At most
        `CHUNKS` are hashed.
        """
        outline = sent.outline
        known = sent.chain[at - 1]
        if at == 1 and outline.head:
            known += outline.elements[: outline.tools * WIDTH]
            places = range(outline.heads)
        else:
            first = at - 1 + max(outline.head - 1, 0) - outline.tools
            places = range(first, first + 1)
        order = outline.order
        raws = [messages[place if order is None else order[place]] for place in places]
        text = memoryview(raws[0] if len(raws) == 1 else b"".join(map(bytes, raws)))
        hashed, seed = xxhash.xxh3_128_digest, self._seed
        ends = range(CHUNK, min(text.nbytes, CHUNKS * CHUNK) + 1, CHUNK)
        digests = [hashed(text[end - CHUNK : end], seed) for end in ends]
        known = hashed(known, seed)  # never a link of a message
        return tuple([known := hashed(known + digest, seed) for digest in digests])

    def _sent(
        self,
        fields: bytes,
        digests: Sequence[bytes],
        sizes: array[int],
        shape: tuple[int, int, tuple[int, ...] | None],
    ) -> Sent:
        outline = Outline(fields, b"".join(digests), sizes, *shape)
        units, links = outline.elements, digests
        if (head := outline.head) > 1:
            links = [self._digest(units[: head * WIDTH]), *digests[head:]]
            units = links[0] + units[head * WIDTH :]
        if len(links) < _LONG:
            chain = self._extended((self._digest(fields),), links)
        else:
            chain = self._long_chain(fields, units, links)
        return Sent(outline, chain)

    def _long_chain(self, fields: bytes, units: bytes, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        """The chain, made from that of the longest beginning that is remembered, and remembered."""
        start = len(digests) - _NEW_ELEMENTS
        beginning = xxhash.xxh3_128(fields + units[: start * WIDTH], seed=self._seed)
        keys = [beginning.digest()]
        for digest in digests[start:]:
            beginning.update(digest)
            keys.append(beginning.digest())
        known = next(filter(None, map(self._chains.get, reversed(keys))), (self._digest(fields),))
        if len(known) > len(digests):
            return known
        chain = self._extended(known, digests[len(known) - 1 :])
        self._chains.put(keys[-1], chain)
        return chain

    def _extended(self, known: tuple[bytes, ...], digests: Sequence[bytes]) -> tuple[bytes, ...]:
        hashed, seed, link = xxhash.xxh3_128_digest, self._seed, known[-1]
        return (*known, *[link := hashed(link + digest, seed) for digest in digests])

    def _around(self, body: Body, salt: str | None) -> _Around:
        """What stands around the messages; the turns of a conversation mostly share it, byte for byte."""
        frame = body.frame()
        if frame is None:
            return self._read_around(body, salt)
        key = xxhash.xxh3_128_digest(frame.text, self._seed), salt
        found = self._arounds.get(key)
        if found is None:
            found = self._read_around(body, salt)
            self._arounds.put(key, found)
        return found

    def _read_around(self, body: Body, salt: str | None) -> _Around:
        views = [memoryview(raw) for raw in _tools(body)]
        tools = map(xxhash.xxh3_128_digest, views, repeat(self._seed))
        return _Around(self._fields(body, salt), tuple(tools), tuple(view.nbytes for view in views))

    def _fields(self, body: Body, salt: str | None) -> bytes:
        values = [*map(body.get, _NAMES)]
        digests = [self._null if value is None else self._digest(value) for value in values]
        if salt is not None:
            digests[_NAMES.index("cache_salt")] = self._digest(b"=" + salt.encode())
        return b"".join(digests)

    def _roles_of(self, digests: Sequence[bytes], messages: Sequence[msgspec.Raw]) -> list[str]:
        known = self._roles.get_all(digests)
        if None not in known:
            return cast("list[str]", known)
        return [
            self._learned(digests[at], messages[at]) if one is None else one for at, one in enumerate(known)
        ]

    def _learned(self, digest: bytes, message: msgspec.Raw) -> str:
        found = _role(message)
        self._roles.put(digest, found)
        return found

    def _digest(self, raw: msgspec.Raw | bytes) -> bytes:
        return xxhash.xxh3_128_digest(memoryview(raw), self._seed)


def extends(one: Outline, two: Outline) -> bool:
    """Whether the second prompt is the first one with more behind it, or with less."""
    return (
        one.fields == two.fields
        and one.tools == two.tools
        and (two.elements.startswith(one.elements) or one.elements.startswith(two.elements))
    )


def first_difference(one: Outline, two: Outline) -> Divergence:
    """Where the second prompt leaves the first, as far as digests tell; of kind `extends` where it does not.

    Kinds are the coarse ones: another spelling looks like another text. A prompt that is a beginning of
    the first one extends it too: nothing of it is new.
    """
    at = common_bytes(one.fields, two.fields) // WIDTH
    if at < len(_FIELDS):
        name, kind = _FIELDS[at]
        return Divergence(kind, name, avoidable_bytes=_held(one, two, 0))
    at = common_bytes(one.elements, two.elements) // WIDTH
    if one.tools != two.tools:
        at = min(at, one.tools, two.tools)  # a tool and a message are never the same element
    elif at == min(len(one), len(two)):
        return Divergence(DivergenceKind.EXTENDS, rendered=False, kept_bytes=sum(two.sizes[:at]))
    tool = at < max(one.tools, two.tools)
    place = at - two.tools
    index = at if tool else place if two.order is None or place >= two.messages else two.order[place]
    return Divergence(
        _kind(one, two, at, tool=tool),
        f"{'tools' if tool else 'messages'}[{index}]",
        index,
        kept_bytes=sum(two.sizes[:at]),
        avoidable_bytes=_held(one, two, at),
    )


def _kind(one: Outline, two: Outline, at: int, *, tool: bool) -> DivergenceKind:
    if not tool and at - two.tools < max(one.heads, two.heads):
        return DivergenceKind.SYSTEM_CHANGED
    ones, twos = one.digests(at), two.digests(at)
    if tool:
        same = Counter(ones[: one.tools - at]) == Counter(twos[: two.tools - at])
        return DivergenceKind.TOOLS_REORDERED if same else DivergenceKind.TOOLS_CHANGED
    rest = iter(twos)
    if not Counter(ones) - Counter(twos) and not all(digest in rest for digest in ones):
        return DivergenceKind.HISTORY_REORDERED
    if twos and twos[0] in ones:
        return DivergenceKind.HISTORY_TRUNCATED
    compacted = is_compacted(ones, twos, one.sizes[at:], two.sizes[at:])
    return DivergenceKind.HISTORY_COMPACTED if compacted else DivergenceKind.HISTORY_EDITED


def common_run(one: Outline, two: Outline, at: int) -> int:
    """How many elements, from one of them on, are the same ones in both prompts."""
    return common_bytes(one.elements[at * WIDTH :], two.elements[at * WIDTH :]) // WIDTH


def common_bytes(one: bytes, two: bytes) -> int:
    """How many leading bytes are the same ones: `common_prefix`, faster where there are few."""
    size = min(len(one), len(two))
    if size > _FEW:
        return common_prefix(one, two)
    differing = int.from_bytes(one[:size], "big") ^ int.from_bytes(two[:size], "big")
    return size - (differing.bit_length() + 7) // 8


def _held(one: Outline, two: Outline, at: int) -> int:
    """Bytes of the second prompt's elements, from one of them on, that the first holds too."""
    run = at + 1 + common_run(one, two, at + 1)  # what changed is mostly one element
    left = Counter([*one.digests(at, at + 1), *one.digests(run)])
    held = sum(two.sizes[at + 1 : run])
    sizes = (*two.sizes[at : at + 1], *two.sizes[run:])
    for digest, size in zip([*two.digests(at, at + 1), *two.digests(run)], sizes, strict=True):
        if left[digest]:
            left[digest] -= 1
            held += size
    return held


def _role(message: msgspec.Raw) -> str:
    try:
        return sys.intern(_MESSAGE.decode(message).role)  # of many messages, few roles
    except (msgspec.DecodeError, UnicodeDecodeError):  # no object, or its role is no string
        return ""


def _tools(body: Body) -> list[msgspec.Raw]:
    if body.kind("tools") == "[":
        return body.items("tools")
    value = body.get("tools")
    return [value] if value is not None and body.has("tools") else []
