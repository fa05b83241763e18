"""Exact strings of the recorded sessions are found by their terms alone."""

from __future__ import annotations

import pytest

from support.recall_measure import measured, reachable
from support.recall_set import SESSIONS

pytestmark = pytest.mark.integration


def test_an_exact_string_finds_where_it_was_said() -> None:
    if not SESSIONS.is_dir():
        pytest.skip("the recorded sessions are not here")
    found = measured(("coding", "short"), None)["identifiers"]
    assert found["questions"] == 298
    assert found["terms"]["at_1"] >= 0.95
    assert found["terms"]["at_5"] >= 0.98


def test_nearly_every_exact_string_that_was_dropped_is_one_question_away() -> None:
    if not SESSIONS.is_dir():
        pytest.skip("the recorded sessions are not here")
    found = reachable(["coding-long-a"])
    shares = {kind: share for kind, (_, share) in found.items()}
    assert sum(count for count, _ in found.values()) > 450
    assert shares["path"] >= 0.97
    assert shares["command"] >= 0.97
    assert shares["error"] >= 0.95
    assert shares["number"] >= 0.97
    assert shares["id"] == shares["url"] == 1.0
