"""The rewrites of level `safe`, each of which a pool's chat template may rule out."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ctxgate.inference.template_facts import Verdict

if TYPE_CHECKING:
    from ctxgate.inference.template_facts import TemplateFacts


class Rule(StrEnum):
    """A difference of two spellings that says nothing to the model, on a template that agrees."""

    ARGUMENTS = "arguments"  # white space and key order of a tool call's arguments
    EMPTY_CONTENT = "empty_content"  # null, missing or empty content beside tool calls
    TOOLS = "tools"  # the order of the tools, and of the keys of their schemas
    CALL_IDS = "call_ids"  # the ids of tool calls, which mean nothing but which result answers which call


ALL_RULES: Final[frozenset[Rule]] = frozenset(Rule)
_HARMFUL: Final = (Verdict.DIFFERENT,)
_IN_VAIN: Final = (Verdict.DIFFERENT, Verdict.EQUIVALENT)  # ids that nobody prints need no mapping


def allowed_rules(facts: TemplateFacts) -> frozenset[Rule]:
    """The rules that a template does not rule out; what is unknown of it rules nothing out."""
    verdicts = {
        Rule.ARGUMENTS: (facts.arguments, _HARMFUL),
        Rule.EMPTY_CONTENT: (facts.empty_content, _HARMFUL),
        Rule.TOOLS: (facts.tool_order, _HARMFUL),
        Rule.CALL_IDS: (facts.call_ids, _IN_VAIN),
    }
    return frozenset(rule for rule, (verdict, ruled_out) in verdicts.items() if verdict not in ruled_out)
