"""What layout wants to know of a tenant's earlier prompts: questions to a store."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec

S = TypeVar("S")
T = TypeVar("T")
Text: TypeAlias = "bytes | msgspec.Raw"
Answer: TypeAlias = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Ask:
    """A question by keys of 32 bytes.

    The answer holds, for every key of `claims`, the text that was claimed first under that key, now or
    ever before by any process; and for each of `reads` the text under it, where there is one.
    """

    claims: Mapping[bytes, Text] = field(repr=False)
    reads: Sequence[bytes] = ()


Asking: TypeAlias = Generator[Ask, Answer, T]
"""A computation that yields what it wants to know and is sent the answers."""


def together(one: Asking[S], two: Asking[T]) -> Asking[tuple[S, T]]:
    """Two computations side by side: what both want to know at a time is one question."""
    first, second = _Running(one), _Running(two)
    while first.ask is not None or second.ask is not None:
        asks = [each.ask for each in (first, second) if each.ask is not None]
        claims = {key: text for ask in asks for key, text in ask.claims.items()}
        answer = yield Ask(claims, [key for ask in asks for key in ask.reads if key not in claims])
        first.send(answer)
        second.send(answer)
    return first.result[0], second.result[0]


class _Running(Generic[T]):
    """A computation and what it wants to know now; `result` is empty until it ends."""

    def __init__(self, work: Asking[T]) -> None:
        self._work = work
        self.ask: Ask | None = None
        self.result: list[T] = []
        self._go(None)

    def send(self, answer: Answer) -> None:
        if self.ask is not None:
            self._go(answer)

    def _go(self, answer: Answer | None) -> None:
        try:
            self.ask = next(self._work) if answer is None else self._work.send(answer)
        except StopIteration as end:
            self.ask = None
            self.result.append(end.value)
