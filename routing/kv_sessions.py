"""How much of the next prompt a replica's cache holds, told by its events: exact, and without a tokenizer.

A prompt comes as the gateway's chain (see `prefix_index`), an engine's blocks as hashes. What joins the two
is the session id that each attempt carries: the blocks stored under it while the attempt ran, and the
usage it ended with, tell which path of blocks its prompt is. The next prompt of the conversation begins
with that path, as far as whole blocks of the earlier prompt go; what is there of it, from its beginning
without a gap, is the hit. A fork shares links of the chain, and with them the path. Where two prompts part
inside of what their chains share, the tree of blocks tells after how many.

A prompt that finds all its blocks in the cache stores none: its path is that of the prompt it goes on from.
Hashes cover salt, adapter and images, so no tenant's block is another one's hit. All tokens here are whole
blocks, wherever they lie; a tier is never a fraction of a block.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

from ctxgate.inference.record import Record
from ctxgate.routing.kv_blocks import Run, common, depth, run, up
from ctxgate.routing.kv_ends import Ends
from ctxgate.routing.kv_place import Answer, KvPlace, Mark, Untold
from ctxgate.routing.snapshot import Knowledge

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from ctxgate.inference.kv_events import Batch
    from ctxgate.routing.kv_blocks import Blocks, Node
    from ctxgate.routing.kv_place import Stored

Place: TypeAlias = "tuple[str, str]"
"""A pool and a replica of it, by name."""

_JUST_NOW: Final = 64  # batches: an engine's events come some steps after its answers
_PENDING: Final = 256  # per place: attempts whose blocks have not been told of yet


class Foreseen(Record, frozen=True):
    """What a place holds of a prompt: `tokens` to be found, `near` of them in the engine's own memory."""

    tokens: int
    near: int


class Dispatched(Record, frozen=True):
    """An attempt as it went out: what was foreseen of it, and behind which batch of which tree it comes.

    `new` are the links of its chain that were not known then. Every one has to be settled.
    """

    place: Place
    session: str
    chain: tuple[bytes, ...]
    since: int
    tree: Blocks
    foreseen: Foreseen | None
    new: tuple[bytes, ...] = ()


class Outcome(Record, frozen=True):
    """How an attempt ended: tokens of its prompt, those found in the cache, those generated; None: untold.

    `ending` is the answer's finish reason.
    """

    prompt: int
    cached: int | None
    output: int | None
    ending: str = ""


class KvSessions:
    """All replicas that tell events. Belongs to one event loop; no clock of its own.

    `right` and `wrong` count predictions by what the engine reported.
    """

    def __init__(self) -> None:
        self._places: dict[Place, KvPlace] = {}
        self._ends = Ends()
        self._waiting: dict[Place, deque[tuple[Dispatched, Outcome]]] = {}
        self.right = 0
        self.wrong = 0

    def place(self, place: Place) -> KvPlace:
        """What is known of a replica; made when it is first asked for."""
        known = self._places.get(place)
        if known is None:
            known = self._places[place] = KvPlace()
            self._waiting[place] = deque(maxlen=_PENDING)
        return known

    def knowledge(self, place: Place) -> Knowledge:
        """How well a replica's cache is known by its events; COLD for one that tells none."""
        known = self._places.get(place)
        return Knowledge.COLD if known is None else known.knowledge

    @property
    def size(self) -> int:
        """About how many bytes all of this takes."""
        return sum(place.size for place in self._places.values())

    def apply(self, place: Place, batch: Batch) -> None:
        """Take the events of one step of a replica, in order."""
        known = self.place(place)
        if stored := known.apply(batch):
            self._retry(known, place, stored)

    def _retry(self, known: KvPlace, place: Place, sessions: Container[str]) -> None:
        """Look once more for the paths of some sessions' attempts that have ended."""
        waiting = self._waiting[place]
        for _ in range(len(waiting)):
            sent, outcome = waiting.popleft()
            if sent.session not in sessions or not self._resolved(known, sent, outcome):
                waiting.append((sent, outcome))

    def expected(self, place: Place, chain: Sequence[bytes]) -> int | None:
        """The tokens that a replica's cache holds of a prompt, whole blocks; 0: it is known to hold none.

        None where its cache is not known exactly, or not of this prompt.
        """
        if self.knowledge(place) is not Knowledge.EXACT:
            return None
        found = self.foresee(place, chain)
        return None if found is None else found.tokens

    def foresee(self, place: Place, chain: Sequence[bytes]) -> Foreseen | None:
        """What a replica's cache holds of a prompt as far as its events tell; None where they do not."""
        known = self._places.get(place)
        if known is None or known.block is None or (at := known.deepest(chain)) < 0:
            return None
        mark, block = known.mark(chain[at]), known.block
        if mark is None or mark.tokens is None:
            return None
        if at + 1 < len(chain) and chain[at + 1] in known.open:
            return _under_way(known, chain)
        if (there := _there(mark, known)) is None:
            return None
        most = mark.tokens // block
        if mark.ended and at == len(chain) - 1:  # the same prompt: its last token is computed in any case
            most = (mark.tokens - 1) // block
        elif mark.ended:
            if there.blocks >= most and self._ends.reaches(place[0], mark.ending):
                there = _beyond(mark) or there
                most = max(there.blocks, most)
            if there.blocks <= mark.tokens // block:
                most = max(mark.tokens - self._ends.short(place[0], mark.ending), 0) // block
        return Foreseen(min(there.blocks, most) * block, min(there.near, most) * block)

    def sent(self, place: Place, session: str, chain: Sequence[bytes]) -> Dispatched:
        """Note that an attempt of a session goes out now."""
        known = self.place(place)
        foreseen, new = self.foresee(place, chain), tuple(chain[known.deepest(chain) + 1 :])
        known.open.update(new)
        sent = Dispatched(place, session, tuple(chain), known.tick, known.tree, foreseen, new)
        if new:
            known.running.setdefault(new[-1], sent)
        return sent

    def settled(self, sent: Dispatched, outcome: Outcome | None) -> None:
        """Learn from how an attempt ended, None: nobody knows. Called once for each attempt.

        One whose blocks have not been told of yet is kept for a while.
        """
        known = self.place(sent.place)
        if sent.tree is not known.tree:
            return
        for link in sent.new:
            known.open[link] -= 1
            if known.open[link] <= 0:
                del known.open[link]
        if sent.new and known.running.get(sent.new[-1]) is sent:
            del known.running[sent.new[-1]]
        if outcome is None or outcome.prompt <= 0 or not sent.chain:
            return
        if sent.foreseen is not None and outcome.cached is not None:
            right = sent.foreseen.tokens == outcome.cached
            self.right += right
            self.wrong += not right
            known.judge(right=right)
        if self._resolved(known, sent, outcome):
            if self._waiting[sent.place]:  # what is known to be this one's is no other one's
                self._retry(known, sent.place, (sent.session,))
            return
        self._waiting[sent.place].append((sent, outcome))
        if known.mark(sent.chain[-1]) is None:
            blocks = (outcome.prompt + (outcome.output or 0) - 1) // (known.block or outcome.prompt)
            untold = Untold(blocks, known.tick)
            fresh = Mark(None, None, outcome.prompt, ended=True, ending=outcome.ending, untold=untold)
            known.put({sent.chain[-1]: fresh})

    def _resolved(self, known: KvPlace, sent: Dispatched, outcome: Outcome) -> bool:
        """Find the path of an attempt's prompt and keep it; False while its blocks have not been told of."""
        block = known.block
        if sent.tree is not known.tree:
            return True  # of a stream that is over
        if block is None:
            return False
        want, most = outcome.prompt // block, (outcome.prompt + (outcome.output or 0) - 1) // block
        first = None if outcome.cached is None else outcome.cached // block
        rows = [one for one in known.session(sent.session).stored if one.tick > sent.since]
        found = _own(rows, want, most, first)
        if len({one.at(want) for one in found}) > 1:
            found = self._behind(known, sent, found, want)
            if len({one.at(want) for one in found}) > 1:
                return False  # what comes later may tell them apart
        own = found[0] if found else None
        path = None if own is None else own.at(want)
        if own is None and want:
            if first is None or first < want:
                return False
            path = _shared_path(known, sent.chain, want)
            if path is None:
                return True
        if own is not None:
            own.claimed = max(own.claimed, most)
        self._keep(known, sent, outcome, path, None if own is None or most <= want else Answer(own, most))
        return True

    def _behind(self, known: KvPlace, sent: Dispatched, rows: list[Stored], want: int) -> list[Stored]:
        """Those of some rows that go on from the most of what the attempt's prompt goes on from."""
        at = known.deepest(sent.chain[:-1])
        mark = known.mark(sent.chain[at]) if at >= 0 else None
        tip = None if mark is None else mark.tip
        if tip is None or tip.segment.dropped:
            return rows
        shared = [
            0 if (node := one.at(want)) is None or node.segment.dropped else common(node, tip) or 0
            for one in rows
        ]
        return [one for one, blocks in zip(rows, shared, strict=True) if blocks == max(shared)]

    def _keep(
        self, known: KvPlace, sent: Dispatched, outcome: Outcome, path: Node | None, answer: Answer | None
    ) -> None:
        chain, marks = sent.chain, dict[bytes, Mark]()
        base = known.deepest(chain[:-1])
        if base >= 0 and path is not None:
            self._part(known, sent, base, path, marks)
        inside = Mark(path)
        for at in range(base + 1, len(chain) - 1):
            marks[chain[at]] = inside
        if answer is None and (before := known.mark(chain[-1])) is not None and before.path == path:
            answer = before.answer  # the same prompt again: nothing new was stored, the answer included
        marks[chain[-1]] = Mark(path, path, outcome.prompt, True, answer, outcome.ending)
        known.put(marks)

    def _part(
        self, known: KvPlace, sent: Dispatched, base: int, path: Node, marks: dict[bytes, Mark]
    ) -> None:
        """Learn where a prompt parted from the one that the last known link before its end is of."""
        mark, block = known.mark(sent.chain[base]), known.block
        if mark is None or block is None:
            return
        other = (mark.answer.node() if mark.answer else None) or mark.tip
        if other is None or other.segment.dropped or (shared := common(path, other)) is None:
            return
        if not mark.ended:
            node = up(path, (depth(path) or 0) - shared)
            marks[sent.chain[base]] = Mark(path, node, shared * block)
        elif mark.tokens is not None:
            self._ends.learn(
                sent.place[0],
                mark.ending,
                prompt=mark.tokens,
                block=block,
                shared=shared,
                answered=depth(other) or 0,
            )


def _under_way(known: KvPlace, chain: Sequence[bytes]) -> Foreseen | None:
    """What is foreseen of a prompt where another attempt is storing more of it just now.

    Only where the other prompt is the very same, and its blocks have been told of.
    """
    other = known.running.get(chain[-1])
    if other is None or known.block is None or (row := known.lone_row(other)) is None:
        return None
    node = row.at(row.read)
    if node is None or (there := _run(node)) is None:
        return None
    return Foreseen(there.blocks * known.block, there.near * known.block)


def _there(mark: Mark, known: KvPlace) -> Run | None:
    """How much of a mark's path is there; None where that is not known."""
    if mark.untold is not None:  # it was read just now: it is there, as long as little has happened since
        told = known.tick - mark.untold.tick > _JUST_NOW
        return None if told else Run(mark.untold.blocks, mark.untold.blocks)
    return Run(0, 0) if mark.path is None else _run(mark.path)


def _beyond(mark: Mark) -> Run | None:
    """How much is there of a prompt and its answer; None where that is not known, or is no more."""
    answer = None if mark.answer is None else mark.answer.node()
    return None if answer is None else _run(answer)


def _run(node: Node) -> Run | None:
    return None if node.segment.dropped else run(node)


def _own(rows: Sequence[Stored], want: int, most: int, first: int | None) -> list[Stored]:
    """The rows that may hold what an attempt stored: its prompt's blocks from `first` to `want`, and more."""
    fitting: list[tuple[int, Stored]] = []
    for one in rows:
        begins = one.start if first is None else min(first, want)
        if one.start <= begins and one.claimed <= begins and one.end >= want and one.end > begins:
            fitting.append(((one.claimed == begins) + (one.end == most), one))
    best = max((score for score, _ in fitting), default=0)
    return [one for score, one in fitting if score == best]


def _shared_path(known: KvPlace, chain: Sequence[bytes], want: int) -> Node | None:
    """The path of a prompt that found all of its blocks: that of a prompt it goes on from, or its answer."""
    mark = known.mark(chain[at]) if (at := known.deepest(chain)) >= 0 else None
    if mark is None:
        return None
    for node in (mark.path, mark.answer.node() if mark.answer else None, mark.tip):
        if node is None or node.segment.dropped or (blocks := depth(node)) is None:
            continue
        if blocks >= want:
            return up(node, blocks - want)
    return None
