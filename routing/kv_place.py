"""What is known of one replica's cache: its blocks, the prompts through them, and how far to trust it."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from ctxgate.inference.kv_events import DEVICE, Cleared, Removed
from ctxgate.routing.kv_blocks import BLOCKS, Blocks, depth, up
from ctxgate.routing.snapshot import Knowledge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.inference import kv_events
    from ctxgate.inference.kv_events import Batch
    from ctxgate.routing.kv_blocks import Node, Stretch
    from ctxgate.routing.kv_sessions import Dispatched

LINKS: Final = 50_000  # of chains
SESSIONS: Final = 10_000
_STORED: Final = 64  # rows of blocks per session: what its latest attempts stored
_LATEST: Final = 32  # links at a chain's end: there the next turn's prompt goes on from the one before
_LINK_BYTES: Final = 250
_SESSION_BYTES: Final = 1000
_PROOF: Final = 8  # predictions in a row that came true prove a stream that was not read from its start
_JUDGED: Final = 32  # latest predictions
_WRONG: Final = 8  # of them may be


class Stored:
    """Blocks in a row that one session's attempts stored: those behind depth `start`, down to `last`.

    `tick`: the batch that told of the last one. Blocks down to depth `claimed` belong to attempts that are
    known; the rest are of another one. Down to depth `read` they were told of several at once or as the
    first, as those of a prompt are; an answer's come one by one.
    """

    __slots__ = ("before", "claimed", "end", "last", "read", "start", "tick")

    def __init__(self, stretch: Stretch, start: int, blocks: int, tick: int) -> None:
        self.before = stretch.before
        self.last = stretch.last
        self.start = self.claimed = start
        self.end = self.read = start + blocks
        self.tick = tick

    def grow(self, last: Node, blocks: int, tick: int) -> None:
        """More blocks follow."""
        self.last, self.end, self.tick = last, self.end + blocks, tick
        if blocks > 1:
            self.read = self.end

    def at(self, blocks: int) -> Node | None:
        """The block at a depth, which may be the one before the first; None where it is not among them."""
        if not self.start < blocks <= self.end:
            return self.before if blocks == self.start else None
        return up(self.last, self.end - blocks)


class Answer(NamedTuple):
    """The blocks of an answer: those of `stored` behind its prompt's, at most down to depth `most`."""

    stored: Stored
    most: int

    def node(self) -> Node | None:
        """The last one that was told of."""
        return self.stored.at(min(self.most, self.stored.end))


class Untold(NamedTuple):
    """Blocks that events have not told of: of a prompt and its answer together; after which batch."""

    blocks: int
    tick: int


class Mark(NamedTuple):
    """What is known of a link of a chain. `tip` is the path of the last prompt that leads through it.

    `tokens`: of the prompt up to here, None where nothing has shown them. `path`: their whole blocks, None
    where there are none. `ended`: a prompt ends here, its answer lies at `answer` and ended as `ending` says.
    Else other prompts have parted here, inside of what their chains share. `untold`: its blocks have just
    been stored, but their events have not come yet.
    """

    tip: Node | None
    path: Node | None = None
    tokens: int | None = None
    ended: bool = False
    answer: Answer | None = None
    ending: str = ""
    untold: Untold | None = None


class Session:
    """What one session's attempts stored lately."""

    __slots__ = ("stored",)

    def __init__(self) -> None:
        self.stored: deque[Stored] = deque(maxlen=_STORED)

    def add(self, stretch: Stretch, blocks: int, tick: int) -> None:
        """Note blocks stored, so many of them; they may go on from others."""
        for one in reversed(self.stored):
            if one.last == stretch.before:
                one.grow(stretch.last, blocks, tick)
                return
        start = 0 if stretch.before is None else depth(stretch.before)
        if start is not None:
            self.stored.append(Stored(stretch, start, blocks, tick))


class KvPlace:
    """One replica. `tick` counts the batches that were read."""

    def __init__(self, blocks: int = BLOCKS, links: int = LINKS, sessions: int = SESSIONS) -> None:
        self._limits = blocks, links, sessions
        self.unknown = 0  # events of types that are not known
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more: another engine, or messages were lost."""
        self.tree = Blocks(DEVICE, self._limits[0])
        self.block: int | None = None
        self.tick = 0
        self.alive = False
        self._complete = False
        self._mixed = False  # caches of several kinds: a leading run of one is not the hit
        self._agreed = 0
        self._wrong: deque[bool] = deque(maxlen=_JUDGED)
        self._young: dict[bytes, Mark] = {}
        self._old: dict[bytes, Mark] = {}
        self._sessions: dict[str, Session] = {}
        self._stored: set[str] = set()  # sessions, in the step that is being read
        self.open: Counter[bytes] = Counter()  # links of prompts that are being read, not known before
        self.running: dict[bytes, Dispatched] = {}  # attempts under way, by the last link of their prompts

    def begin(self, *, complete: bool) -> None:
        """A stream of events begins; `complete`: with the engine's very first one."""
        self.forget()
        self._complete = complete
        self.alive = True

    @property
    def knowledge(self) -> Knowledge:
        """How well this replica's cache is known by its events."""
        if self.tick == 0:
            return Knowledge.COLD
        sound = self.alive and not self._mixed and not self.tree.overflowed and sum(self._wrong) <= _WRONG
        if sound and (self._complete or self._agreed >= _PROOF):
            return Knowledge.EXACT
        return Knowledge.DEGRADED

    @property
    def size(self) -> int:
        """About how many bytes all this takes."""
        marks = len(self._young) + len(self._old)
        return self.tree.size + marks * _LINK_BYTES + len(self._sessions) * _SESSION_BYTES

    def apply(self, batch: Batch) -> set[str]:
        """Take the events of one step, in order. The sessions that stored something, at a step's end."""
        if batch.first:
            self.tick, self._stored = self.tick + 1, set()
        self.alive = True
        self.unknown += batch.unknown
        if batch.unknown:  # it may have told of anything: what is known has to prove itself
            self._complete, self._agreed = False, 0
        for event in batch.events:
            if isinstance(event, Cleared):
                self.tree.clear()
            elif event.group:
                self._mixed = True
            elif isinstance(event, Removed):
                self.tree.remove(event.hashes, event.tier)
            else:
                self._store(event)
        return self._stored if batch.last else set()

    def judge(self, *, right: bool) -> None:
        """A prediction came true, or did not."""
        self._agreed = self._agreed + 1 if right else 0
        self._wrong.append(not right)

    def session(self, name: str) -> Session:
        """What a session stored; the longest known ones are forgotten where there are too many."""
        session = self._sessions.pop(name, None) or Session()
        self._sessions[name] = session
        if len(self._sessions) > self._limits[2]:
            del self._sessions[next(iter(self._sessions))]
        return session

    def lone_row(self, sent: Dispatched) -> Stored | None:
        """What an attempt under way has stored so far; None where it may be another's of its session."""
        session = self._sessions.get(sent.session)
        if session is None or sum(one.session == sent.session for one in self.running.values()) != 1:
            return None
        rows = [one for one in session.stored if one.tick > sent.since and one.claimed < one.read]
        return rows[0] if len(rows) == 1 else None

    def put(self, links: dict[bytes, Mark]) -> None:
        """Keep marks; what was not put for a whole generation is forgotten."""
        if len(self._young) + len(links) > self._limits[1] // 2:
            self._old, self._young = self._young, {}
        if len(links) <= self._limits[1] // 2:
            self._young.update(links)

    def mark(self, link: bytes) -> Mark | None:
        """What is known of a link."""
        return self._young.get(link) or self._old.get(link)

    def deepest(self, chain: Sequence[bytes]) -> int:
        """The last link of a chain that is known, -1 where none is.

        A few look-ups: a link that is known mostly has known ones before it.
        """
        young, old = self._young, self._old
        start = max(len(chain) - _LATEST, 0)
        for at in range(len(chain) - 1, start - 1, -1):
            link = chain[at]
            if link in young or link in old:
                return at
        low, high = -1, start
        while high - low > 1:
            middle = (low + high) // 2
            link = chain[middle]
            if link in young or link in old:
                low = middle
            else:
                high = middle
        return low

    def _store(self, event: kv_events.Stored) -> None:
        if self.block != event.block:
            self._mixed |= self.block is not None
            self.block = event.block
        stretch = self.tree.store(event.hashes, event.parent, event.tier)
        if stretch is not None and event.session is not None:
            self.session(event.session).add(stretch, len(event.hashes), self.tick)
            self._stored.add(event.session)
