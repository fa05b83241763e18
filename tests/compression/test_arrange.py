"""Blocks in another order: what moves, what goes to the tail, and what becomes of the space between."""

from __future__ import annotations

from ctxgate.compression.arrange import Arranged, arranged
from ctxgate.compression.blocks import Splitter, joined
from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.rates import OFTEN, TAIL

CLOCK = "Current time: 2025-06-01T10:00:00Z"


def arrange(text: str, ranks: dict[str, int], *, tail: bool = True) -> Arranged:
    """The text arranged; `ranks` by the first characters of blocks."""
    blocks = Splitter().split(text)
    order = {
        block.slot: rank for block in blocks for start, rank in ranks.items() if block.text.startswith(start)
    }
    return arranged(blocks, order, tail=tail)


def text_of(text: str, ranks: dict[str, int], *, tail: bool = True) -> str:
    return joined(arrange(text, ranks, tail=tail).blocks)


def test_no_order_changes_nothing() -> None:
    found = arrange("A: 1\n\nB: 2\n\nC: 3", {})
    assert joined(found.blocks) == "A: 1\n\nB: 2\n\nC: 3"
    assert not found.changed()


def test_what_changes_goes_behind_by_rising_rank() -> None:
    text = "A: 1\n\nB: 2\n\nC: 3\n\nD: 4\n\nE: 5\n"
    assert text_of(text, {"A": 4, "C": 1}) == "B: 2\n\nD: 4\n\nE: 5\n\nC: 3\n\nA: 1\n"
    assert text_of(text, {"A": OFTEN, "B": 4, "C": 4}) == "D: 4\n\nE: 5\n\nB: 2\n\nC: 3\n\nA: 1\n"


def test_what_is_last_already_stays() -> None:
    found = arrange("A: 1\n\nB: 2\n\nC: 3", {"B": 1, "C": 2})
    assert (found.moved, found.changed()) == (0, False)


def test_blocks_that_moved_are_counted() -> None:
    assert arrange("A: 1\n\nB: 2\n\nC: 3\n\nD: 4", {"A": 2, "C": 1}).moved == 2


def test_a_section_moves_as_a_whole_with_its_highest_rank() -> None:
    text = "# A\n\nOne: 1\n\ntwo\n\n# B\nthree\n\n# C\n\nFour: 4\n"
    assert text_of(text, {"One": 3, "Four": 2}) == "# B\nthree\n\n# C\n\nFour: 4\n\n# A\n\nOne: 1\n\ntwo\n"


def test_an_element_moves_as_a_whole() -> None:
    text = f"<m>\nAda\n{CLOCK}\n</m>\nBe brief.\n\nNever lie.\n"
    assert text_of(text, {CLOCK: 1}) == f"Be brief.\n\nNever lie.\n<m>\nAda\n{CLOCK}\n</m>\n"


def test_a_line_leaves_its_paragraph_and_the_blank_line_stays() -> None:
    assert text_of(f"You are it.\n{CLOCK}\n\nBe brief.\n\nNever lie.", {CLOCK: 4}) == (
        f"You are it.\n\nBe brief.\n\nNever lie.\n{CLOCK}"
    )


def test_the_end_of_a_text_stays_its_end() -> None:
    assert text_of("A: 1\n\nB: 2", {"A": 1}) == "B: 2\n\nA: 1"
    assert text_of("<p>\nA: 1\n\nB: 2\n</p>\n", {"A": 1}) == "<p>\n\nB: 2\nA: 1\n</p>\n"


def test_the_stable_part_is_the_same_whatever_has_moved() -> None:
    """Memories of other lengths leave the same beginning."""
    beginning = "You are it.\n\nRules: x\n\nEnd."
    for memory in ("# M\na\n\n", "# M\n\na\n\nb\n\nc\n\n", "# M\n\n"):
        assert text_of(f"You are it.\n\n{memory}# R\n\nRules: x", {"# M": 4}).startswith(
            "You are it.\n\n# R\n\nRules: x\n\n# M"
        )
        element = f"You are it.\n\n<m>\n{memory}</m>\n\nRules: x\n\nEnd."
        assert text_of(element, {"<m>": 4}).startswith(beginning + "\n\n<m>")


def test_the_tail_takes_the_words_and_leaves_the_label() -> None:
    found = arrange(
        f"Hi.\n{CLOCK}\n\n<todo>\n1. x\n</todo>\n\n# Open\na.py", {CLOCK: TAIL, "<t": TAIL, "# O": TAIL}
    )
    assert joined(found.blocks) == (
        f"Hi.\nCurrent time: {PLACEHOLDER}\n\n{PLACEHOLDER}\n\n# Open\n{PLACEHOLDER}"
    )
    assert found.taken == (None, "2025-06-01T10:00:00Z", "<todo>\n1. x\n</todo>", "a.py")
    assert (found.moved, found.changed()) == (0, True)


def test_without_a_tail_everything_stays() -> None:
    assert not arrange(f"Hi.\n{CLOCK}\n\nB", {CLOCK: TAIL}, tail=False).changed()


def test_a_constant_of_the_notes_is_never_taken() -> None:
    for text in (f"Files: {PLACEHOLDER}", f"Files: {HEADING}", "Files:", ""):
        assert not arrange(text, {"Files": TAIL}).changed()


def test_a_block_in_the_tail_does_not_move_its_unit() -> None:
    text = f"<m>\nOS: x\n{CLOCK}\n</m>\n\nBe brief."
    assert text_of(text, {CLOCK: TAIL}) == f"<m>\nOS: x\nCurrent time: {PLACEHOLDER}\n</m>\n\nBe brief."
    assert text_of(text, {CLOCK: TAIL, "<m>": 2}) == (
        f"Be brief.\n\n<m>\nOS: x\nCurrent time: {PLACEHOLDER}\n</m>"
    )


def test_where_each_block_stood() -> None:
    assert arrange("A: 1\n\nB: 2\n\nC: 3", {"A": 1}).origin == (1, 2, 0)
