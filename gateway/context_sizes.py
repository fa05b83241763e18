"""How long prompts are: sizes of messages, and what a process has learned of each model's tokens.

A length is what the engine measured for the conversation's last request, and an estimate of what has come
since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from ctxgate.compression.recent import Recent
from ctxgate.inference.lengths import NOTHING, Calibration, Measure, measure
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ctxgate.compression.ask import Text
    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.gateway.config import Model
    from ctxgate.inference.wire import Body

MEASURED_MESSAGES: Final = 300_000
KNOWN_SPREAD: Final = 0.03
"""How far a length lies from the estimate at most, where the conversation's last request was measured."""

UNKNOWN_SPREAD: Final = 0.3
"""The same of text that was not."""


class Estimate(Record, frozen=True):
    """Tokens of a prompt, and by how many the real length may differ."""

    tokens: int
    spread: int

    def is_near(self, edge: int) -> bool:
        """Whether the real length may lie on either side of an edge."""
        return abs(self.tokens - edge) <= self.spread


class Counting(Protocol):
    """Counts the tokens of messages exactly, where it can."""

    async def count(self, model: Model, facts: Sequence[Facts], messages: Sequence[Text]) -> int | None:
        """Tokens of messages; None where the model has no usable tokenizer."""
        ...


class Lengths:
    """Estimates by bytes, calibrated per model. What is known of a message is remembered by its digest."""

    def __init__(self) -> None:
        self._calibrations: dict[str, Calibration] = {}  # by configured names, so it is bounded
        self._measures: Recent[bytes, Measure] = Recent(MEASURED_MESSAGES)

    def of(self, model: str) -> Calibration:
        """The calibration of a model."""
        return self._calibrations.get(model, Calibration())

    def learn(self, model: str, size: Measure, tokens: int) -> None:
        """Note a text that measured `tokens`."""
        self._calibrations[model] = self.of(model).learned(size, tokens)

    def knows(self, facts: Facts) -> bool:
        """Whether the size of a message is remembered."""
        return self._measures.get(facts.digest) is not None

    def sizes(self, facts: Sequence[Facts], messages: Sequence[Text]) -> list[Measure]:
        """The size of each message."""
        found = self._measures.get_all([each.digest for each in facts])
        sizes: list[Measure] = []
        for at, known in enumerate(found):
            size = known
            if size is None:
                size = measure(messages[at])
                self._measures.put(facts[at].digest, size)
            sizes.append(size)
        return sizes


def total(sizes: Iterable[Measure]) -> Measure:
    """All sizes together."""
    plain = wide = media = 0
    for size in sizes:
        plain += size.plain
        wide += size.wide
        media += size.media
    return Measure(plain, wide, media)


def size_of_tools(body: Body) -> Measure:
    """The size of a request's tools."""
    return NOTHING if body.get("tools") is None else measure(body.get("tools") or b"")
