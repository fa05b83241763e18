"""The block pool against a plain model of it, and the bounds every hit obeys."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ctxgate.inference.twin import Twin, simulate
from ctxgate.inference.twin_cache import BlockPool, extend_chain
from ctxgate.inference.twin_job import Job, Vocabulary
from ctxgate.inference.twin_profile import PROFILES

VOCABULARY = Vocabulary(words=tuple(range(50, 60)), end=2)
# Few tokens and few lengths, so that prompts share prefixes.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=40)
SALTS = st.sampled_from([None, "a", "b"])


def twin(blocks: int, block_size: int) -> Twin:
    return Twin(PROFILES["fast"], VOCABULARY, blocks=blocks, block_size=block_size, max_model_len=64)


def hit(engine: Twin, number: int, prompt: list[int], salt: str | None, tokens: int = 1) -> int:
    job = Job(str(number), prompt, tokens, salt=salt, ignore_eos=True)
    first, *_ = simulate(engine, [(0.0, job)])
    return first.admission.cached


@given(st.lists(st.tuples(PROMPTS, SALTS), max_size=12), st.sampled_from([1, 2, 4, 8]))
def test_with_room_for_all_the_hit_is_the_longest_shared_prefix(
    requests: list[tuple[list[int], str | None]], block_size: int
) -> None:
    engine = twin(blocks=2000, block_size=block_size)
    seen: list[tuple[list[int], str | None]] = []
    for number, (prompt, salt) in enumerate(requests):
        shared = [
            next((at for at, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
            for other, other_salt in seen
            if other_salt == salt
        ]
        lengths = [
            at if at is not None else min(len(prompt), len(other))
            for at, other in zip(shared, [o for o, s in seen if s == salt], strict=True)
        ]
        longest = min(max(lengths, default=0), len(prompt) - 1)
        assert hit(engine, number, prompt, salt) == longest // block_size * block_size
        seen.append((prompt, salt))


@given(
    st.lists(st.tuples(PROMPTS, SALTS, st.integers(1, 20)), max_size=25),
    st.sampled_from([(9, 8), (17, 4), (18, 4), (40, 2)]),
)
def test_under_eviction_hits_stay_whole_and_short_and_blocks_come_back(
    requests: list[tuple[list[int], str | None, int]], pool: tuple[int, int]
) -> None:
    blocks, block_size = pool
    engine = twin(blocks, block_size)
    ideal = twin(5000, block_size)
    for number, (prompt, salt, tokens) in enumerate(requests):
        got = hit(engine, number, prompt, salt, tokens)
        assert got % block_size == 0
        assert got <= (len(prompt) - 1) // block_size * block_size
        assert got <= hit(ideal, number, prompt, salt, tokens)
        assert (engine.pool.free, engine.running, engine.waiting) == (blocks - 1, 0, 0)
    assert engine.totals.prompt_tokens == sum(len(prompt) for prompt, _, _ in requests)
    assert engine.totals.generation_tokens == sum(tokens for _, _, tokens in requests)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(PROMPTS, st.integers(1, 20), st.floats(0, 0.5)), min_size=1, max_size=20),
    st.sampled_from([(9, 8), (18, 4)]),
)
def test_concurrent_jobs_all_end_with_their_tokens_in_order(
    arrivals: list[tuple[list[int], int, float]], pool: tuple[int, int]
) -> None:
    engine = twin(*pool)
    jobs = [
        (at, Job(str(number), prompt, tokens, ignore_eos=True))
        for number, (prompt, tokens, at) in enumerate(arrivals)
    ]
    outputs = list(simulate(engine, jobs))
    assert [output.at for output in outputs] == sorted(output.at for output in outputs)
    for at, job in jobs:
        own = [output for output in outputs if output.id == job.id]
        assert [output.index for output in own] == list(range(job.max_tokens))
        assert [output.finish for output in own] == [None] * (job.max_tokens - 1) + ["length"]
        assert at == own[0].admission.arrived <= own[0].admission.scheduled <= own[0].at
    assert engine.pool.free == pool[0] - 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 6)), st.tuples(st.just("give"), st.integers(0, 9))
        ),
        max_size=40,
    )
)
def test_the_free_queue_is_the_one_described(actions: list[tuple[str, int]]) -> None:
    """Unhashed blocks return to the front, hashed ones to the end, each tail first."""
    pool = BlockPool(20)
    queue = list(range(1, 20))
    held: list[tuple[list[int], int]] = []
    for number, (action, count) in enumerate(actions):
        if action == "take" and count <= len(queue):
            expected, queue = queue[:count], queue[count:]
            blocks = pool.allocate(count)
            assert blocks == expected
            keys: list[bytes] = []
            extend_chain(keys, [number] * count, 1)
            hashed = count // 2  # the leading half is full, the rest is not
            for block, key in zip(blocks[:hashed], keys, strict=False):
                pool.publish(block, key)
            held.append((blocks, hashed))
        elif action == "give" and held:
            blocks, hashed = held.pop(count % len(held))
            pool.release(reversed(blocks))
            queue = blocks[hashed:][::-1] + queue + blocks[:hashed][::-1]
    assert pool.free == len(queue)
    assert pool.allocate(len(queue)) == queue
