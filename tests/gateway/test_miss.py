"""The verdict on a prompt that missed the cache: which cause, how many tokens, and what is told of it."""

from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from ctxgate.compression.divergence import Divergence
from ctxgate.compression.divergence import DivergenceKind as Kind
from ctxgate.compression.previous import Before
from ctxgate.compression.sent import Outline
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway.miss import (
    BY_GATEWAY,
    Evidence,
    Miss,
    MissCause,
    excused,
    not_reported,
    shown_field,
    verdict,
)
from ctxgate.routing.prefix_index import Expected

HERE, THERE = ("standard", "standard-0"), ("standard", "standard-1")


def before(tokens: int | None = 1_000, *, place: tuple[str, str] = HERE, messages: int = 10) -> Before:
    """A request of two tools, one system message and others."""
    sizes = array("Q", [100] * (2 + messages))
    return Before(b"c", Outline(b"", b"", sizes, tools=2, heads=1), place, tokens, 0)


def evidence(**changes: Any) -> Evidence:
    """A prompt of 1,200 tokens in 4,800 bytes behind one of 1,000, of which the replica found 992."""
    base = Evidence(
        HERE,
        prompt=1_200,
        cached=992,
        size=4_800,
        messages=12,
        block=16,
        slack=32,
        before=before(),
        exact=True,
    )
    return structs.replace(base, **changes)


def expected(tokens: int, *, counted: bool = True, foreign: int = 0) -> Expected:
    return Expected(tokens, 5, counted, 0, foreign, tokens)


def edited(kind: Kind = Kind.HISTORY_EDITED, index: int | None = 5, **changes: Any) -> Divergence:
    """At message 5: 2,000 bytes before it stay, 1,600 behind it could have."""
    base = Divergence(kind, f"messages[{index}].content", index, 7, kept_bytes=2_000, avoidable_bytes=1_600)
    return replace(base, **changes)


def test_a_prompt_that_found_what_was_expected_missed_nothing() -> None:
    assert verdict(evidence(expected=expected(992))) is None
    assert verdict(evidence(expected=expected(992), cached=1_100)) is None  # the answer was cached as well
    assert verdict(evidence(expected=None, before=None, cached=0)) is None


def test_a_changed_head_that_moved_had_nothing_to_find_where_it_was() -> None:
    """2,000 of 4,800 bytes, 500 tokens, of tools stand before it in the request, maybe not in the prompt."""
    found = verdict(
        evidence(
            before=before(place=THERE), cached=0, difference=edited(Kind.SYSTEM_CHANGED, 0), expected=None
        )
    )
    assert found is not None
    # Kept and held are 3,600 bytes, 900 tokens: 896 are whole blocks.
    assert (found.cause, found.avoidable_tokens) == (MissCause.SYSTEM_CHANGED, 896)


def test_an_edited_message_costs_what_stood_behind_it() -> None:
    """2,000 + 1,600 bytes are 900 tokens, 896 in blocks; 496 were found, 400 could have been beside them."""
    found = verdict(evidence(difference=edited(), cached=496, expected=expected(496)))
    expectation = Miss(MissCause.HISTORY_EDITED, "history_edited", "messages[5].content", 5, 7, 400)
    assert found == expectation


def test_avoidable_tokens_are_never_more_than_what_was_not_found() -> None:
    found = verdict(evidence(difference=edited(), cached=800, expected=expected(496)))
    assert found is not None
    assert found.avoidable_tokens == 96


def test_an_edit_after_which_nothing_was_held_costs_nothing() -> None:
    assert verdict(evidence(difference=edited(avoidable_bytes=0), cached=400)) is None


def test_a_difference_that_the_prompt_does_not_show_is_no_miss() -> None:
    assert verdict(evidence(difference=edited(rendered=False), cached=496)) is None


def test_a_difference_that_the_engine_did_not_mind_is_no_miss() -> None:
    """It had read this form of the prompt before."""
    assert verdict(evidence(difference=edited(), cached=992)) is None


def test_in_the_head_all_may_be_lost_whatever_the_template_prints_first() -> None:
    """A clock in the system message: 400 of 3,600 bytes before it are tools that are printed behind it."""
    clock = edited(
        Kind.VOLATILE_IN_HEAD, 0, kept_bytes=400, avoidable_bytes=3_200, volatile=VolatileKind.CLOCK
    )
    found = verdict(evidence(difference=clock, cached=16, expected=expected(16)))
    assert found == Miss(MissCause.SYSTEM_CHANGED, "volatile_in_head/clock", "messages[0].content", 0, 7, 880)


@pytest.mark.parametrize(
    ("kind", "field", "cause"),
    [
        (Kind.MODEL_CHANGED, "model", MissCause.MODEL_CHANGED),
        (Kind.SALT, "cache_salt", MissCause.SALT),
        (Kind.TEMPLATE_CHANGED, "chat_template_kwargs", MissCause.TEMPLATE_CHANGED),
        (Kind.TOOLS_CHANGED, "tools[3]", MissCause.TOOLS_CHANGED),
        (Kind.TOOLS_RESERIALIZED, "tools[3].function.parameters", MissCause.TOOLS_CHANGED),
        (Kind.TOOLS_REORDERED, "tools[3]", MissCause.REORDERED),
        (Kind.VOLATILE_IN_HEAD, "tools[3].function.description", MissCause.TOOLS_CHANGED),
        (Kind.VOLATILE_IN_HEAD, "messages[0].content", MissCause.SYSTEM_CHANGED),
        (Kind.SYSTEM_CHANGED, "messages[0].content", MissCause.SYSTEM_CHANGED),
        (Kind.HISTORY_EDITED, "messages[3].content", MissCause.HISTORY_EDITED),
        (Kind.HISTORY_RESERIALIZED, "messages[3].tool_calls[0].function.arguments", MissCause.HISTORY_EDITED),
        (Kind.HISTORY_REORDERED, "messages[3]", MissCause.REORDERED),
        (Kind.HISTORY_TRUNCATED, "messages[3]", MissCause.COMPACTION),
    ],
)
def test_each_kind_of_difference_has_its_cause(kind: Kind, field: str, cause: MissCause) -> None:
    index = None if "[" not in field else int(field.partition("[")[2].partition("]")[0])
    found = verdict(evidence(difference=edited(kind, field=field, index=index), cached=0))
    assert found is not None
    assert (found.cause, found.detail, found.field, found.index) == (cause, kind.value, field, index)
    assert found.offset == (None if index is None else 7)


def test_a_history_of_fewer_messages_than_before_was_compacted() -> None:
    found = verdict(evidence(difference=edited(), cached=496, messages=6))
    assert found is not None
    assert (found.cause, found.detail) == (MissCause.COMPACTION, "history_edited")


def turn(record: object, known: object = None) -> Any:
    """A request under a compaction, the one before it under another or none; None: it is not known."""
    return SimpleNamespace(record=record, known=known and SimpleNamespace(record=known))


OWN = Miss(MissCause.COMPACTION, BY_GATEWAY, avoidable_tokens=0, avoidable_nano=0)
EDITED = Miss(MissCause.HISTORY_EDITED, "history_edited", "messages[5]", 5, 7, 400, 900)


@pytest.mark.parametrize("compacted", [turn("new", "old"), turn("new")])
def test_a_history_that_the_gateway_compacted_is_no_miss_of_the_clients(compacted: Any) -> None:
    assert excused(EDITED, compacted) == OWN
    assert excused(replace(EDITED, cause=MissCause.COMPACTION, detail="history_truncated"), compacted) == OWN
    assert excused(None, compacted) is None


@pytest.mark.parametrize(
    "miss",
    [
        replace(EDITED, cause=MissCause.REORDERED, detail="tools_reordered", field="tools[3]"),
        replace(EDITED, cause=MissCause.SYSTEM_CHANGED, detail="system_changed", field="messages[0].content"),
        Miss(MissCause.MOVED_REPLICA, "standard/standard-1", avoidable_tokens=9),
    ],
)
def test_what_the_client_or_the_pool_did_beside_a_compaction_stays_theirs(miss: Miss) -> None:
    assert excused(miss, turn("new", "old")) == miss


@pytest.mark.parametrize("same", [None, turn(None, "old"), turn("one", "one")])
def test_without_a_new_compaction_an_edit_is_the_clients(same: Any) -> None:
    assert excused(EDITED, same) == EDITED


def test_digests_tell_no_byte() -> None:
    found = verdict(evidence(difference=edited(offset=0), exact=False, cached=496))
    assert found is not None
    assert (found.index, found.offset) == (5, None)


@pytest.mark.parametrize(("foreign", "cause"), [(479, MissCause.EXPIRED), (480, MissCause.EVICTED)])
def test_what_is_gone_was_evicted_where_others_needed_the_room(foreign: int, cause: MissCause) -> None:
    """992 expected, 512 found: 480 tokens that this gateway has written there since explain it or not."""
    found = verdict(evidence(cached=512, expected=expected(992, foreign=foreign)))
    assert found == Miss(cause, avoidable_tokens=480)


def test_routing_d1_a_template_that_prints_history_anew_is_no_expiry() -> None:
    rewritten = Miss(MissCause.TEMPLATE_CHANGED, "history_rewritten", avoidable_tokens=480)
    assert verdict(evidence(cached=512, expected=expected(992), rewrites=True)) == rewritten
    evicted = verdict(evidence(cached=512, expected=expected(992, foreign=5_000), rewrites=True))
    assert evicted == Miss(MissCause.EVICTED, avoidable_tokens=480)


def test_a_shortfall_within_the_slack_means_nothing() -> None:
    assert verdict(evidence(cached=976, expected=expected(992))) is None
    assert verdict(evidence(cached=960, expected=expected(992))) == Miss(
        MissCause.EXPIRED, avoidable_tokens=32
    )


def test_an_apportioned_expectation_is_only_missed_by_half() -> None:
    guess = expected(800, counted=False)
    assert verdict(evidence(before=None, cached=400, expected=guess)) is None
    found = verdict(evidence(before=None, cached=384, expected=guess))
    assert found == Miss(MissCause.EXPIRED, avoidable_tokens=416)


def test_a_conversation_that_moved_lost_what_its_last_replica_held() -> None:
    found = verdict(evidence(before=before(place=THERE), cached=96, expected=expected(96)))
    assert found == Miss(MissCause.MOVED_REPLICA, "standard/standard-1", avoidable_tokens=896)
    assert verdict(evidence(before=before(place=THERE), cached=992, expected=expected(0))) is None


def test_a_sibling_of_the_same_head_did_not_move() -> None:
    """Another conversation of the task: it never was where the other one went."""
    sibling = evidence(
        before=before(place=THERE), difference=edited(index=1, avoidable_bytes=0), cached=0, goes_on=False
    )
    assert verdict(sibling) is None
    warm = verdict(structs.replace(sibling, expected=expected(496)))
    assert warm == Miss(MissCause.EXPIRED, avoidable_tokens=496)


def test_of_two_causes_the_dearer_is_told() -> None:
    """Moved, and edited: 500 tokens were before the edit and went by moving, 400 behind it."""
    moved = evidence(before=before(place=THERE), difference=edited(), cached=0, expected=expected(0))
    assert verdict(moved) == Miss(MissCause.MOVED_REPLICA, "standard/standard-1", avoidable_tokens=496)
    late = structs.replace(moved, difference=edited(kept_bytes=800, avoidable_bytes=2_800))
    found = verdict(late)
    assert found is not None
    assert (found.cause, found.avoidable_tokens) == (MissCause.HISTORY_EDITED, 700)


def test_gateways_b7_an_engine_that_does_not_tell_is_no_engine_that_missed() -> None:
    assert not_reported(before(), None) == Miss(MissCause.NOT_REPORTED)
    assert not_reported(None, expected(64)) == Miss(MissCause.NOT_REPORTED)
    assert not_reported(None, expected(0)) is None
    assert not_reported(None, None) is None


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """The same prompt again, of whole blocks: one block less than all can be found."""
    same = evidence(prompt=1_024, size=4_096, before=before(1_024), expected=expected(1_008))
    assert verdict(structs.replace(same, cached=1_008)) is None
    assert verdict(structs.replace(same, cached=0)) == Miss(MissCause.EXPIRED, avoidable_tokens=1_008)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("", ""),
        ("model", "model"),
        ("chat_template_kwargs", "chat_template_kwargs"),
        ("tools[12]", "tools[12]"),
        ("tools[1].function.parameters", "tools[1].function.parameters"),
        ("messages[3].content[2].text", "messages[3].content[2].text"),
        ("messages[3].tool_calls[0].function.arguments", "messages[3].tool_calls[0].function.arguments"),
        ("messages[3].secret", "messages[3].?"),
        ("messages[3].content_secret", "messages[3].?"),
        ("messages[3].content[secret]", "messages[3].?"),
        ("messages[3].tool_calls[0].secret\r\nx: y", "messages[3].tool_calls[0].?"),
        ("messages[3].content.text\n", "messages[3].content.?"),
        ("models", ".?"),
    ],
)
def test_no_name_that_a_client_made_up_is_told(path: str, shown: str) -> None:
    assert shown_field(path) == shown


def test_the_header_is_one_line_of_ascii() -> None:
    whole = Miss(MissCause.SYSTEM_CHANGED, "volatile_in_head/clock", "messages[0].content", 0, 40, 1_234, 5)
    assert whole.header() == (
        b"system_changed; detail=volatile_in_head/clock; field=messages[0].content; avoidable=1234"
    )
    assert Miss(MissCause.NOT_REPORTED).header() == b"not_reported"
    assert Miss(MissCause.MOVED_REPLICA, "p\u00e4/r").header() == b"moved_replica; detail=p?/r"
