"""Tool results that are made shorter when they first arrive, and never again after.

A result behind the last assistant message has not been sent before: shrinking it there costs nothing of
the prefix cache. What is decided then is claimed in the store of first-seen forms and holds for ever, in
any process: the shortened texts, or "as it came". An older result only takes up what was decided; where
nothing was, "as it came" is claimed for it, so that no later request and no other conversation decides
anew what has been sent. A limit that changes, or the feature switched on in mid-conversation, so never
changes a result that went out before.

A result is known by the first user message of its conversation, by what it says, and by which one of the
equal results before it it is: an edit of the history in between, a new system message, or call ids made up
anew in each turn leave it the same.

Left as they came are results within the limit, short ones that report an error, pinned ones, those of the
tools in `sticky`, and those whose text has other changes than something added to its end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import xxhash

from ctxgate.compression.ask import Ask
from ctxgate.compression.canonical import DIGEST_BYTES
from ctxgate.compression.error_lines import is_error
from ctxgate.compression.recent import Recent
from ctxgate.compression.said import read_said
from ctxgate.compression.texts import MessageTexts
from ctxgate.compression.tool_output import LEAST_LIMIT, shrink_message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.compression.ask import Asking, Text
    from ctxgate.compression.dialects.chat import Facts

SMALL_ERROR: Final = 4096
"""Bytes of a result that reports an error, up to which it stays whole whatever the limit is."""

REMEMBERED: Final = 300_000  # decisions of all conversations together, most of them "as it came"
REMEMBERED_BYTES: Final = 64 * 2**20  # of shortened messages
_OVERHEAD: Final = 200
_AS_IT_CAME: Final = b""
_FORM: Final = msgspec.json.Decoder(list[tuple[int, str]])

Slot: TypeAlias = "tuple[bytes, bytes, int]"
"""A result: whose conversation it is and how that begins, what it says, how many equal ones precede it."""


@dataclass(frozen=True, slots=True)
class ArrivalPolicy:
    """How results are shrunk: to `limit` bytes of UTF-8 per text; never those of the tools in `sticky`."""

    limit: int
    sticky: frozenset[str] = frozenset()


class ArrivalsMemory:
    """What one process remembers to save work; its contents never change a result.

    `seed` should be a secret of the process: see `dialects.chat.Views`.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.texts: Recent[tuple[bytes, bytes], tuple[bytes | None]] = Recent(REMEMBERED_BYTES, _weight)
        self.whole: Recent[Slot, bool] = Recent(REMEMBERED)
        self.forget()

    def forget(self) -> None:
        """Know nothing of the store any more: what is in use is asked for again, so that it is kept."""
        self.forms: Recent[Slot, bytes] = Recent(REMEMBERED)

    def sent_whole(self, found: Arriving) -> None:
        """Note that what has just arrived goes out as it came because the store gave no answer in time.

        That holds then, whatever the store may say of it later.
        """
        for at in found.fresh:
            self.whole.put(found.unknown[at], True)


@dataclass(frozen=True, slots=True)
class Arriving:
    """The results of a request that matter here, by position.

    `known` are decisions at hand, `unknown` those to ask for; of these, `fresh` have just arrived, and
    nothing is known of them: `size` bytes to be looked at by `shorten`.
    """

    known: Mapping[int, bytes] = field(repr=False)
    unknown: Mapping[int, Slot] = field(repr=False)
    fresh: tuple[int, ...]
    arrived: frozenset[int]
    size: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """What goes out in place of tool results.

    `texts`: by position, the message to send. `originals`: by reference, the client's message, of results
    that arrived with this request and are shortened: to be archived (again, where the same request comes
    twice). `bytes_before` and `bytes_saved` are those of these messages, `shortened` how many of all.
    """

    texts: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    originals: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    bytes_before: int = 0
    bytes_saved: int = 0

    @property
    def shortened(self) -> int:
        """How many messages go out shortened."""
        return len(self.texts)


NOTHING: Final = Arrived()


def arrivals(
    messages: Sequence[Text],
    facts: Sequence[Facts],
    policy: ArrivalPolicy,
    memory: ArrivalsMemory,
    tenant: str,
    reference: Callable[[bytes], str],
    laid: Sequence[Text] | None = None,
) -> Asking[Arrived]:
    """The tool results of a request as they go out. Yields at most one question.

    `messages` are the client's, `facts` theirs (without volatile text where layout takes it away), `laid`
    the same messages as they go on (default: as they came). `reference` names an original by the digest
    of what it says (`Facts.lasting`), within the tenant. Where much has arrived, `arriving`, `shorten` and
    `settled` do the same in steps, of which `shorten` may run in a thread.
    """
    found = arriving(messages, facts, memory, tenant)
    forms = shorten(messages, facts, policy, found, reference) if found.fresh else {}
    return (yield from settled(messages, facts, found, forms, memory, reference, laid))


def arriving(
    messages: Sequence[Text], facts: Sequence[Facts], memory: ArrivalsMemory, tenant: str
) -> Arriving:
    """Which results may have a decision, or need one. Looks up each large result, and reads no text."""
    last = max((at for at, each in enumerate(facts) if each.role == "assistant"), default=-1)
    first = tenant.encode() + b"\0" + next((each.lasting for each in facts if each.role == "user"), b"")
    seen: Counter[bytes] = Counter()
    known: dict[int, bytes] = {}
    unknown: dict[int, Slot] = {}
    arrived: set[int] = set()
    for at, each in enumerate(facts):
        if each.role != "tool" or each.size <= LEAST_LIMIT:
            continue
        says = each.lasting
        slot = (first, says, seen[says])
        seen[says] += 1
        form = memory.forms.get(slot)
        if form is None:
            unknown[at] = slot
        else:
            known[at] = form
        if at > last:
            arrived.add(at)
    fresh = tuple(at for at, slot in unknown.items() if at in arrived and not memory.whole.get(slot))
    size = sum(memoryview(messages[at]).nbytes for at in fresh)
    return Arriving(known, unknown, fresh, frozenset(arrived), size)


def shorten(
    messages: Sequence[Text],
    facts: Sequence[Facts],
    policy: ArrivalPolicy,
    found: Arriving,
    reference: Callable[[bytes], str],
) -> dict[int, bytes]:
    """The forms of the results that have just arrived, by position. Uses no memory."""
    names = _tools(messages, found.fresh) if policy.sticky else {}
    return {
        at: _AS_IT_CAME
        if names.get(facts[at].answers or "") in policy.sticky
        else _form(messages[at], facts[at], policy.limit, reference)
        for at in found.fresh
    }


def settled(
    messages: Sequence[Text],
    facts: Sequence[Facts],
    found: Arriving,
    forms: Mapping[int, bytes],
    memory: ArrivalsMemory,
    reference: Callable[[bytes], str],
    laid: Sequence[Text] | None = None,
) -> Asking[Arrived]:
    """Claims what is not known, and puts every decision into effect."""
    known = dict(found.known)
    if found.unknown:
        keys = {at: key_of(slot) for at, slot in found.unknown.items()}
        decisions = memory.forms  # what is forgotten meanwhile stays forgotten
        answer = yield Ask({key: forms.get(at, _AS_IT_CAME) for at, key in keys.items()})
        for at, key in keys.items():
            known[at] = _AS_IT_CAME if memory.whole.get(found.unknown[at]) else answer[key]
            decisions.put(found.unknown[at], known[at])
    return at_hand(messages, facts, replace(found, known=known), memory, reference, laid)


def at_hand(
    messages: Sequence[Text],
    facts: Sequence[Facts],
    found: Arriving,
    memory: ArrivalsMemory,
    reference: Callable[[bytes], str],
    laid: Sequence[Text] | None = None,
) -> Arrived:
    """Puts the decisions into effect that are `known`."""
    out = messages if laid is None else laid
    texts: dict[int, bytes] = {}
    originals: dict[str, bytes] = {}
    before = after = 0
    for at, form in found.known.items():
        if not form:
            continue
        text = _placed(messages[at], out[at], form, memory)
        if text is None:
            continue
        texts[at] = text
        if at in found.arrived:
            originals[reference(facts[at].lasting)] = bytes(messages[at])
            before += memoryview(out[at]).nbytes
            after += len(text)
    return Arrived(texts, originals, before, before - after) if texts else NOTHING


def key_of(slot: Slot) -> bytes:
    """The key under which the decision on a result is kept."""
    first, says, number = slot
    name = blake2b(digest_size=DIGEST_BYTES, person=b"ctxgate arrival")
    name.update(len(first).to_bytes(4, "big") + first + says + number.to_bytes(4, "big"))
    return name.digest()


def _form(raw: Text, facts: Facts, limit: int, reference: Callable[[bytes], str]) -> bytes:
    """The texts to send instead, with their places; empty: as it came."""
    if facts.marked and read_said(raw).pinned:
        return _AS_IT_CAME
    if facts.size <= SMALL_ERROR and any(map(is_error, read_said(raw).text.split("\n"))):
        return _AS_IT_CAME
    short = shrink_message(bytes(raw), limit, reference(facts.lasting))
    if short is None:
        return _AS_IT_CAME
    before, after = MessageTexts.read(raw), MessageTexts.read(short)
    if before is None or after is None:
        return _AS_IT_CAME
    changed = [(at, text) for at, text in after.texts() if before.text(at) != text]
    return msgspec.json.encode(changed) if changed else _AS_IT_CAME


def _tools(messages: Sequence[Text], fresh: Sequence[int]) -> dict[str, str]:
    """The name of each tool that was called by the message whose results these are, by the call's id."""
    if not fresh:
        return {}
    for at in range(min(fresh) - 1, -1, -1):
        said = read_said(bytes(messages[at]))
        if said.calls:
            return {call.id: call.name for call in said.calls}
    return {}


def _placed(client: Text, laid: Text, form: bytes, memory: ArrivalsMemory) -> bytes | None:
    """A message with its shortened texts; None where it says something else than was shortened."""
    key = (xxhash.xxh3_128_digest(memoryview(laid), memory.seed), form)
    known = memory.texts.get(key)
    if known is None:
        known = (_written(client, laid, form),)
        memory.texts.put(key, known)
    return known[0]


def _written(client: Text, laid: Text, form: bytes) -> bytes | None:
    message, came = MessageTexts.read(laid), MessageTexts.read(client)
    if message is None or came is None:
        return None
    for at, text in _FORM.decode(form):
        before = came.text(at) if at < len(came) else None
        after = message.text(at) if at < len(message) else None
        if before is None or after is None or not after.startswith(before):
            return None
        message.put(at, text + after[len(before) :])  # what layout has put behind it stays whole
    return message.raw()


def _weight(text: tuple[bytes | None]) -> int:
    return _OVERHEAD + len(text[0] or b"")
