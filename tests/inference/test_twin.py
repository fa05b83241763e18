"""The engine model on a virtual clock: hits, times, batches, preemption, early ends."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.inference.twin import Twin, simulate
from ctxgate.inference.twin_job import Job, Vocabulary, answer_digest, answer_length
from ctxgate.inference.twin_profile import PROFILES, Profile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ctxgate.inference.twin_job import Output

VOCABULARY: Final = Vocabulary(words=tuple(range(100, 200)), end=2)
SHAPE: Final = Profile(
    name="test",
    linear_s=0.001,
    attention_s=0.00001,
    step_s=0.01,
    sequence_s=0.002,
    context_s=0.0,
    max_num_seqs=4,
    max_num_batched_tokens=1000,
)


def twin(*, blocks: int = 1000, block_size: int = 32, window: int = 4096, shape: Profile = SHAPE) -> Twin:
    return Twin(shape, VOCABULARY, blocks=blocks, block_size=block_size, max_model_len=window)


def job(name: str, prompt: Iterable[int], tokens: int = 1, **more: Any) -> Job:
    return replace(Job(name, list(prompt), tokens, ignore_eos=True), **more)


def run(engine: Twin, *jobs: Job) -> dict[str, list[Output]]:
    """All jobs at once, to the end."""
    outputs: dict[str, list[Output]] = {}
    for output in simulate(engine, [(0.0, job) for job in jobs]):
        outputs.setdefault(output.id, []).append(output)
    return outputs


def cached(engine: Twin, one: Job) -> int:
    return run(engine, one)[one.id][0].admission.cached


@pytest.mark.parametrize(("length", "hit"), [(128, 96), (126, 96), (129, 128), (33, 32), (32, 0), (1, 0)])
def test_a_repeat_hits_whole_blocks_short_of_the_last_token(length: int, hit: int) -> None:
    engine = twin()
    assert cached(engine, job("a", [5] * length)) == 0
    assert cached(engine, job("b", [5] * length)) == hit
    assert engine.totals.prompt_tokens == 2 * length
    assert engine.totals.prompt_tokens_cached == engine.totals.prefix_cache_hits == hit


def test_created_counts_full_blocks_of_the_prompt_beyond_the_hit() -> None:
    engine = twin()
    first = run(engine, job("a", range(196)))["a"][0].admission
    longer = run(engine, job("b", range(300)))["b"][0].admission
    assert (first.cached, first.created) == (0, 192)
    assert (longer.cached, longer.created) == (192, 288 - 192)


def test_a_salt_isolates() -> None:
    engine = twin()
    assert [
        cached(engine, job(str(number), [5] * 128, salt=salt))
        for number, salt in enumerate((None, "a", "a", "b", None))
    ] == [0, 0, 96, 0, 96]


def test_answers_are_cached_as_their_blocks_fill() -> None:
    engine = twin()
    prompt = list(range(200, 240))
    answer = [output.token for output in run(engine, job("a", prompt, tokens=60))["a"]]
    # Of the 100 tokens, the last was never computed: 99 fill 3 blocks.
    assert cached(engine, job("b", [*prompt, *answer, 1])) == 96


def test_an_uncomputed_last_token_keeps_its_block_open() -> None:
    engine = twin()
    answer = [output.token for output in run(engine, job("a", [7] * 40, tokens=24))["a"]]
    assert cached(engine, job("b", [7] * 40 + answer + [1] * 10)) == 32  # 64 tokens, 63 computed


def test_prompt_logprobs_skip_reading_but_still_write() -> None:
    engine = twin()
    run(engine, job("a", [5] * 128))
    silent = run(engine, job("b", [5] * 128, read_cache=False))["b"][0].admission
    assert (silent.cached, silent.created) == (0, 128)
    assert engine.totals.prefix_cache_queries == 128


def test_time_to_first_token_follows_the_formula() -> None:
    engine = twin()
    first = run(engine, job("a", [5] * 320))["a"][0]
    assert first.at == pytest.approx(0.001 * 320 + 0.00001 * 320 * (320 - 160))
    second = run(engine, job("b", [5] * 330))["b"][0]  # 320 hit, 10 new behind them
    assert second.at == pytest.approx(0.001 * 10 + 0.00001 * 10 * (330 - 5))


def test_chunks_cost_what_the_whole_costs() -> None:
    whole = SHAPE.prefill(900, 900)
    assert SHAPE.prefill(400, 400) + SHAPE.prefill(300, 700) + SHAPE.prefill(200, 900) == pytest.approx(whole)
    chunked = twin(shape=replace(SHAPE, max_num_batched_tokens=128))
    assert run(chunked, job("a", range(900)))["a"][0].at == pytest.approx(whole)


def test_a_decode_step_takes_longer_in_a_larger_batch() -> None:
    def gap(batch: int) -> float:
        outputs = run(twin(), *[job(str(n), [n + 1] * 10, tokens=3) for n in range(batch)])["0"]
        return outputs[2].at - outputs[1].at

    assert gap(1) == pytest.approx(0.01 + 0.002)
    assert gap(4) == pytest.approx(0.01 + 4 * 0.002)


def test_the_batch_is_bounded_and_the_rest_waits_its_turn() -> None:
    engine = twin()
    for number in range(6):
        engine.submit(job(str(number), [number + 1] * 10, tokens=2), 0.0)
    step = engine.begin(0.0)
    assert step is not None
    assert (engine.running, engine.waiting, step.prefill_tokens, step.decoding) == (4, 2, 40, 0)
    outputs = run(twin(), *[job(str(n), [n + 1] * 10, tokens=2) for n in range(6)])
    done = outputs["0"][-1].at
    assert outputs["4"][0].admission.scheduled == pytest.approx(done)
    assert outputs["4"][0].admission.arrived == 0.0


def test_simultaneous_equal_prompts_share_blocks_at_once() -> None:
    outputs = run(twin(), job("a", [5] * 100), job("b", [5] * 100))
    assert [outputs[name][0].admission.cached for name in "ab"] == [0, 96]


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    engine = twin(blocks=5, block_size=4, window=16)
    outputs = run(engine, job("a", [1] * 10, tokens=2), job("b", [2] * 10, tokens=2))
    assert outputs["b"][0].admission.scheduled == pytest.approx(outputs["a"][-1].at)
    assert engine.totals.preemptions == 0


def test_the_youngest_is_preempted_when_blocks_run_out_and_still_ends() -> None:
    engine = twin(blocks=7, block_size=4, window=24)
    outputs = run(engine, job("a", [1] * 10, tokens=9), job("b", [2] * 10, tokens=9))
    assert engine.totals.preemptions > 0
    assert [len(outputs[name]) for name in "ab"] == [9, 9]
    assert outputs["a"][-1].at < outputs["b"][-1].at
    assert engine.totals.prompt_tokens == 20  # a preempted prompt counts once
    assert engine.totals.prefix_cache_queries == 20
    assert engine.pool.usage == 0.0


def test_equal_jobs_get_equal_answers_and_seeds_differ() -> None:
    def words(**more: Any) -> list[int]:
        return [output.token for output in run(twin(), job("a", [5] * 20, tokens=30, **more))["a"]]

    assert words() == words()
    assert words() != words(seed=1)
    assert all(token in VOCABULARY.words for token in words())


def test_an_answer_let_alone_ends_with_the_end_token() -> None:
    prompt = [5] * 20
    outputs = run(twin(), job("a", prompt, tokens=1000, ignore_eos=False))["a"]
    assert len(outputs) == answer_length(answer_digest(prompt, 0))
    assert outputs[-1].token == VOCABULARY.end
    assert [output.finish for output in outputs] == [None] * (len(outputs) - 1) + ["stop"]


def test_min_tokens_puts_off_the_end() -> None:
    engine = twin()
    outputs = run(engine, job("a", [5] * 20, tokens=1000, ignore_eos=False, min_tokens=400))["a"]
    assert len(outputs) == 400
    assert engine.totals.finished == {"stop": 1, "length": 0}


def test_the_window_ends_an_answer() -> None:
    outputs = run(twin(window=128), job("a", [5] * 100, tokens=1000))["a"]
    assert (len(outputs), outputs[-1].finish) == (28, "length")


def test_a_job_dropped_in_the_queue_costs_nothing() -> None:
    engine = twin()
    engine.submit(job("a", [5] * 100), 0.0)
    assert engine.drop("a")
    assert not engine.drop("a")
    assert engine.begin(0.0) is None
    assert engine.totals.prompt_tokens == engine.totals.prefix_cache_queries == 0


def test_a_job_dropped_during_its_step_keeps_its_blocks_until_the_end() -> None:
    engine = twin()
    engine.submit(job("a", [5] * 100, tokens=5), 0.0)
    step = engine.begin(0.0)
    assert step is not None
    assert engine.drop("a")
    assert engine.pool.usage > 0
    assert engine.complete(step.ends) == []
    assert engine.pool.usage == 0.0
    assert engine.totals.generation_tokens == engine.totals.prompt_tokens == 0
    assert cached(engine, job("b", [5] * 100)) == 96  # what it computed stays cached


def test_a_job_dropped_between_steps_frees_its_blocks_at_once() -> None:
    engine = twin()
    engine.submit(job("a", [5] * 100, tokens=5), 0.0)
    step = engine.begin(0.0)
    assert step is not None
    assert len(engine.complete(step.ends)) == 1
    assert engine.drop("a")
    assert (engine.pool.usage, engine.running) == (0.0, 0)
    assert (engine.totals.generation_tokens, engine.totals.prompt_tokens) == (1, 100)
    assert engine.totals.finished == {"stop": 0, "length": 0}


def test_misuse_is_refused() -> None:
    engine = twin(window=128)
    with pytest.raises(ValueError, match="too few"):
        twin(blocks=4, window=128)  # three usable blocks of 32
    for bad in (job("a", []), job("a", [1] * 128), job("a", [1], tokens=0)):
        with pytest.raises(ValueError, match="room"):
            engine.submit(bad, 0.0)
    with pytest.raises(RuntimeError, match="no step"):
        engine.complete(0.0)
    engine.submit(job("a", [1], tokens=5), 0.0)
    with pytest.raises(ValueError, match="not finished"):
        engine.submit(job("a", [2]), 0.0)
    engine.begin(0.0)
    with pytest.raises(RuntimeError, match="in flight"):
        engine.begin(0.0)


def test_fast_is_faster_with_a_smaller_batch() -> None:
    fast, standard = PROFILES["fast"], PROFILES["standard"]
    assert fast.max_num_seqs < standard.max_num_seqs
    assert fast.prefill(1000, 50_000) < standard.prefill(1000, 50_000) / 2
    assert fast.decode([50_000] * 8) < standard.decode([50_000] * 8) / 2


def test_scaling_changes_times_alone() -> None:
    quick = PROFILES["fast"].scaled(0.1)
    assert quick.prefill(100, 100) == pytest.approx(PROFILES["fast"].prefill(100, 100) / 10)
    assert quick.decode([100, 200]) == pytest.approx(PROFILES["fast"].decode([100, 200]) / 10)
    assert quick.max_num_seqs == PROFILES["fast"].max_num_seqs
    assert PROFILES["fast"].scaled(0).decode([5]) == 0


def test_arrivals_are_served_in_time() -> None:
    arrivals = [(5.0, job("late", [1] * 10)), (1.0, job("early", [2] * 10))]
    outputs = list(simulate(twin(), arrivals))
    assert [output.id for output in outputs] == ["early", "late"]
    assert outputs[0].at == pytest.approx(1.0 + SHAPE.prefill(10, 10))
    assert outputs[1].admission.arrived == outputs[1].admission.scheduled == 5.0
