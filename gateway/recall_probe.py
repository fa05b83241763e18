"""How far back a model still finds what it was told: needles in haystacks, the plan and the result. Pure.

A haystack is one user message of plain sentences. In one place of it, at a depth between its beginning
(0 %) and its end (100 %), stands a sentence with a code, and the question at the end asks for that code.
The lengths are prompt tokens as the engine counts them: two short calls tell how many a sentence takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FORMAT: Final = 1
DEPTHS: Final = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
SHARES: Final = (16, 8, 4, 2)  # of the window: the lengths where none are given, and nine tenths of it
THRESHOLD: Final = 0.9
SIZING: Final = (1, 65)  # sentences of the two calls that measure

_SUBJECTS: Final = ("gardener", "pilot", "baker", "clerk", "sailor", "tailor", "painter", "miller", "doctor")
_VERBS: Final = ("repaired", "carried", "painted", "counted", "hid", "borrowed", "sold", "cleaned")
_OBJECTS: Final = ("ladder", "lamp", "basket", "wheel", "table", "map", "kettle", "curtain", "mirror", "rope")
_PLACES: Final = ("mill", "harbour", "orchard", "station", "bridge", "tower", "market")
_DOORS: Final = ("north gate", "boiler room", "map archive", "east cellar", "seed vault", "bell tower")
_SEPARATORS: Final = re.compile(r"[\s,.\-_]")


class Cell(Record, frozen=True):
    """One depth (in per cent) at one length: needles found of those asked for, unanswered ones left out."""

    depth: int
    found: int
    asked: int

    @property
    def share(self) -> float | None:
        """Found of asked; None where nothing was answered."""
        return self.found / self.asked if self.asked else None


class Row(Record, frozen=True):
    """One length: the one wanted, the longest prompt that was measured (None: none), and its depths."""

    wanted: int
    tokens: int | None
    cells: tuple[Cell, ...]

    @property
    def share(self) -> float | None:
        """The mean over all depths; None where one of them is unknown."""
        shares = [cell.share for cell in self.cells]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known and len(known) == len(shares) else None


class Result(Record, frozen=True):
    """A whole probe of one model on one pool. `rows` by rising length; money in nano-dollars."""

    format: int
    pool: str
    model: str
    threshold: float
    reliable_length: int | None
    rows: tuple[Row, ...]
    calls: int
    tokens: int
    cost_nano: int


@dataclass(frozen=True, slots=True)
class Needle:
    """One question: the haystack's wanted length, its depth in per cent, and which try it is."""

    length: int
    depth: int
    trial: int

    @property
    def number(self) -> int:
        """A number of its own, so that no two haystacks begin alike or hide the same code."""
        return _mixed(self.length * 1_000_003 + self.depth * 1009 + self.trial)

    @property
    def code(self) -> str:
        """Six digits."""
        return str(100_000 + _mixed(self.number + 7) % 900_000)

    @property
    def door(self) -> str:
        """What the code opens."""
        return _DOORS[_mixed(self.number + 11) % len(_DOORS)]


def needles(lengths: Sequence[int], depths: Sequence[int], trials: int) -> Iterator[Needle]:
    """Every question, the short haystacks first."""
    return (Needle(*each) for each in product(sorted(lengths), depths, range(trials)))


def lengths_of(window: int) -> tuple[int, ...]:
    """The lengths for a model of this window, in tokens."""
    return (*(window // share for share in SHARES), window * 9 // 10)


def messages(needle: Needle, sentences: int) -> list[dict[str, Any]]:
    """The chat of a question whose haystack has so many sentences besides the needle."""
    hay = [sentence(needle.number + at) for at in range(sentences)]
    hay.insert(
        round(needle.depth * sentences / 100), f"The access code of the {needle.door} is {needle.code}."
    )
    task = "The following notes are in no order. Read them; a question follows at the end.\n\n"
    question = f"\n\nWhat is the access code of the {needle.door}? Answer with the code alone."
    return [{"role": "user", "content": task + " ".join(hay) + question}]


def sentence(number: int) -> str:
    """A plain sentence without digits."""
    words = (_SUBJECTS, _VERBS, _OBJECTS, _PLACES)
    chosen = [each[_mixed(number * 5 + at) % len(each)] for at, each in enumerate(words)]
    return "The {} {} the {} near the {}.".format(*chosen)


def sentences_for(length: int, measured: tuple[int, int]) -> int:
    """How many sentences make a prompt of about `length` tokens, by the mean of those that were measured.

    `measured`: the tokens of prompts of SIZING sentences. Raises ValueError where these say nothing.
    """
    few, many = SIZING
    each = measured[1] - measured[0]
    if each <= 0:
        raise ValueError("a longer prompt did not take more tokens")
    return max(0, few + (length - measured[0]) * (many - few) // each)


def is_found(needle: Needle, answer: str) -> bool:
    """Whether an answer holds the code, however it is grouped."""
    return needle.code in _SEPARATORS.sub("", answer)


def reliable(rows: Sequence[Row], threshold: float) -> int | None:
    """The longest measured length up to which every length found at least `threshold` of its needles.

    A length of which not all depths are known ends it: unknown is not found. None: not even the first.
    """
    length = None
    for row in sorted(rows, key=lambda row: row.wanted):
        share = row.share
        if share is None or share < threshold or row.tokens is None:
            break
        length = row.tokens
    return length


def encode(result: Result) -> bytes:
    """The result file: one JSON object."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def decode(data: bytes) -> Result:
    """Read a result file. Raises ValueError."""
    try:
        result = msgspec.json.decode(data, type=Result)
    except msgspec.DecodeError as error:
        raise ValueError(f"not the result of a recall probe: {error}") from None
    if result.format != FORMAT:
        raise ValueError(f"a recall probe of format {result.format}; this program knows {FORMAT}")
    return result


def as_text(result: Result) -> str:
    """A table: one line per length, one column per depth, and what follows."""
    depths = [f"{cell.depth}%" for cell in result.rows[0].cells] if result.rows else []
    lines = [["prompt tokens", *depths, "all"]]
    lines += [
        [_count(row.tokens), *(_percent(cell.share) for cell in row.cells), _percent(row.share)]
        for row in result.rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    printed = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    ]
    return "\n".join([printed[0], "-" * len(printed[0]), *printed[1:], "", _verdict(result)]) + "\n"


def _verdict(result: Result) -> str:
    share = _percent(result.threshold)
    if result.reliable_length is None:
        return f"{result.model} on {result.pool}: not even the shortest length finds {share} of the needles."
    found = f"{result.reliable_length:,} tokens"
    return f"{result.model} on {result.pool}: reliable up to {found} ({share} of the needles are found)."


def _count(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{round(share * 100)}%"


def _mixed(number: int) -> int:
    """A number that looks unrelated to its neighbours' (the finalizer of MurmurHash3, 32 bits)."""
    number &= 0xFFFFFFFF
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
