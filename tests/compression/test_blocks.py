"""Heads as blocks: where a text is cut, what stays together, and by which slot a block is known again."""

from __future__ import annotations

import pytest

from ctxgate.compression.blocks import Block, Splitter, contents_of, joined

CLOCK = "Current time: 2025-06-01T10:00:00Z"


def split(text: str) -> tuple[Block, ...]:
    blocks = Splitter().split(text)
    assert joined(blocks) == text
    assert not any(block.text[len(block.text.rstrip()) :] or block.gap.strip() for block in blocks)
    return blocks


def units(text: str) -> list[list[str]]:
    """The blocks' texts by unit."""
    found: dict[int, list[str]] = {}
    for block in split(text):
        found.setdefault(block.unit, []).append(block.text)
    return [*found.values()]


def slots(text: str) -> dict[str, bytes]:
    """Slots by the text of their block."""
    return {block.text: block.slot for block in split(text)}


def test_paragraphs_are_units() -> None:
    assert units("You are it.\nBe brief.\n\n\nNever lie.\n \nEnd.\n") == [
        ["You are it.\nBe brief."],
        ["Never lie."],
        ["End."],
    ]
    assert [block.gap for block in split("a\n\n\nb\n \nc\n")] == ["\n\n\n", "\n \n", "\n"]


def test_a_section_is_its_heading_and_all_below_it() -> None:
    text = "Hello.\n\n# A\n\none\n\ntwo\n\n## A1\ndeep\n# B\nthree"
    assert units(text) == [["Hello."], ["# A", "one", "two", "## A1\ndeep"], ["# B\nthree"]]


def test_the_heading_of_the_whole_text_holds_no_sections() -> None:
    text = "# Agent\nintro\n\n## A\na\n\n### A1\n\n## B\nb\n\n# User memory\n\n## Likes\ntea"
    assert units(text) == [
        ["# Agent\nintro"],
        ["## A\na", "### A1"],
        ["## B\nb"],
        ["# User memory", "## Likes\ntea"],
    ]


def test_an_element_is_one_unit() -> None:
    text = "Hi.\n<env>\ncwd: /a\n\nfiles: b\n</env>\nGo on.\n<x>1</x>\n\n<open>\nnever closed"
    assert units(text) == [
        ["Hi."],
        ["<env>\ncwd: /a\n\nfiles: b\n</env>"],
        ["Go on."],
        ["<x>1</x>"],
        ["<open>\nnever closed"],
    ]


def test_elements_may_stand_in_a_section_which_goes_on_behind_them() -> None:
    assert units("# A\none\n<m>\nx\n</m>\n\ntwo") == [["# A\none", "two"], ["<m>\nx\n</m>"]]


def test_an_element_around_everything_is_looked_into() -> None:
    blocks = split("<prompt>\nOne.\n\nTwo.\n</prompt>\n")
    assert [(block.text, block.edge) for block in blocks] == [
        ("<prompt>", False),
        ("One.", False),
        ("Two.", False),
        ("</prompt>", True),
    ]


def test_fenced_code_is_not_cut() -> None:
    text = "# A\n```sh\n# no heading\n\n<no>\n```\nend\n\n~~~\n\n# open to the end\n\n</no>"
    assert units(text) == [
        ["# A\n```sh\n# no heading\n\n<no>\n```\nend", "~~~\n\n# open to the end\n\n</no>"]
    ]


def test_a_line_with_a_volatile_span_is_a_block() -> None:
    assert units(f"Be brief.\n{CLOCK}\nNever lie.") == [["Be brief.", "Never lie."], [CLOCK]]
    assert units(f"# A\none\n{CLOCK}") == [["# A\none"], [CLOCK]]
    assert units(f"<env>\nOS: x\n{CLOCK}\nb\n</env>") == [["<env>"], ["OS: x", "b"], [CLOCK], ["</env>"]]
    assert units(f"Hi.\n<env>\nOS: x\n{CLOCK}\n</env>") == [["Hi."], ["<env>\nOS: x", CLOCK, "</env>"]]


@pytest.mark.parametrize(
    ("line", "alone"),
    [
        (CLOCK, True),
        ("- Today's date: 2025-06-01", True),
        ("**Time:** 2025-06-01 10:00:00 UTC.", True),
        ("2025-06-01T10:00:00Z", True),
        ("and it is now 2025-06-01 10:00:00 UTC.", False),  # prose that began on the line before
        ("It is 2025-06-01 10:00:00 UTC and the shop is open.", False),  # more than the span can be said
    ],
)
def test_a_volatile_line_moves_alone_only_if_it_makes_sense_alone(line: str, alone: bool) -> None:
    blocks = split(f"One\n{line}\ntwo.")
    assert [block.text for block in blocks] == ["One", line, "two."]
    assert [block.volatile for block in blocks] == [False, True, False]
    assert (blocks[1].unit != blocks[0].unit) is alone
    assert blocks[0].unit == blocks[2].unit


def test_long_lines_are_never_cut_out() -> None:
    line = "word " * 60 + CLOCK
    assert units(f"One\n{line}\ntwo.") == [[f"One\n{line}\ntwo."]]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("# User memory\n\nlikes tea", "# User memory\n\nhates tea"),
        ("<memory>\nAda\n\ntea\n</memory>", "<memory>\nBob\n</memory>"),
        ("Open files: a.py, b.py", "Open files: c.py"),
        ("Rules:\n- a", "Rules:\n- b\n- c"),
        ("- **Folder**: /a", "- **Folder**: /b"),
        (CLOCK, "Current time: 2026-01-01T00:00:00Z"),
        ("no name at all", "another text"),
        ("Go to http://a", "Go to http://b"),
        ("Status: idle", "Status: step 3"),  # with and without what the detector knows
    ],
)
def test_a_slot_is_where_a_block_stands_and_what_it_is_called(one: str, two: str) -> None:
    first = [block.slot for block in split(f"You are it.\n\n{one}\n\nEnd: now")]
    second = [block.slot for block in split(f"You are it.\n\n{two}\n\nEnd: now")]
    assert first == second
    assert len({*first}) == len(first)


def test_other_names_are_other_slots() -> None:
    for one, two in (("# A\nx", "# B\nx"), ("<a>x</a>", "<b>x</b>"), ("A: x", "B: x")):
        assert split(one)[0].slot != split(two)[0].slot


def test_equal_names_are_told_apart_by_their_number() -> None:
    first = split("Note: a\n\nNote: b\n\n<x>1</x>\n<x>2</x>")
    assert len({block.slot for block in first}) == 4
    assert [block.slot for block in split("Note: c\n\nNote: d\n\n<x>3</x>\n<x>4</x>")] == [
        block.slot for block in first
    ]
    # The same name under another heading is another slot.
    assert slots("# A\n\nNote: a\n\n# B\n\nNote: b")["Note: b"] != slots("# A\n\nNote: b")["Note: b"]


def test_a_text_without_a_name_is_numbered_behind_the_last_name() -> None:
    """What comes or goes before a named block changes no slot behind it."""
    longer, shorter = slots("one\n\ntwo\n\nRules: x\n\nthree"), slots("one\n\nRules: x\n\nthree")
    assert longer["three"] == shorter["three"]
    assert longer["Rules: x"] == shorter["Rules: x"]


def test_pieces_of_an_element_share_its_slot() -> None:
    blocks = split(f"Hi.\n<env>\na\n{CLOCK}\nb\n</env>")
    assert [block.text for block in blocks] == ["Hi.", "<env>\na", CLOCK, "b\n</env>"]
    assert blocks[1].slot == blocks[3].slot != blocks[2].slot


def test_a_label_is_what_the_slot_fixes() -> None:
    texts = [f"{CLOCK}", "Open files:  a", "# Memory\ntea", "<x>1</x>", "plain", "# Memory", "- **A**: b"]
    labels = [block.text[: block.label] for text in texts for block in split(text)]
    assert labels == ["Current time: ", "Open files:  ", "# Memory\n", "", "", "# Memory", "- **A**: "]


def test_places_of_a_head_have_slots_of_their_own() -> None:
    splitter = Splitter()
    assert splitter.split("Rules: x", "0/0")[0].slot != splitter.split("Rules: x", "0/1")[0].slot


@pytest.mark.parametrize(
    "text", ["", "\n", " \n\n ", "\n\nfoo", "a\r\n\r\nb\r\n", "\ud800\n\nx: \udfff", "#", "<a>"]
)
def test_odd_texts_stay_whole(text: str) -> None:
    split(text)


def test_how_a_text_begins() -> None:
    splitter = Splitter()

    def beginning(text: str) -> str:
        return splitter.beginning(splitter.split(text))

    assert beginning(f"{CLOCK}\nYou are it.\nBe brief.\nMore.\n\nRest") == "You are it.\nBe brief."
    assert beginning("<role>\nYou are it.\nMore.\n</role>") == "You are it.\nMore."
    assert beginning("<role>\nYou are it.\n</role>\n<m>\nAda\n</m>\n<m>\nBob\n</m>\nx") == "<role>\n<m>\nx"
    assert beginning("Mood: calm\n\nYou are it.\n\nMore") == "Mood:\nYou are it."
    assert beginning("# Agent\n\n<m>\nAda\n</m>\n\nBe brief.\n\n# Rules") == "# Agent\n<m>"
    prose = "You are it, now at {}, and so on and on and on and on"
    assert beginning(prose.format("2025-06-01 10:00:00Z") + "x" * 300) == (
        prose.format("[clock]") + "x" * (200 - len(prose.format("2025-06-01 10:00:00Z")))
    )
    assert beginning(CLOCK) == beginning("") == ""


def test_contents_do_not_depend_on_the_order_of_blocks() -> None:
    assert sorted(contents_of("a\n\nb  \nc")) == sorted(contents_of("c\nb\n\na  "))
    for other in ("a\n\nb\nc", "a\n\nb  \nd", "a\n\nb  \nc\nc", "a\n\n b \nc"):
        assert sorted(contents_of("a\n\nb  \nc")) != sorted(contents_of(other))
