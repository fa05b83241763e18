"""The engine of fleet simulations does what the twin does: the same hits, times and evictions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ctxgate.inference.twin import Twin, simulate
from ctxgate.inference.twin_job import Job, Vocabulary
from ctxgate.inference.twin_profile import PROFILES
from ctxgate.routing.engine_cache import Prompt
from ctxgate.routing.engine_model import EngineModel, Sequence

BLOCK = 16
WORDS = Vocabulary(tuple(range(2000, 2100)), 1)


class Traffic:
    """Conversations over three heads, their calls one after the other, at times drawn from a seed."""

    def __init__(self, seed: int, blocks: int) -> None:
        draw = random.Random(seed)
        self.heads = [[draw.randrange(1000) for _ in range(draw.randrange(300))] for _ in range(3)]
        self.calls: list[tuple[float, int, int, int, list[int], int]] = []
        self.lengths: dict[tuple[int, int], int] = {}
        for conversation in range(draw.randrange(2, 12)):
            head = draw.randrange(3)
            at, tokens = draw.random() * 0.2, list(self.heads[head])
            for turn in range(draw.randrange(1, 5)):
                tokens = [*tokens, 1000 + conversation, *(draw.randrange(1000) for _ in range(150))]
                output = draw.randrange(1, 200)
                if len(tokens) + output > min(1400, (blocks - 1) * BLOCK):
                    break
                self.calls.append((at, conversation, turn, head, tokens, output))
                self.lengths[conversation, turn] = len(tokens)
                at += 12 + draw.random()  # after the answer before
        self.calls.sort(key=lambda call: call[0])

    def prompt(self, conversation: int, turn: int, head: int) -> Prompt:
        def common(before: int) -> int:
            return 2**40 if before == turn else self.lengths[conversation, before]

        return Prompt(str(conversation), turn, str(head), len(self.heads[head]) // BLOCK, common)


@pytest.mark.parametrize("seed", range(12))
def test_hits_times_evictions_and_preemptions_are_those_of_the_twin(seed: int) -> None:
    blocks = (92, 100, 200, 1000)[seed % 4]
    profile = replace(PROFILES["fast"], max_num_seqs=(3, 8, 16)[seed % 3], max_num_batched_tokens=256)
    traffic = Traffic(seed, blocks)
    twin = Twin(
        profile, WORDS, blocks=blocks, block_size=BLOCK, max_model_len=min(1456, (blocks - 1) * BLOCK)
    )
    jobs = [
        (at, Job(f"{conversation}-{turn}", tokens, output, ignore_eos=True))
        for at, conversation, turn, _, tokens, output in traffic.calls
    ]
    expected: dict[str, list[float]] = {}
    for output in simulate(twin, jobs):
        told = output.admission
        expected[output.id] = [told.cached, told.first_token, output.at]

    engine = EngineModel(profile, blocks=blocks, block_size=BLOCK)
    found: dict[str, list[float]] = {}
    calls = list(reversed(traffic.calls))
    while calls or engine.ends is not None:
        ends = engine.ends
        if calls and (ends is None or calls[-1][0] <= ends):
            at, conversation, turn, head, tokens, length = calls.pop()
            prompt = traffic.prompt(conversation, turn, head)
            engine.submit(Sequence(f"{conversation}-{turn}", prompt, len(tokens), length, at), at)
            continue
        for done in engine.complete()[1]:
            assert done.cached is not None
            assert done.first_token is not None
            assert done.finished is not None
            found[done.id] = [done.cached, done.first_token, done.finished]

    assert found
    assert found.keys() == expected.keys()
    for name, figures in expected.items():
        assert found[name] == pytest.approx(figures, rel=0, abs=1e-9), name
    assert engine.preemptions == twin.totals.preemptions
    assert (engine.cache.evicted, engine.cache.free) == (twin.pool.evicted, twin.pool.free)


def test_the_traffic_evicts_and_preempts() -> None:
    evicted = preempted = 0
    for seed in (0, 1, 4, 5):
        blocks = (92, 100, 200, 1000)[seed % 4]
        profile = replace(PROFILES["fast"], max_num_seqs=8, max_num_batched_tokens=256)
        twin = Twin(profile, WORDS, blocks=blocks, block_size=BLOCK, max_model_len=(blocks - 1) * BLOCK)
        jobs = [
            (c[0], Job(f"{c[1]}-{c[2]}", c[4], c[5], ignore_eos=True)) for c in Traffic(seed, blocks).calls
        ]
        assert list(simulate(twin, jobs))
        evicted += twin.pool.evicted
        preempted += twin.totals.preemptions
    assert evicted > 500
    assert preempted > 0


def test_a_sequence_longer_than_the_cache_is_refused() -> None:
    engine = EngineModel(PROFILES["fast"], blocks=4, block_size=BLOCK)
    prompt = Prompt("c", 0, None, 0, lambda _: 0)
    with pytest.raises(ValueError, match="longer than the engine's cache"):
        engine.submit(Sequence("c-0", prompt, 40, 9, 0.0), 0.0)


def test_no_step_ends_that_has_not_begun() -> None:
    with pytest.raises(RuntimeError, match="no step"):
        EngineModel(PROFILES["fast"], blocks=4, block_size=BLOCK).complete()
