"""What goes into the engine model and what comes out of it: jobs, tokens, steps, counters.

Answers are a pure function of the prompt and the job's seed: the same job gives the same tokens anywhere.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_ANSWER: Final = 16  # tokens of the shortest answer that ends by itself
MEAN_SPREAD: Final = 240  # answers are up to this much longer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What answers are made of: the ids of printable words, and the id that ends an answer."""

    words: tuple[int, ...]
    end: int


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate. Ids are unique among unfinished jobs; `max_tokens` is at least 1."""

    id: str
    prompt: Sequence[int]
    max_tokens: int
    salt: str | None = None
    seed: int = 0  # equal prompts with different seeds get different answers
    ignore_eos: bool = False
    min_tokens: int = 0
    read_cache: bool = True  # vLLM skips the lookup when prompt log-probabilities are asked for
    session: str | None = None  # whose events say who stored a block


@dataclass(frozen=True, slots=True)
class Admission:
    """What is fixed when a job's first token comes: times in seconds, prefix tokens hit and written."""

    arrived: float
    scheduled: float
    first_token: float
    cached: int
    created: int


@dataclass(frozen=True, slots=True)
class Output:
    """One token of a job. `finish` is None, "stop" or "length"."""

    id: str
    index: int
    token: int
    at: float
    finish: str | None
    admission: Admission


@dataclass(frozen=True, slots=True)
class Step:
    """A step in flight: when it ends, the prompt tokens it computes, the sequences it decodes."""

    ends: float
    prefill_tokens: int
    decoding: int


@dataclass(slots=True)
class Totals:
    """Counters since the start, named after vLLM's metrics."""

    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0})


def answer_digest(prompt: Sequence[int], seed: int) -> bytes:
    """What the whole answer is derived from."""
    return blake2b(array("I", prompt), digest_size=16, salt=seed.to_bytes(16, "big", signed=True)).digest()


def answer_length(digest: bytes) -> int:
    """The tokens of an answer that is let to end by itself, its end token included."""
    return MIN_ANSWER + int.from_bytes(digest[:4], "big") % MEAN_SPREAD


def answer_token(digest: bytes, index: int, vocabulary: Vocabulary) -> int:
    """The `index`-th token of an answer, as long as it has not ended."""
    drawn = blake2b(index.to_bytes(8, "big"), digest_size=8, key=digest).digest()
    return vocabulary.words[int.from_bytes(drawn, "big") % len(vocabulary.words)]
