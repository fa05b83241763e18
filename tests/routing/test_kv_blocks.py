"""The tree of a replica's cache blocks."""

from __future__ import annotations

from ctxgate.routing.kv_blocks import SEGMENT, Blocks, Node, Run, common, depth, run, up

GPU = "GPU"


def stored(tree: Blocks, first: int, count: int, parent: int | None = None, tier: str = GPU) -> Node:
    stretch = tree.store(range(first, first + count), parent, tier)
    assert stretch is not None
    return stretch.last


def test_a_path_is_there_as_far_as_its_first_missing_block() -> None:
    tree = Blocks(GPU)
    end = stored(tree, 1, 1000)  # several segments
    assert len({id(step) for step in [end.segment]}) == 1
    assert (depth(end), run(end)) == (1000, Run(1000, 1000))
    tree.remove([700], GPU)
    assert run(end) == Run(699, 699)
    before = up(end, 301)
    assert before is not None
    assert (depth(before), run(before)) == (699, Run(699, 699))
    tree.remove([2], GPU)
    assert run(end) == Run(1, 1)
    tree.store([2], 1, GPU)
    tree.store([700], 699, GPU)
    assert run(end) == Run(1000, 1000)


def test_routing_c7_two_copies_take_two_removals() -> None:
    tree = Blocks(GPU)
    end = stored(tree, 1, 3)
    tree.store([1, 2, 3], None, GPU)
    assert tree.copies(3, GPU) == 2
    tree.remove([3], GPU)
    assert run(end) == Run(3, 3)
    tree.remove([3], GPU)
    assert run(end) == Run(2, 2)
    assert tree.strays == 0
    tree.remove([3, 99], GPU)
    assert (tree.strays, tree.copies(3, GPU)) == (2, 0)


def test_routing_a10_a_block_in_another_tier_is_a_whole_block_and_told_apart() -> None:
    tree = Blocks(GPU)
    end = stored(tree, 1, 10)
    tree.store([6, 7], 5, "CPU")
    tree.remove([6, 7, 8], GPU)
    assert run(end) == Run(7, 5)
    tree.remove([7], "CPU")
    assert run(end) == Run(6, 5)
    tree.remove([6], "CPU")
    assert run(end) == Run(5, 5)
    tree.remove([6], "CPU")
    assert tree.strays == 1


def test_forks_share_their_path_up_to_where_they_part() -> None:
    tree = Blocks(GPU)
    one = stored(tree, 1, SEGMENT + 40)
    two = stored(tree, 10_000, 20, parent=100)
    three = stored(tree, 20_000, 5, parent=10_009)
    assert (depth(two), depth(three)) == (120, 115)
    assert common(one, two) == common(two, one) == 100
    assert common(two, three) == 110
    assert common(one, one) == SEGMENT + 40
    tree.remove([50], GPU)
    assert run(three) == Run(49, 49)
    assert up(three, 115) is None


def test_blocks_behind_an_unknown_one_say_nothing_until_it_is_known() -> None:
    tree = Blocks(GPU)
    end = stored(tree, 100, 5, parent=99)
    assert (depth(end), run(end)) == (None, None)
    tree.store(range(90, 102), None, GPU)
    assert (depth(end), run(end)) == (15, Run(15, 15))
    assert tree.copies(100, GPU) == 2


def test_a_reset_takes_all_copies_and_leaves_the_paths() -> None:
    tree = Blocks(GPU)
    end = stored(tree, 1, 300)
    tree.store([1], None, "CPU")
    tree.clear()
    assert run(end) == Run(0, 0)
    tree.store([1, 2], None, GPU)
    assert run(end) == Run(2, 2)


def test_no_blocks_is_no_stretch() -> None:
    assert Blocks(GPU).store([], None, GPU) is None


def test_memory_is_bounded_and_what_is_gone_goes_first() -> None:
    tree = Blocks(GPU, limit=1000)
    old = stored(tree, 1, SEGMENT)
    behind = stored(tree, 301, 100, parent=SEGMENT)
    kept = stored(tree, 1001, 500)
    tree.remove([*range(1, SEGMENT + 1), *range(301, 401)], GPU)
    assert len(tree) == SEGMENT + 600
    size = tree.size
    stored(tree, 5001, 200)  # 56 too many: the segment that has been gone the longest makes room
    assert len(tree) == 800
    assert tree.size < size
    assert old.segment.dropped
    assert len(old.segment.hashes) == 0
    assert not behind.segment.dropped
    assert (run(behind), depth(behind)) == (None, None)
    assert run(kept) == Run(500, 500)
    stored(tree, 7001, 250)
    assert not tree.overflowed
    assert len(tree) == 500 + 200 + 250
    stored(tree, 9001, 400)
    assert len(tree) == 200 + 250 + 400
    assert [one.segment.dropped for one in (behind, kept)] == [True, True]
    assert tree.overflowed


def test_what_was_torn_off_by_dropping_is_mended_when_it_is_stored_again() -> None:
    tree = Blocks(GPU, limit=600)
    stored(tree, 1, 250)
    end = stored(tree, 1001, 250, parent=250)
    tree.remove(range(1, 251), GPU)
    stored(tree, 5001, 200)
    tree.remove(range(5001, 5201), GPU)
    tree.store([*range(1, 251), *range(1001, 1251)], None, GPU)
    assert run(end) == Run(500, 500)


def test_a_reset_makes_all_segments_free_to_go() -> None:
    tree = Blocks(GPU, limit=600)
    stored(tree, 1, 500)
    tree.clear()
    kept = stored(tree, 1001, 300)
    assert not tree.overflowed
    assert run(kept) == Run(300, 300)


def test_what_lies_behind_dropped_blocks_is_torn() -> None:
    tree = Blocks(GPU, limit=600)
    stored(tree, 1, 250)
    end = stored(tree, 1001, 250, parent=250)
    tree.remove(range(1, 251), GPU)
    stored(tree, 5001, 200)
    assert run(end) is None


def test_a_stream_that_tells_of_a_ring_of_blocks_holds_nobody() -> None:
    tree = Blocks(GPU)
    tree.store([10, 11], 99, GPU)
    found = tree.store([10], 11, GPU)  # 10 follows 11, which follows 10
    assert found is not None
    assert depth(found.last) is None
    assert len(tree) == 2
