"""A vLLM engine on a virtual clock: queue, batch, blocks, tokens; no clock, no random, no I/O.

The caller owns time. It submits jobs, begins a step, and completes it when the step's end has come:

    step = twin.begin(now)              # None while there is nothing to do
    outputs = twin.complete(step.ends)  # the tokens the step made

Scheduling follows vLLM's V1 scheduler, first come first served: running sequences before waiting ones,
chunked prefill within the token budget, a waiting prompt admitted only when all of it fits, the youngest
running sequence preempted when blocks run out.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from ctxgate.inference.kv_events import DEVICE, Stored
from ctxgate.inference.twin_cache import BlockPool, block_key, event_hash, extend_chain
from ctxgate.inference.twin_job import (
    Admission,
    Output,
    Step,
    Totals,
    answer_digest,
    answer_length,
    answer_token,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ctxgate.inference.kv_events import Event
    from ctxgate.inference.twin_job import Job, Vocabulary
    from ctxgate.inference.twin_profile import Profile


class _Sequence:
    """A job in the engine. The prompt is kept as its chain and its unfinished last block."""

    __slots__ = (
        "admission",
        "answer",
        "arrived",
        "blocks",
        "cached",
        "computed",
        "dropped",
        "job",
        "keys",
        "length",
        "made",
        "published",
        "scheduled",
        "stops_at",
        "tail",
    )

    def __init__(self, job: Job, block_size: int, now: float) -> None:
        self.job = job
        self.arrived = now
        self.scheduled: float | None = None  # for the first time
        self.keys: list[bytes] = []
        extend_chain(self.keys, job.prompt, block_size, job.salt)
        self.tail = list(job.prompt[len(self.keys) * block_size :])
        self.length = len(job.prompt)  # prompt and answer so far
        self.made = 0
        self.computed = 0
        self.cached = 0
        self.published = 0
        self.blocks: list[int] = []
        self.admission: Admission | None = None
        self.dropped = False  # gone while a step was computing it
        self.answer = answer_digest(job.prompt, job.seed)
        self.stops_at = answer_length(self.answer)


class Twin:
    """One engine: a pool of blocks, a queue, a batch."""

    def __init__(
        self, profile: Profile, vocabulary: Vocabulary, *, blocks: int, block_size: int, max_model_len: int
    ) -> None:
        """Raise ValueError where one request of `max_model_len` tokens would not fit the blocks."""
        if (blocks - 1) * block_size < max_model_len:
            raise ValueError(
                f"{blocks} blocks of {block_size} tokens, less the null block, "
                f"are too few for one request of {max_model_len}"
            )
        self.profile = profile
        self.vocabulary = vocabulary
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.pool = BlockPool(blocks)
        self.totals = Totals()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._unfinished: dict[str, _Sequence] = {}
        self._in_flight: list[tuple[_Sequence, int]] | None = None

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    def submit(self, job: Job, now: float) -> None:
        """Queue a job.

        Raises ValueError for an empty prompt, one without room for an answer, or an id in use.
        """
        if not 0 < len(job.prompt) < self.max_model_len or job.max_tokens < 1:
            raise ValueError("a job needs a prompt, and room for at least one token after it")
        if job.id in self._unfinished:
            raise ValueError(f"job {job.id} is not finished yet")
        sequence = _Sequence(job, self.block_size, now)
        self._unfinished[job.id] = sequence
        self._waiting.append(sequence)

    def drop(self, job_id: str, finish: str | None = None) -> bool:
        """End a job early; a token being computed for it is lost. False where it is not known.

        `finish` counts the job as finished for that reason; an aborted job is counted nowhere.
        """
        sequence = self._unfinished.pop(job_id, None)
        if sequence is None:
            return False
        if finish is not None:
            self.totals.finished[finish] += 1
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return True
        self._running.remove(sequence)
        if any(sequence is scheduled for scheduled, _ in self._in_flight or ()):
            sequence.dropped = True
        else:
            self._free(sequence)
        return True

    def begin(self, now: float) -> Step | None:
        """Schedule one step, or return None when there is nothing to compute.

        Raises RuntimeError while a step is in flight.
        """
        if self._in_flight is not None:
            raise RuntimeError("the step before is still in flight")
        scheduled: list[tuple[_Sequence, int]] = []
        budget = self.profile.max_num_batched_tokens
        budget, preempted = self._schedule_running(scheduled, budget)
        if not preempted:
            self._schedule_waiting(scheduled, budget, now)
        if not scheduled:
            return None
        self._in_flight = scheduled
        return self._timed(scheduled, now)

    def complete(self, now: float) -> list[Output]:
        """End the step in flight at `now`, and return its tokens in the batch's order.

        Raises RuntimeError where no step is in flight.
        """
        if self._in_flight is None:
            raise RuntimeError("no step is in flight")
        scheduled, self._in_flight = self._in_flight, None
        outputs: list[Output] = []
        for sequence, tokens in scheduled:
            if sequence.dropped:
                self._free(sequence)
                continue
            sequence.computed += tokens
            if sequence.computed == sequence.length:
                outputs.append(self._advance(sequence, now))
        return outputs

    def _schedule_running(self, scheduled: list[tuple[_Sequence, int]], budget: int) -> tuple[int, bool]:
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            tokens = min(sequence.length - sequence.computed, budget)
            while not self._grow(sequence, sequence.computed + tokens):
                preempted = True
                victim = self._running.pop()
                self._preempt(victim)
                if victim is sequence:
                    return budget, preempted
            scheduled.append((sequence, tokens))
            budget -= tokens
            index += 1
        return budget, preempted

    def _schedule_waiting(self, scheduled: list[tuple[_Sequence, int]], budget: int, now: float) -> None:
        while self._waiting and budget > 0 and len(self._running) < self.profile.max_num_seqs:
            sequence = self._waiting[0]
            tokens = self._admit(sequence, budget, now)
            if tokens is None:
                return
            self._running.append(self._waiting.popleft())
            scheduled.append((sequence, tokens))
            budget -= tokens

    def _admit(self, sequence: _Sequence, budget: int, now: float) -> int | None:
        """Take the blocks of a sequence's first chunk and return its tokens; None where it must wait."""
        limit = (sequence.length - 1) // self.block_size
        hit = self.pool.longest_hit(sequence.keys, limit) if sequence.job.read_cache else []
        needed = -(-sequence.length // self.block_size) - len(hit)
        if needed + sum(map(self.pool.is_free, hit)) > self.pool.free:
            return None
        cached = len(hit) * self.block_size
        tokens = min(sequence.length - cached, budget)
        self.pool.touch(hit)
        sequence.blocks = hit
        sequence.published = len(hit)
        sequence.computed = cached
        self._grow(sequence, cached + tokens)
        if sequence.scheduled is None:
            sequence.scheduled = now
            sequence.cached = cached
            if sequence.job.read_cache:
                self.totals.prefix_cache_queries += sequence.length
                self.totals.prefix_cache_hits += cached
        return tokens

    def _grow(self, sequence: _Sequence, upto: int) -> bool:
        """Give a sequence blocks for its first `upto` tokens and publish the full ones."""
        needed = -(-upto // self.block_size) - len(sequence.blocks)
        if needed > self.pool.free:
            return False
        if needed > 0:
            sequence.blocks += self.pool.allocate(needed)
        start, end = sequence.published, upto // self.block_size
        for index in range(start, end):
            self.pool.publish(sequence.blocks[index], sequence.keys[index])
        if start < end:
            sequence.published = end
            if self.pool.events is not None:
                self.pool.events.append(self._stored(sequence, start, end))
        return True

    def _stored(self, sequence: _Sequence, start: int, end: int) -> Stored:
        """The event of blocks of a sequence that entered the cache."""
        parent = event_hash(sequence.keys[start - 1]) if start else None
        hashes = tuple(map(event_hash, sequence.keys[start:end]))
        return Stored(hashes, parent, self.block_size, DEVICE, sequence.job.session)

    def take_events(self) -> list[Event]:
        """What entered and left the cache since the last call, where `pool.events` is a list."""
        events = self.pool.events or []
        if events:
            self.pool.events = []
        return events

    def _preempt(self, sequence: _Sequence) -> None:
        self._free(sequence)
        self.totals.preemptions += 1
        self._waiting.appendleft(sequence)

    def _free(self, sequence: _Sequence) -> None:
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.published = sequence.computed = 0

    def _timed(self, scheduled: Sequence[tuple[_Sequence, int]], now: float) -> Step:
        seconds = 0.0
        prefill = 0
        contexts: list[int] = []
        for sequence, tokens in scheduled:
            if sequence.made and tokens == 1:
                contexts.append(sequence.length)
            else:
                prefill += tokens
                seconds += self.profile.prefill(tokens, sequence.computed + tokens)
        return Step(now + seconds + self.profile.decode(contexts), prefill, len(contexts))

    def _advance(self, sequence: _Sequence, now: float) -> Output:
        """Append the next token and say how far the job is; a finished one leaves."""
        job = sequence.job
        if sequence.admission is None:
            sequence.admission = self._first_token(sequence, now)
        index = sequence.made
        ends = not job.ignore_eos and index + 1 >= max(sequence.stops_at, job.min_tokens)
        token = self.vocabulary.end if ends else answer_token(sequence.answer, index, self.vocabulary)
        sequence.made += 1
        sequence.length += 1
        sequence.tail.append(token)
        if len(sequence.tail) == self.block_size:
            self._close_block(sequence)
        self.totals.generation_tokens += 1
        full = sequence.made >= job.max_tokens or sequence.length >= self.max_model_len
        finish = "stop" if ends else "length" if full else None
        if finish is not None:
            self.totals.finished[finish] += 1
            del self._unfinished[job.id]
            self._running.remove(sequence)
            self._free(sequence)
        return Output(job.id, index, token, now, finish, sequence.admission)

    def _close_block(self, sequence: _Sequence) -> None:
        salt = None if sequence.keys else sequence.job.salt
        parent = sequence.keys[-1] if sequence.keys else b""
        sequence.keys.append(block_key(parent, sequence.tail, salt))
        sequence.tail = []

    def _first_token(self, sequence: _Sequence, now: float) -> Admission:
        prompt = len(sequence.job.prompt)
        self.totals.prompt_tokens += prompt
        self.totals.prompt_tokens_cached += sequence.cached
        scheduled = sequence.arrived if sequence.scheduled is None else sequence.scheduled
        created = max(0, prompt // self.block_size * self.block_size - sequence.cached)
        return Admission(sequence.arrived, scheduled, now, sequence.cached, created)


def simulate(twin: Twin, arrivals: Iterable[tuple[float, Job]]) -> Iterator[Output]:
    """Run jobs that arrive at given times to their end, and yield every token in order of time."""
    pending = [(at, number, job) for number, (at, job) in enumerate(arrivals)]
    heapq.heapify(pending)
    now = 0.0
    while True:
        while pending and pending[0][0] <= now:
            at, _, job = heapq.heappop(pending)
            twin.submit(job, at)
        step = twin.begin(now)
        if step is not None:
            now = step.ends
            yield from twin.complete(now)
        elif pending:
            now = pending[0][0]
        else:
            return
