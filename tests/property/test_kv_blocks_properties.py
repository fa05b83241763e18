"""The tree of cache blocks against a plain count of copies, whatever is stored, removed and reset."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.routing.kv_blocks import Blocks, Node, common, depth, run

GPU, CPU = "GPU", "CPU"
# A prompt is its blocks; a block's number names the whole path up to it, as an engine's hash does.
Prompt: TypeAlias = tuple[int, ...]
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("store"), PROMPTS, st.integers(0, 7), st.sampled_from([GPU, CPU])),
    st.tuples(st.just("remove"), PROMPTS, st.just(0), st.sampled_from([GPU, CPU])),
    st.tuples(st.just("clear"), st.just((0,)), st.just(0), st.just(GPU)),
)


def name(path: Prompt) -> int:
    return int("1" + "".join(map(str, path)), 2)


@given(st.lists(STEPS, max_size=25))
def test_a_path_is_there_as_far_as_a_plain_count_says(steps: list[tuple[str, Prompt, int, str]]) -> None:
    tree, copies, ends = Blocks(GPU), Counter[tuple[Prompt, str]](), dict[Prompt, Node]()
    known, strays = set[Prompt](), 0
    for what, prompt, wanted, tier in steps:
        if what == "store":
            start = min(wanted, len(prompt) - 1)
            while prompt[:start] and prompt[:start] not in known:
                start -= 1  # an engine stores nothing behind a block that it never had
            paths = [prompt[: end + 1] for end in range(start, len(prompt))]
            stretch = tree.store(
                [name(path) for path in paths], name(prompt[:start]) if start else None, tier
            )
            assert stretch is not None
            assert (stretch.before is None) == (start == 0)
            copies.update((path, tier) for path in paths)
            known.update(paths)
            ends[prompt] = stretch.last
        elif what == "remove":
            tree.remove([name(prompt)], tier)
            strays += not copies[prompt, tier]
            copies[prompt, tier] = max(copies[prompt, tier] - 1, 0)
        else:
            tree.clear()
            copies.clear()
        check_runs(tree, copies, ends)
    assert tree.strays == strays
    for one, first in ends.items():
        for two, second in ends.items():
            same = takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
            assert common(first, second) == sum(1 for _ in same)


def check_runs(tree: Blocks, copies: Counter[tuple[Prompt, str]], ends: dict[Prompt, Node]) -> None:
    for path, node in ends.items():
        beginnings = [path[: end + 1] for end in range(len(path))]
        near = [copies[one, GPU] > 0 for one in beginnings]
        here = [copies[one, GPU] + copies[one, CPU] > 0 for one in beginnings]
        assert depth(node) == len(path)
        assert run(node) == ([*here, False].index(False), [*near, False].index(False))
        for tier in (GPU, CPU):
            assert tree.copies(name(path), tier) == copies[path, tier]
