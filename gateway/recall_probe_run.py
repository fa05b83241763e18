"""Plays a recall probe against the replicas of a pool; every call is metered, priced and booked.

Like the calls of `pool_probe`, these belong to an organisation that no configuration can name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.gateway import recall_probe
from ctxgate.gateway.own_calls import Cost, heard, own_call
from ctxgate.gateway.recall_probe import SIZING, Cell, Needle, Result, Row, sentences_for
from ctxgate.gateway.replica_watch import PROBE_TIMEOUT_S
from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ctxgate.gateway.config import Model
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.services import Services

_CONTENT: Final = "content"


class ProbeFailed(Exception):
    """The pool gives no answers to go by, with the reason."""


@dataclass(frozen=True, slots=True)
class Questions:
    """What to ask: lengths in tokens, depths in per cent, tries of each, and the longest answer."""

    lengths: Sequence[int]
    depths: Sequence[int]
    trials: int
    max_tokens: int
    threshold: float
    patience_s: float


async def records_up(services: Services, pool: str) -> list[ReplicaRecord]:
    """The replicas of a pool that answer now, their windows known to the fleet."""
    found = []
    for record in services.fleet.records():
        if record.pool.name != pool:
            continue
        headers = services.upstream_headers(record.pool)
        result = await probe(services.client, record.replica.url, headers, PROBE_TIMEOUT_S)
        services.fleet.probed(pool, record.replica.name, result)
        if result.finding is Finding.WELL:
            found.append(record)
    return found


@dataclass(slots=True)
class _Told:
    """An answer: its text, and the prompt's tokens."""

    text: str
    prompt: int


@dataclass(slots=True)
class RecallProbe:
    """One model on the given replicas, which take turns. `step` is called after each question."""

    services: Services
    records: Sequence[ReplicaRecord]
    model: Model
    questions: Questions
    step: Callable[[], None] = lambda: None
    cost: Cost = field(default_factory=Cost)
    _turn: int = 0
    _found: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _longest: dict[int, int] = field(default_factory=dict)

    async def run(self) -> Result:
        """Ask everything. Raises `ProbeFailed` where not even a short prompt is answered and measured."""
        sizes = await self._sizes()
        asked = self.questions
        for needle in recall_probe.needles(asked.lengths, asked.depths, asked.trials):
            told = await self._ask(needle, sentences_for(needle.length, sizes))
            if told is not None:
                tally = self._found.setdefault((needle.length, needle.depth), [0, 0])
                tally[0] += recall_probe.is_found(needle, told.text)
                tally[1] += 1
                self._longest[needle.length] = max(self._longest.get(needle.length, 0), told.prompt)
            self.step()
        rows = tuple(self._row(length) for length in sorted(asked.lengths))
        return Result(
            format=recall_probe.FORMAT,
            pool=self.records[0].pool.name,
            model=self.model.name,
            threshold=asked.threshold,
            reliable_length=recall_probe.reliable(rows, asked.threshold),
            rows=rows,
            calls=self.cost.calls,
            tokens=self.cost.tokens,
            cost_nano=self.cost.nano,
        )

    def _row(self, length: int) -> Row:
        cells = [Cell(depth, *self._found.get((length, depth), (0, 0))) for depth in self.questions.depths]
        return Row(length, self._longest.get(length), tuple(cells))

    async def _sizes(self) -> tuple[int, int]:
        """The tokens of two short prompts."""
        few, many = [await self._ask(Needle(0, 50, 0), count) for count in SIZING]
        if few is None or many is None:
            raise ProbeFailed("a short prompt was not answered, or its tokens were not reported")
        return few.prompt, many.prompt

    async def _ask(self, needle: Needle, sentences: int) -> _Told | None:
        """One question to the next replica; None where it is not answered or not measured."""
        if not self.services.ledger.healthy:
            raise ProbeFailed("the ledger, where the calls are booked, takes no writes")
        record = self.records[self._turn % len(self.records)]
        self._turn += 1
        body = {
            "model": self.model.engine_name,
            "messages": recall_probe.messages(needle, sentences),
            "max_tokens": self.questions.max_tokens,
            "temperature": 0,
        }
        held = own_call(self.services, record, self.model, msgspec.json.encode(body))
        found = await heard(self.services, held, self.questions.patience_s)
        if found is None:
            return None
        answered, answer = found
        prompt = answered.usage.prompt
        if prompt is None:
            return None
        self.cost.count(answered)
        return _Told(_text_of(answer), prompt)


def _text_of(body: bytes) -> str:
    """The text of a chat answer; empty where it has none."""
    try:
        document: Any = msgspec.json.decode(body)
        text = document["choices"][0]["message"][_CONTENT]
    except (msgspec.DecodeError, LookupError, TypeError):
        return ""
    return text if isinstance(text, str) else ""
