"""Change rates, counted by hand, and the orders they call for."""

from __future__ import annotations

import pytest

from ctxgate.compression.rates import (
    COMPARED_HEADS,
    MAX_NOTE,
    MAX_SLOTS,
    OFTEN,
    TAIL,
    Content,
    Counts,
    Rates,
    packed,
    unpacked,
)

TEMPLATE = b"template"
A, B, C, D = (bytes((letter,)) * 16 for letter in b"abcd")


def head(text: str, size: int = 10) -> dict[bytes, Content]:
    """A head of slots a, b, c, ...: one letter for what each holds, `-` where the slot is missing."""
    slots = (bytes((letter,)) * 16 for letter in b"abcdefgh")
    return {slot: Content(ord(it), size) for slot, it in zip(slots, text, strict=False) if it != "-"}


class Player(Rates):
    """Counts conversations as they are played, each under a name of its own."""

    number = 0

    def play(self, *conversations: str, template: bytes = TEMPLATE, size: int = 10) -> None:
        """Conversations, each as the heads of its requests: `xy xz` are two requests with two slots."""
        for each in conversations:
            self.number += 1
            start, name = b"start %d" % self.number, b"conversation %d" % self.number
            first, *rest = each.split()
            self.begin(template, start, head(first, size))
            for turn in rest:
                self.go_on(template, start, name, head(turn, size))


@pytest.fixture
def rates() -> Player:
    return Player()


def test_changes_are_counted_within_and_between_conversations(rates: Player) -> None:
    rates.play("xyz xyz xqz", "xrz xsz", "xsw")
    counts = rates.counts(TEMPLATE)
    # Turns: xyz>xyz, xyz>xqz, xrz>xsz. Conversations: xyz>xrz, and xsw against xrz (b and c differ) and
    # xyz (b and c differ too): the later one counts.
    assert counts[A] == Counts(turns=3, turn_changes=0, conversations=2, conversation_changes=0)
    assert counts[B] == Counts(3, 2, 2, 2, changing=2, size=10)
    assert counts[C] == Counts(3, 0, 2, 1)


def test_coming_and_going_is_a_change(rates: Player) -> None:
    rates.play("x- xy x-", "xy")
    assert rates.counts(TEMPLATE)[B] == Counts(2, 2, 1, 1, changing=1, size=10)


def test_a_conversation_is_compared_with_the_one_most_like_it(rates: Player) -> None:
    """Two agents that share a template take turns: neither changes."""
    rates.play("aaaa", "bbbb", "aaaa", "bbbb", "aaaa", "bbbb")
    # Only the first of the other agent had nothing of its own kind to be compared with.
    assert {counts.conversation_changes for counts in rates.counts(TEMPLATE).values()} == {1}
    assert {counts.conversations for counts in rates.counts(TEMPLATE).values()} == {5}
    assert rates.wanted(TEMPLATE, 0, {}) is None


def test_conversations_that_begin_alike_are_not_taken_for_one_another(rates: Player) -> None:
    rates.begin(TEMPLATE, b"hi", head("xay"))
    rates.begin(TEMPLATE, b"hi", head("xby"))
    rates.go_on(TEMPLATE, b"hi", b"one", head("xay"))
    rates.go_on(TEMPLATE, b"hi", b"two", head("xby"))
    assert rates.counts(TEMPLATE)[B] == Counts(2, 0, 1, 1)


def test_a_conversation_whose_beginning_was_not_seen_is_counted_from_then_on(rates: Player) -> None:
    for text in ("xa", "xa", "xb"):
        rates.go_on(TEMPLATE, b"start", b"conversation", head(text))
    assert rates.counts(TEMPLATE)[B] == Counts(2, 1, 0, 0, changing=1, size=10)


def test_a_clock_goes_to_the_tail_from_the_third_conversation_on(rates: Player) -> None:
    rates.play("x1y x2y x3y")
    assert rates.wanted(TEMPLATE, 0, {}) is None
    rates.play("x4y x5y")
    assert rates.wanted(TEMPLATE, 0, {}) == {B: TAIL}


def test_one_conversation_alone_proves_nothing(rates: Player) -> None:
    rates.play("x1y " + " ".join(f"x{digit}y" for digit in "23456789" * 20))
    assert rates.wanted(TEMPLATE, 0, {}) is None


def test_rare_changes_leave_a_block_where_it_is(rates: Player) -> None:
    """A date that rolls over in two of a hundred turns costs less than a prompt laid out anew."""
    rates.play(*["x1y" + " x1y" * 59 + " x2y" + " x2y" * 59] * 2)
    assert rates.counts(TEMPLATE)[B].changing == 2
    assert rates.wanted(TEMPLATE, 0, {}) is None  # 2 of 240 turns


def test_what_is_too_long_for_a_note_goes_last(rates: Player) -> None:
    rates.play("x1y x2y", "x3y x4y", size=MAX_NOTE + 1)
    assert rates.wanted(TEMPLATE, 0, {}) == {B: OFTEN}


def test_a_users_memory_goes_behind_what_is_stable(rates: Player) -> None:
    rates.play("xay xay", "xby xby")
    assert rates.wanted(TEMPLATE, 0, {}) is None  # one edit of the prompt looks the same
    rates.play("xcy")
    assert rates.wanted(TEMPLATE, 0, {}) == {B: 4}


def test_what_may_change_in_turns_waits_for_a_second_conversation_to_tell(rates: Player) -> None:
    rates.play("x1y", "x2y x3y", "x4y")
    assert rates.wanted(TEMPLATE, 0, {}) is None  # 2 of 2 conversations, and 1 of 1 turns
    rates.play("x5y x6y")
    assert rates.wanted(TEMPLATE, 0, {}) == {B: TAIL}
    assert Counts(1, 1, conversations=7, conversation_changes=7, changing=1).rank(0) == 0
    assert Counts(1, 1, conversations=8, conversation_changes=8, changing=1).rank(0) == 4


@pytest.mark.parametrize(
    ("changes", "conversations", "rank"),
    [(1, 1, 0), (2, 2, 4), (2, 3, 3), (2, 4, 3), (2, 5, 2), (2, 8, 2), (2, 9, 0), (7, 10, 3), (3, 4, 4)],
)
def test_ranks_rise_with_the_rate(changes: int, conversations: int, rank: int) -> None:
    assert Counts(conversations=conversations, conversation_changes=changes).rank(0) == rank


@pytest.mark.parametrize(
    ("now", "counts", "rank"),
    [
        (4, Counts(conversations=31), 1),  # too few seen since to come back, but it is no longer the last
        (1, Counts(conversations=31), 1),
        (1, Counts(conversations=32, conversation_changes=2), 1),
        (1, Counts(conversations=32, conversation_changes=1), 0),
        (3, Counts(conversations=8, conversation_changes=6), 3),  # a neighbouring rank is no reason
        (2, Counts(conversations=8, conversation_changes=6), 4),
        (TAIL, Counts(turns=199), TAIL),
        (TAIL, Counts(turns=200, turn_changes=1), TAIL),
        (TAIL, Counts(turns=200), 0),
        (OFTEN, Counts(turns=200, conversations=2, conversation_changes=2), 4),
        (0, Counts(2, 2, changing=2, size=MAX_NOTE), TAIL),
        (0, Counts(2, 2, changing=2, size=MAX_NOTE + 1), OFTEN),
        (TAIL, Counts(2, 2, changing=2, size=2 * MAX_NOTE), TAIL),
        (TAIL, Counts(2, 2, changing=2, size=2 * MAX_NOTE + 1), OFTEN),
        (OFTEN, Counts(2, 2, changing=2, size=MAX_NOTE // 2 + 1), OFTEN),
        (OFTEN, Counts(2, 2, changing=2, size=MAX_NOTE // 2), TAIL),
    ],
)
def test_it_takes_more_to_leave_a_place_than_to_stay(now: int, counts: Counts, rank: int) -> None:
    assert counts.rank(now) == rank


def test_old_comparisons_count_half() -> None:
    counts = Counts()
    for number in range(256):
        counts.begun(changed=number < 128)
        counts.turned(changed=number < 128, first=False)
    assert (counts.conversations, counts.conversation_changes) == (256, 128)
    counts.begun(changed=False)
    counts.turned(changed=True, first=True)
    assert counts == Counts(129, 65, 129, 64, changing=1)


def test_an_order_that_fits_is_left_alone(rates: Player) -> None:
    rates.play("x1y x2y", "x3y x4y", "x5y")
    assert rates.wanted(TEMPLATE, 1, {B: TAIL}) is None
    assert rates.wanted(b"other", 0, {}) is None


def test_slots_that_this_process_has_not_seen_keep_their_rank(rates: Player) -> None:
    rates.play("x1y x2y", "x3y x4y")
    assert rates.wanted(TEMPLATE, 0, {D: 2}) == {B: TAIL, D: 2}


def test_each_version_takes_twice_as_many_conversations(rates: Player) -> None:
    rates.play("xay", "xby", "xcy")
    assert rates.wanted(TEMPLATE, 3, {}) is None
    rates.play(*(f"x{letter}y" for letter in "defghij"))
    assert rates.wanted(TEMPLATE, 3, {}) is None
    rates.play("xky")  # the eighth since version 3 was met
    assert rates.wanted(TEMPLATE, 3, {}) == {B: 4}


def test_templates_do_not_mix(rates: Player) -> None:
    rates.play("xa", "xb", template=b"one")
    rates.play("xc", template=b"two")
    assert rates.counts(b"two") == {}
    assert rates.counts(b"three") == {}


def test_only_the_latest_conversations_are_remembered(rates: Player) -> None:
    rates.play("xa", *(f"x{digit}" for digit in range(COMPARED_HEADS - 1)), "xa")
    assert rates.counts(TEMPLATE)[B].conversation_changes == COMPARED_HEADS - 1
    rates.play("xq", *(f"x{digit}" for digit in range(COMPARED_HEADS)), "xq")
    counts = rates.counts(TEMPLATE)[B]
    assert counts.conversations - counts.conversation_changes == 1  # the second xa


def test_a_head_of_too_many_slots_is_not_counted(rates: Player) -> None:
    many = {b"%16d" % number: Content(number, 1) for number in range(MAX_SLOTS + 1)}
    for start in (b"1", b"2", b"3"):
        rates.begin(TEMPLATE, start, many)
        rates.go_on(TEMPLATE, start, b"c" + start, many)
    assert rates.counts(TEMPLATE) == {}


def test_memory_is_bounded() -> None:
    rates = Rates(remembered=100, templates=4)
    for number in range(1_000):
        name = b"%d" % number
        rates.begin(name, name, head("abcd"))
        rates.go_on(name, name, b"c" + name, head("abcd"))
    held = (rates._templates, rates._latest, rates._starts, rates._conversations)
    assert [len(each) for each in held] == [4, 20, 20, 20]


def test_an_order_as_bytes() -> None:
    assert packed({B: TAIL, A: 3}) == packed({A: 3, B: TAIL}) == A + b"\x03" + B + b"\xff"
    assert unpacked(packed({B: TAIL, A: 3})) == {A: 3, B: TAIL}
    assert unpacked(packed({})) == {}
