"""What a simulated fleet is asked: tasks of recorded sessions that arrive at random, at a given load. Pure.

Nothing here is drawn from a generator: arrivals and choices follow from a seed and a number by a hash, so
that every policy meets the same tasks at the same times.
"""

from __future__ import annotations

from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.inference.twin_profile import Profile
    from ctxgate.routing.snapshot import LatencyBudget


class Call(Record, frozen=True):
    """One request of a task: tokens of its prompt and its answer, and the pause before it in seconds.

    The prompt begins with the whole prompt of the call before.
    """

    prompt_tokens: int
    output_tokens: int
    think_s: float


class Shape(Record, frozen=True):
    """A session as the fleet sees it. Tasks of the same `head` share its first `head_tokens` tokens."""

    name: str
    kind: str
    head: str | None
    head_tokens: int
    calls: tuple[Call, ...]


class Task(Record, frozen=True):
    """One run of a session, beginning at `at_s`. Tasks share nothing with each other but their heads."""

    number: int
    at_s: float
    shape: Shape
    label: str
    budget: LatencyBudget


class Class(Record, frozen=True):
    """A class of tasks: its budget, and for so many of a hundred tasks of its kinds."""

    label: str
    kinds: tuple[str, ...]
    percent: int
    budget: LatencyBudget


def uniform(seed: str, number: int) -> float:
    """A number in [0, 1), fixed for a pair of seed and number."""
    digest = blake2b(number.to_bytes(8, "big"), digest_size=8, key=seed.encode()[:64]).digest()
    return int.from_bytes(digest, "big") / 2**64


def arrivals(
    shapes: Sequence[Shape], classes: Sequence[Class], per_second: float, until_s: float, seed: str
) -> list[Task]:
    """Poisson arrivals of equally likely sessions before `until_s`, each in one of its kind's classes.

    Raises ValueError for a kind that no class takes.
    """
    tasks: list[Task] = []
    at, number = 0.0, 0
    while True:
        at -= log(1.0 - uniform(f"{seed} gap", number)) / per_second
        if at >= until_s:
            return tasks
        shape = shapes[int(uniform(f"{seed} shape", number) * len(shapes))]
        found = _class(classes, shape.kind, 100 * uniform(f"{seed} class", number))
        tasks.append(Task(number, at, shape, found.label, found.budget))
        number += 1


def _class(classes: Sequence[Class], kind: str, drawn: float) -> Class:
    last: Class | None = None
    for each in classes:
        if kind in each.kinds:
            last = each
            drawn -= each.percent
            if drawn < 0:
                return each
    if last is None:
        raise ValueError(f"no class takes sessions of the kind {kind!r}")
    return last


def work_s(shape: Shape, profile: Profile, kv_tokens: int) -> float:
    """Seconds of one replica that a task takes where every prompt is found in the cache as far as possible.

    A decode step is shared by as many sequences as the profile and the cache allow.
    """
    seconds, before = 0.0, shape.head_tokens
    for call in shape.calls:
        new = max(call.prompt_tokens - before, 1)
        length = call.prompt_tokens + call.output_tokens / 2
        batch = max(1.0, min(profile.max_num_seqs, kv_tokens / length))
        token = profile.step_s / batch + profile.sequence_s + profile.context_s * length
        seconds += profile.prefill(new, call.prompt_tokens) + call.output_tokens * token
        before = call.prompt_tokens
    return seconds


def tasks_per_second(shapes: Sequence[Shape], fleet: Sequence[tuple[Profile, int, int]]) -> float:
    """How many tasks a fleet can take at most; of each kind of replica profile, cached tokens and number."""
    rate = 0.0
    for profile, kv_tokens, replicas in fleet:
        mean = sum(work_s(shape, profile, kv_tokens) for shape in shapes) / len(shapes)
        rate += replicas / mean
    return rate
