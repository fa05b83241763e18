"""A prompt as it goes out, as digests: what a replica has read, and where the next prompt leaves it.

The elements of a prompt are, in rendered order: first what selects the cache and what chat templates
read beside messages and tools, as one; then each tool, then each message. An element is known by a fast
hash of its bytes. Two elements of equal digests render alike; other digests may only be another spelling,
which is for `diverge` to say, from the bytes.

Cost: one hash over the bytes. A message is decoded once, when it is new, to learn its role: where a
developer message is among them, vLLM moves all system messages to the front.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from ctxgate.compression.diff_parts import HEAD_ROLES, role
from ctxgate.compression.diverge import TEMPLATE_FIELDS, common_prefix
from ctxgate.compression.divergence import Divergence, DivergenceKind
from ctxgate.compression.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.inference.wire import Body

WIDTH: Final = 16  # bytes of a digest
ROLES_REMEMBERED: Final = 100_000
_FIELDS: Final = (
    ("model", DivergenceKind.MODEL_CHANGED),
    ("cache_salt", DivergenceKind.SALT),
    *((name, DivergenceKind.TEMPLATE_CHANGED) for name in TEMPLATE_FIELDS),
)
_NULL: Final = b"null"


@dataclass(frozen=True, slots=True)
class Outline:
    """A prompt's elements, packed: what is kept of one that was sent.

    `fields` holds a digest for each of the fields before the elements, `elements` one for each tool and
    message in rendered order, `sizes` their bytes. The first `tools` elements are tools; `heads` is how
    many of the messages behind them are leading system or developer messages. `order` says which of the
    request's messages each one is; None: they go as they stand.
    """

    fields: bytes = field(repr=False)
    elements: bytes = field(repr=False)
    sizes: array[int] = field(repr=False)
    tools: int
    heads: int
    order: tuple[int, ...] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def messages(self) -> int:
        """How many messages there are."""
        return len(self.sizes) - self.tools

    def message(self, at: int) -> bytes:
        """The digest of a message, counted in rendered order; negative numbers count from the end."""
        place = (at if at < 0 else self.tools + at) % len(self.sizes) * WIDTH
        return self.elements[place : place + WIDTH]

    def digests(self, start: int = 0) -> list[bytes]:
        """The elements' digests, from one of them on."""
        return [self.elements[at : at + WIDTH] for at in range(start * WIDTH, len(self.elements), WIDTH)]

    @property
    def size(self) -> int:
        """Bytes of all tools and messages."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Sent:
    """One outgoing prompt: its outline, and the chain of it.

    `chain` has a hash for the fields and one for each element, each covering all before it; `sizes` are
    the bytes behind each, 0 for the fields.
    """

    outline: Outline
    chain: tuple[bytes, ...] = field(repr=False)

    @property
    def sizes(self) -> array[int]:
        """Bytes of each link of the chain."""
        return array("Q", [0]) + self.outline.sizes


class Digester:
    """Makes outlines. `seed` should be a secret of the process: its digests are no proof of equality."""

    def __init__(self, seed: int = 0, roles: int = ROLES_REMEMBERED) -> None:
        self._seed = seed
        self._roles: Recent[bytes, str] = Recent(roles)

    def chat(self, body: Body, messages: Sequence[msgspec.Raw], salt: str | None = None) -> Sent:
        """The outline of a chat request. `salt` is the one that goes out, None: the body's own."""
        tools = _tools(body)
        digests = [self._digest(raw) for raw in messages]
        roles = self._roles_of(digests, messages)
        order = None
        if "developer" in roles:
            order = tuple(sorted(range(len(roles)), key=lambda at: roles[at] not in HEAD_ROLES))
            digests, roles = [digests[at] for at in order], [roles[at] for at in order]
            messages = [messages[at] for at in order]
        heads = next((at for at, one in enumerate(roles) if one not in HEAD_ROLES), len(roles))
        return self._sent(
            self._fields(body, salt),
            [*map(self._digest, tools), *digests],
            array("Q", [memoryview(part).nbytes for part in (*tools, *messages)]),
            (len(tools), heads, order),
        )

    def text(self, body: Body, salt: str | None = None) -> Sent:
        """The outline of a completions request: its prompt is one element."""
        prompt = body.get("prompt") or msgspec.Raw(_NULL)
        sizes = array("Q", [memoryview(prompt).nbytes])
        return self._sent(self._fields(body, salt), [self._digest(prompt)], sizes, (0, 0, None))

    def _sent(
        self,
        fields: bytes,
        digests: Sequence[bytes],
        sizes: array[int],
        shape: tuple[int, int, tuple[int, ...] | None],
    ) -> Sent:
        link = self._digest(fields)
        chain = [link]
        for digest in digests:
            link = xxhash.xxh3_128_digest(link + digest, self._seed)
            chain.append(link)
        return Sent(Outline(fields, b"".join(digests), sizes, *shape), tuple(chain))

    def _fields(self, body: Body, salt: str | None) -> bytes:
        values = {name: bytes(body.get(name) or _NULL) for name, _ in _FIELDS}
        if salt is not None:
            values["cache_salt"] = b"=" + salt.encode()
        return b"".join(map(self._digest, values.values()))

    def _roles_of(self, digests: Sequence[bytes], messages: Sequence[msgspec.Raw]) -> list[str]:
        known = self._roles.get_all(digests)
        return [
            self._learned(digests[at], messages[at]) if one is None else one for at, one in enumerate(known)
        ]

    def _learned(self, digest: bytes, message: msgspec.Raw) -> str:
        found = role(message)
        self._roles.put(digest, found)
        return found

    def _digest(self, raw: msgspec.Raw | bytes) -> bytes:
        return xxhash.xxh3_128_digest(memoryview(raw), self._seed)


def first_difference(one: Outline, two: Outline) -> Divergence:
    """Where the second prompt leaves the first, as far as digests tell; of kind `extends` where it does not.

    Kinds are the coarse ones: another spelling looks like another text. A prompt that is a beginning of
    the first one extends it too: nothing of it is new.
    """
    at = common_prefix(one.fields, two.fields) // WIDTH
    if at < len(_FIELDS):
        name, kind = _FIELDS[at]
        return Divergence(kind, name, avoidable_bytes=_held(one, two, 0))
    at = common_prefix(one.elements, two.elements) // WIDTH
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
    ones, twos = one.digests(at), two.digests(at)
    if tool:
        same = Counter(ones[: one.tools - at]) == Counter(twos[: two.tools - at])
        return DivergenceKind.TOOLS_REORDERED if same else DivergenceKind.TOOLS_CHANGED
    if at - two.tools < max(one.heads, two.heads):
        return DivergenceKind.SYSTEM_CHANGED
    rest = iter(twos)
    if not Counter(ones) - Counter(twos) and not all(digest in rest for digest in ones):
        return DivergenceKind.HISTORY_REORDERED
    return DivergenceKind.HISTORY_TRUNCATED if twos and twos[0] in ones else DivergenceKind.HISTORY_EDITED


def _held(one: Outline, two: Outline, at: int) -> int:
    """Bytes of the second prompt's elements, from one of them on, that the first holds too."""
    left = Counter(one.digests(at))
    held = 0
    for digest, size in zip(two.digests(at), two.sizes[at:], strict=True):
        if left[digest]:
            left[digest] -= 1
            held += size
    return held


def _tools(body: Body) -> list[msgspec.Raw]:
    if body.kind("tools") == "[":
        return body.items("tools")
    value = body.get("tools")
    return [value] if value is not None and body.has("tools") else []
