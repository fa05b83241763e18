"""An engine for simulations of whole fleets: the schedule of `inference.twin`, without its tokens. Pure.

The twin makes every token and hashes every block. Here a prompt is a length and what it shares with
earlier ones, and steps in which all running sequences only decode are taken at once, up to the next
arrival or end: nothing else can change between. Cached tokens and times are those of the twin.

The caller owns time: `ends` says when the steps under way are over, `complete` ends them and begins the
next ones.
"""

from __future__ import annotations

from collections import deque
from math import ceil, sqrt
from typing import TYPE_CHECKING

from ctxgate.routing.engine_cache import Prompt, RunCache

if TYPE_CHECKING:
    from ctxgate.inference.twin_profile import Profile


class Sequence:
    """One request in an engine: its lengths, and what became of it. Times are seconds."""

    __slots__ = (
        "arrived",
        "cached",
        "computed",
        "finished",
        "first_token",
        "id",
        "length",
        "made",
        "output",
        "prompt",
        "prompt_tokens",
    )

    def __init__(self, id_: str, prompt: Prompt, prompt_tokens: int, output: int, arrived: float) -> None:
        """`output` tokens are made of a prompt of `prompt_tokens`; both at least 1."""
        self.id = id_
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        self.output = output
        self.arrived = arrived
        self.length = prompt_tokens  # prompt and answer so far
        self.made = 0
        self.computed = 0
        self.cached: int | None = None  # tokens found when first admitted
        self.first_token: float | None = None
        self.finished: float | None = None


class _Steps:
    """Steps under way: one of any kind, or several in which `sequences` decode and nothing else happens.

    Step j, from 0, takes `first_s + j * more_s`.
    """

    __slots__ = ("chunks", "count", "first_s", "more_s", "started")

    def __init__(
        self, chunks: list[tuple[Sequence, int]], started: float, count: int, first_s: float, more_s: float
    ) -> None:
        self.chunks = chunks
        self.started = started
        self.count = count
        self.first_s = first_s
        self.more_s = more_s

    def end(self, count: int) -> float:
        return self.started + count * self.first_s + self.more_s * (count * (count - 1) // 2)


class EngineModel:
    """One engine: a cache of blocks, a queue, a batch, on the caller's clock."""

    def __init__(self, profile: Profile, *, blocks: int, block_size: int) -> None:
        self.profile = profile
        self.cache = RunCache(blocks, block_size)
        self.preemptions = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._steps: _Steps | None = None

    @property
    def ends(self) -> float | None:
        """When the steps under way are over; None while there are none."""
        return None if self._steps is None else self._steps.end(self._steps.count)

    def submit(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence; it is looked at when the step under way is over.

        Raises ValueError for one that would not fit the engine alone.
        """
        cache = self.cache
        if sequence.prompt_tokens + sequence.output > (cache.size - 1) * cache.block:
            raise ValueError(f"{sequence.id} is longer than the engine's cache")
        self.waiting.append(sequence)
        if self._steps is None:
            self._begin(now)
        else:
            _shorten(self._steps, now)

    def complete(self) -> tuple[list[Sequence], list[Sequence]]:
        """End the steps under way and begin the next; sequences with a first token now, and finished ones.

        Raises RuntimeError where no step is under way.
        """
        steps = self._steps
        if steps is None:
            raise RuntimeError("no step is under way")
        now, self._steps = steps.end(steps.count), None
        begun: list[Sequence] = []
        finished: list[Sequence] = []
        if steps.count > 1:  # of one step, the blocks were taken when it began
            for sequence, _ in steps.chunks:
                self._hold(sequence, sequence.computed + steps.count)
        for sequence, tokens in steps.chunks:
            sequence.computed += tokens + steps.count - 1
            if sequence.computed < sequence.length:
                continue
            if sequence.first_token is None:
                sequence.first_token = now
                begun.append(sequence)
            sequence.made += steps.count
            sequence.length += steps.count
            if sequence.made >= sequence.output:
                sequence.finished = now
                finished.append(sequence)
                self.running.remove(sequence)
                self._release(sequence)
        self._begin(now)
        return begun, finished

    def _begin(self, now: float) -> None:
        chunks: list[tuple[Sequence, int]] = []
        budget, preempted = self._continue(chunks, self.profile.max_num_batched_tokens)
        if not preempted:
            self._admit_all(chunks, budget)
        if not chunks:
            return
        profile = self.profile
        seconds, contexts, decoding = 0.0, 0, 0
        for sequence, tokens in chunks:
            if sequence.made and tokens == 1:
                contexts += sequence.length
                decoding += 1
            else:
                seconds += profile.prefill(tokens, sequence.computed + tokens)
        more = 0.0
        if decoding:
            more = profile.context_s * decoding
            seconds += profile.step_s + profile.sequence_s * decoding + profile.context_s * contexts
        count = 1 if decoding < len(chunks) else self._alike(chunks)
        self._steps = _Steps(chunks, now, count, seconds, more)

    def _alike(self, chunks: list[tuple[Sequence, int]]) -> int:
        """How many steps can follow in which the same sequences decode: until one ends or blocks run out."""
        count = min(sequence.output - sequence.made for sequence, _ in chunks)
        block = self.cache.block
        needed = sum(-(-(s.computed + count) // block) - s.prompt.held for s, _ in chunks)
        return count if needed <= self.cache.free else 1

    def _continue(self, chunks: list[tuple[Sequence, int]], budget: int) -> tuple[int, bool]:
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = min(sequence.length - sequence.computed, budget)
            while not self._hold(sequence, sequence.computed + tokens):
                preempted = True
                victim = self.running.pop()
                self._release(victim)
                victim.computed = 0
                self.preemptions += 1
                self.waiting.appendleft(victim)
                if victim is sequence:
                    return budget, preempted
            chunks.append((sequence, tokens))
            budget -= tokens
            index += 1
        return budget, preempted

    def _admit_all(self, chunks: list[tuple[Sequence, int]], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.profile.max_num_seqs:
            sequence = self.waiting[0]
            tokens = self._admit(sequence, budget)
            if tokens is None:
                return
            self.running.append(self.waiting.popleft())
            chunks.append((sequence, tokens))
            budget -= tokens

    def _admit(self, sequence: Sequence, budget: int) -> int | None:
        cache, prompt = self.cache, sequence.prompt
        hit, free = cache.hit(prompt, (sequence.length - 1) // cache.block)
        if -(-sequence.length // cache.block) - hit + free > cache.free:
            return None
        cached = hit * cache.block
        tokens = min(sequence.length - cached, budget)
        cache.take(prompt, hit)
        sequence.computed = cached
        self._hold(sequence, cached + tokens)
        if sequence.cached is None:
            sequence.cached = cached
        return tokens

    def _hold(self, sequence: Sequence, upto: int) -> bool:
        """Give a sequence blocks for its first `upto` tokens; the full ones can be found from now on."""
        cache = self.cache
        if not cache.grow(sequence.prompt, -(-upto // cache.block)):
            return False
        cache.publish(sequence.prompt, upto // cache.block)
        return True

    def _release(self, sequence: Sequence) -> None:
        # Tokens are computed as soon as they are scheduled: the last one made is not.
        self.cache.release(sequence.prompt, min(sequence.computed // self.cache.block, sequence.prompt.held))


def _shorten(steps: _Steps, now: float) -> None:
    """Let the steps end with the one that is under way at `now`."""
    if steps.count == 1:
        return
    count = max(_count_at(steps, now), 1)
    while count > 1 and steps.end(count - 1) >= now:
        count -= 1
    while count < steps.count and steps.end(count) < now:
        count += 1
    steps.count = min(count, steps.count)


def _count_at(steps: _Steps, now: float) -> int:
    elapsed = now - steps.started
    if steps.more_s <= 0.0:
        return ceil(elapsed / steps.first_s) if steps.first_s > 0.0 else steps.count
    half = steps.first_s / steps.more_s - 0.5
    return ceil(sqrt(half * half + 2 * elapsed / steps.more_s) - half)
