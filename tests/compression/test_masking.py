"""What is done without a model when a prompt is too long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.compression.cut import Range
from ctxgate.compression.masking import (
    LEAST_SPLIT_TOKENS,
    MASK_TOKENS,
    NOTHING,
    NOTICE_TOKENS,
    Masking,
    Split,
    mask,
    mask_text,
    masked_message,
    notice_text,
)
from support.chats import chat

TEXT = "S U A[a] Ra A[b] Rb A[c] Rc U"
SIZES = [100, 100, 10, 500, 10, 500, 10, 500, 20]  # 1,750 in all


def masked(target: int, text: str = TEXT, sizes: list[int] | None = None, **options: object) -> Masking:
    return mask(chat(text), SIZES if sizes is None else sizes, target=target, **options)  # type: ignore[arg-type]  # keywords pass through


def test_what_fits_is_left_alone() -> None:
    assert masked(1750) == Masking((), (), (), 1750, fits=True)
    assert masked(0, "", []) == NOTHING


def test_the_oldest_results_are_masked_first_and_no_more_than_needed() -> None:
    """Each masked result gives 500 - 40 tokens."""
    assert masked(1749) == Masking((3,), (), (), 1750 - 460, fits=True)
    assert masked(1290) == Masking((3,), (), (), 1290, fits=True)
    assert masked(1289) == Masking((3, 5), (), (), 830, fits=True)


def test_then_the_oldest_rounds_are_dropped() -> None:
    """All three masked: 370. Without the first round, of 10 + 40, but with the notice: 380; next 330."""
    assert MASK_TOKENS == 40
    assert NOTICE_TOKENS == 60
    assert masked(370) == Masking((3, 5, 7), (), (), 370, fits=True)
    assert masked(369) == Masking((7,), (Range(2, 6),), (), 330, fits=True)
    assert masked(329) == Masking((), (Range(2, 8),), (), 280, fits=True)


def test_context_l2_l4_what_can_never_give_way_is_reported_not_raised() -> None:
    """The head, 100 tokens, the task and the last message stay; texts of 200 tokens are not cut."""
    result = masked(50)
    assert result == Masking((), (Range(2, 8),), (), 280, fits=False)


def test_context_l5_a_last_result_larger_than_the_window_is_cut() -> None:
    """It is the newest round: nothing else can be dropped, so its text loses its middle."""
    result = masked(1000, "S U A[a] Ra", [100, 100, 10, 5000])
    assert result == Masking((), (), (Split(3, 790),), 1000, fits=True)
    assert not masked(300, "S U A[a] Ra", [100, 100, 10, 5000]).fits
    assert masked(300, "S U A[a] Ra", [100, 100, 10, 5000]).split == (Split(3, LEAST_SPLIT_TOKENS),)


def test_context_f16_of_a_last_round_with_many_small_results_the_oldest_are_masked() -> None:
    """Ten results of 90 tokens: no text is cut below 200. Each that is masked gives 90 - 40 tokens."""
    text = "S U A[" + ",".join("abcdefghij") + "] " + " ".join(f"R{one}" for one in "abcdefghij")
    sizes = [100, 100, 100, *[90] * 10]  # 1,200 in all
    assert masked(1000, text, sizes) == Masking((3, 4, 5, 6), (), (), 1000, fits=True)
    assert masked(750, text, sizes) == Masking((3, 4, 5, 6, 7, 8, 9, 10, 11), (), (), 750, fits=True)
    assert not masked(749, text, sizes).fits
    still_open = text.replace(" Rj", "")
    assert masked(1000, still_open, sizes[:-1]) == Masking((3, 4, 5), (), (), 960, fits=True)


def test_a_result_that_is_no_longer_than_the_line_for_it_is_never_masked() -> None:
    """Of 81 tokens 41 are saved; of 80 nothing: the line, with the ids around it, takes as many."""
    text, sizes = "S U A[a] Ra A[b] Rb A[c] Rc", [100, 100, 10, 80, 10, 81, 10, 1000]
    assert masked(1370, text, sizes).masked == (5,)
    assert 3 not in masked(400, text, sizes).masked


def test_context_l1_several_huge_messages_are_cut_to_one_size() -> None:
    result = masked(1400, "S U U", [100, 9000, 9000])
    assert result.split == (Split(1, 650), Split(2, 650))
    assert (result.tokens, result.fits) == (1400, True)


def test_context_n2_the_last_round_and_user_message_go_last() -> None:
    result = masked(900, "S U A[a] Ra U A[b] Rb", [100, 100, 10, 1000, 50, 10, 1000])
    assert result.dropped == (Range(2, 4),)
    assert result.split == (Split(6, 580),)


def test_an_incomplete_batch_is_never_dropped() -> None:
    """Not even where older rounds beside it are: its result would find no call."""
    result = masked(150, "S U A A[a,b] Ra U", [50, 50, 500, 400, 10, 10])
    assert result == Masking((), (Range(2, 3),), (Split(3, 200),), 380, fits=False)
    assert masked(150, "S U A A[a,b] Ra Rb U", [50, 50, 500, 400, 10, 10, 10]).dropped == (Range(2, 6),)


def test_kept_messages_give_way_only_when_nothing_else_does() -> None:
    """The pinned result 3 outlives the rounds after it, until they alone are not enough."""
    assert masked(900, keep={3}) == Masking((5, 7), (), (), 830, fits=True)
    assert masked(370, keep={3}) == Masking((3,), (Range(4, 8),), (), 330, fits=True)
    assert masked(329, keep={3}).dropped == (Range(2, 8),)


def test_gateways_n2_what_was_masked_stays_masked() -> None:
    first = masked(1289)
    longer = f"{TEXT} A[d] Rd U"
    sizes = [*SIZES, 10, 500, 20]
    second = masked(1_000_000, longer, sizes, before=first)
    assert second == Masking((3, 5), (), (), 2280 - 920, fits=True)
    third = masked(400, longer, sizes, before=second)
    assert set(third.masked) | {at for each in third.dropped for at in range(each.start, each.stop)} >= {3, 5}


def test_a_text_that_was_cut_can_still_be_masked() -> None:
    first = masked(1000, "S U A[a] Ra", [100, 100, 10, 5000])
    assert first.split == (Split(3, 790),)
    longer = masked(600, "S U A[a] Ra A[b] Rb", [100, 100, 10, 5000, 10, 20], before=first)
    assert longer == Masking((3,), (), (), 280, fits=True)


def test_a_masked_message_keeps_its_other_members() -> None:
    raw = b'{"role":"tool", "tool_call_id":"a","content":[{"type":"text","text":"long"}],"x":1.50}'
    out = masked_message(raw, "ctx_1")
    assert json.loads(out) == {"role": "tool", "tool_call_id": "a", "content": mask_text("ctx_1"), "x": 1.5}
    assert b"1.50" in out
    with pytest.raises(ValueError, match="not a message"):
        masked_message(b"[]", "ctx_1")


def test_the_lines_are_no_longer_than_they_are_counted() -> None:
    """Ids of up to 40 characters; three bytes a token is more than any tokenizer needs for English."""
    assert len(mask_text("i" * 30)) <= 3 * MASK_TOKENS
    assert len(notice_text("i" * 30)) <= 4 * NOTICE_TOKENS


def test_the_end_and_what_is_to_stay_give_way_no_more_than_the_limit_needs() -> None:
    """What is old goes by the target, but for the pin; of the rest, nothing or one result by the limit."""
    dropped = 1750 - 510 + NOTICE_TOKENS
    options: dict[str, Any] = {"keep": {3}, "tail_tokens": 530}
    assert masked(500, limit=1340, **options) == Masking((), (Range(4, 6),), (), dropped, fits=True)
    assert masked(500, limit=1200, **options) == Masking((7,), (Range(4, 6),), (), dropped - 460, fits=True)
    assert masked(500, **options) == Masking((3,), (Range(4, 8),), (), dropped - 510 - 460, fits=True)


def test_the_first_task_loses_its_middle_after_all_others() -> None:
    """The call's arguments (700) give way first; where the rest is not enough, the longest texts do."""
    sizes = [10, 400, 700, 30]
    assert masked(700, "S U A[a] Ra", sizes).split == (Split(2, 260),)
    assert masked(500, "S U A[a] Ra", sizes).split == (Split(1, 230), Split(2, 230))
    assert masked(300, "S U A[a] Ra", sizes).split == (Split(1, 200), Split(2, 200))


def test_context_g3_of_a_message_with_a_picture_only_the_text_can_be_cut() -> None:
    """Of the last message 1,000 tokens are a picture: it can be cut to those and the least text."""
    sizes = [100, 100, 10, 2500]
    result = masked(1700, "S U A[a] Ra", sizes, media={3: 1000}, keep={3})
    assert result == Masking((), (), (Split(3, 490),), 1700, fits=True)
    assert masked(1700, "S U A[a] Ra", sizes, media={3: 1000}, before=result) == result
    least = masked(300, "S U A[a] Ra", sizes, media={3: 1000}, keep={3})
    assert least == Masking((), (), (Split(3, LEAST_SPLIT_TOKENS),), 1410, fits=False)
    only = masked(300, "S U A[a] Ra", [100, 100, 10, 1010], media={3: 1000}, keep={3})
    assert only == Masking((), (), (), 1220, fits=False)
