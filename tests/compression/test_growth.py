"""What moving may add to a prompt: decided by what is the same in every turn, and never taken back."""

from __future__ import annotations

import pytest

from ctxgate.compression.dialects.chat import Facts
from ctxgate.compression.expressions import Expression
from ctxgate.compression.growth import allowed, first_turn, staying
from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.policy import Level, Policy
from support.declared import CLOCK, MARKED, VOLATILE, Document, message, part, raw, sent
from support.forms import Forms, Process


def facts(role: str, size: int) -> Facts:
    return Facts(b"x" * 32, size, role)


def test_the_bound_is_a_share_of_the_prompt_or_a_floor() -> None:
    """1 % or 512 bytes, and 1024 for headings, labels and placeholders."""
    assert [allowed(size) for size in (0, 51_200, 51_300, 1_000_000)] == [1536, 1536, 1537, 11_024]


def test_the_head_moves_as_one_and_is_judged_by_the_prompt_up_to_the_first_turn() -> None:
    prompt = [facts("system", 100), facts("developer", 100), facts("user", 100), facts("assistant", 10**6)]
    assert first_turn(prompt) == 2
    assert staying(prompt, {0: 1000, 1: 536}) == frozenset()
    assert staying(prompt, {0: 1000, 1: 537}) == {0, 1}
    assert staying([*prompt[:2], facts("user", 100_000)], {0: 1000, 1: 537}) == frozenset()
    assert staying(prompt[:2], {0: 9999}) == frozenset()  # without a user turn nothing moves anyway


def test_later_messages_are_judged_one_by_one_up_to_themselves() -> None:
    prompt = [facts("system", 100), facts("user", 100), facts("user", 100), facts("user", 200_000)]
    assert staying(prompt, {0: 500, 1: 1000, 2: 37, 3: 1000}) == {2}
    assert staying(prompt, {0: 1537, 1: 1000}) == {0}
    assert staying(prompt[:3], {0: 500, 1: 1000, 2: 36}) == frozenset()


def jobs(count: int, minute: int) -> Document:
    """A head of so many lines, each of which changes in every turn."""
    lines = [f"Job {at} ran at 2026-01-05T09:{minute:02}:{at % 60:02}Z" for at in range(count)]
    return message("system", "\n".join(lines))


def test_a_head_of_many_lines_never_moves_however_long_its_prompt_grows() -> None:
    """A line costs 17 bytes of placeholder, 14 of `Job 10 ran at ` and a line feed: 48 fit 1536 bytes."""
    forms = Forms()
    for count, moves in ((45, True), (60, False)):
        user = message("user", f"{count} jobs.")
        history: list[Document] = [user]
        for turn in range(8):
            process = Process(forms, policy=CLOCK)  # as after a restart
            result = process.result(raw(jobs(count, turn), *history))
            out = sent(process, jobs(count, turn), *history)
            assert (PLACEHOLDER in out[0]["content"]) is moves
            assert result.dropped == (None if moves else "longer")
            history += [message("assistant", "ok " * 20_000), message("user", str(turn))]


def test_a_note_whose_words_grow_leaves_the_head_where_it_is() -> None:
    """A list of files of no bytes in one turn and 6,000 in the next."""
    pattern = Expression.compile(r"(?s)<files>(?P<value>.+)</files>")
    process = Process(policy=Policy(Level.DECLARED, patterns=(pattern,)))
    history: list[Document] = [message("user", "Go.")]
    before: list[Document] = []
    for turn, files in enumerate((200, 0, 200, 3, 1, 400)):
        listed = "\n".join(["On branch main", *(f"  modified:   src/{turn}/{at}.py" for at in range(files))])
        out = sent(process, message("system", f"Be brief.\n<files>{listed}</files>\nBe kind."), *history)
        assert out[0]["content"] == f"Be brief.\n<files>{PLACEHOLDER}</files>\nBe kind."
        if turn:
            assert out[: len(before) - 1] == before[:-1]
            assert out[1] == before[1], "what was frozen stays, however little the words weigh now"
        assert listed in out[-1]["content"]
        before = out
        history += [message("assistant", "ok"), message("user", str(turn))]


def test_marked_blocks_beyond_the_bound_stay_where_they_are_from_their_first_sight() -> None:
    """Each block costs a placeholder and a line feed: 18 bytes. 17 messages of five blocks fit 1536 bytes."""
    process = Process(policy=MARKED)
    before: list[list[str]] = []
    history: list[Document] = []
    for turn in range(20):
        blocks = [part(f"env {turn:03}/{at}", **VOLATILE) for at in range(5)]
        history.append(message("user", [*blocks, part("go")]))
        heads = [[part_["text"] for part_ in user["content"][:5]] for user in sent_users(process, history)]
        assert heads[:-1] == before
        assert heads[-1] == [PLACEHOLDER if turn < 17 else f"env {turn:03}/{at}" for at in range(5)]
        before = heads
        history.append(message("assistant", "ok"))


def sent_users(process: Process, history: list[Document]) -> list[Document]:
    return [each for each in sent(process, *history) if each["role"] == "user"]


@pytest.mark.parametrize("words", ["9", "a longer word than any placeholder or label"])
def test_the_words_have_no_say(words: str) -> None:
    """Two spans on one line and one far behind them: 3 placeholders, `a `, ` b `, 64 of the rest, 2 ends."""
    process = Process(policy=Policy(Level.DECLARED, patterns=(Expression.compile(r"<[^>]*>"),)))
    gap = "x" * 70
    head = message("system", f"a <{words}> b <{words}> {gap} <{words}>")
    result = process.result(raw(head, message("user", "Go.")))
    assert [passage.cost for passage in result.moved] == [34 + 2 + 3 + 1, 17 + 64 + 1]
    lines = [len(passage.line) for passage in result.moved]
    assert result.added == 3 * 17 + len(rf"\n\n{HEADING}\n") + lines[0] + len(r"\n") + lines[1]
