"""Exact strings of the recorded sessions are found by their terms alone."""

from __future__ import annotations

import pytest

from support.recall_measure import measured
from support.recall_set import SESSIONS

pytestmark = pytest.mark.integration


def test_an_exact_string_finds_where_it_was_said() -> None:
    if not SESSIONS.is_dir():
        pytest.skip("the recorded sessions are not here")
    found = measured(("coding", "short"), None)["identifiers"]
    assert found["questions"] == 298
    assert found["terms"]["at_1"] >= 0.95
    assert found["terms"]["at_5"] >= 0.98
