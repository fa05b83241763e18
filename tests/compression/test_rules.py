"""Which layout rules a chat template leaves on."""

from __future__ import annotations

import pytest

from ctxgate.compression.rules import ALL_RULES, Rule, allowed_rules
from ctxgate.inference.template_facts import UNKNOWN_FACTS, TemplateFacts, Verdict


def test_what_is_unknown_rules_nothing_out() -> None:
    assert allowed_rules(UNKNOWN_FACTS) == ALL_RULES


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("arguments", Rule.ARGUMENTS),
        ("empty_content", Rule.EMPTY_CONTENT),
        ("tool_order", Rule.TOOLS),
        ("call_ids", Rule.CALL_IDS),
    ],
)
def test_a_text_that_differs_rules_its_own_rule_out(name: str, rule: Rule) -> None:
    for verdict in Verdict:
        off = verdict is Verdict.DIFFERENT or (rule is Rule.CALL_IDS and verdict is Verdict.EQUIVALENT)
        facts = TemplateFacts(**{name: verdict})  # type: ignore[arg-type]  # one of the verdicts' fields
        assert allowed_rules(facts) == (ALL_RULES - {rule} if off else ALL_RULES)
