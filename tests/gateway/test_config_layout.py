"""The layout section of a team: levels, and what is declared volatile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from config_texts import VALID, read_text
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.rules import Rule
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway.config_load import ConfigError
from ctxgate.gateway.errors import Refused
from ctxgate.gateway.layout_level import policy_of

if TYPE_CHECKING:
    from ctxgate.gateway.config import Team


def text(layout: str) -> str:
    return VALID.replace("{organisation: acme}", f"{{organisation: acme, layout: {layout}}}")


def team(layout: str) -> Team:
    return read_text(text(layout)).config.teams["research"]


def test_a_level_may_stand_alone_or_in_a_section() -> None:
    for level in Level:
        assert team(level).layout == team(f"{{level: {level}}}").layout == level
    assert team("{volatile: [clock]}").layout == read_text(VALID).config.teams["research"].layout == "safe"


def test_volatile_text_is_named_by_kind_or_by_pattern() -> None:
    found = team("{level: declared, volatile: [clock, {kind: uuid}, {pattern: '^Session: (?P<value>.+)$'}]}")
    assert found.kinds == {VolatileKind.CLOCK, VolatileKind.UUID}
    (pattern,) = found.patterns
    assert [*pattern.spans("a\nSession: 12\nb")] == [(11, 13)], "^ and $ stand for line ends"


def test_every_kind_of_the_detector_is_known() -> None:
    kinds = ", ".join(VolatileKind)
    assert team(f"{{level: declared, volatile: [{kinds}]}}").kinds == frozenset(VolatileKind)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("timestamp", f"volatile[0]: must be one of {', '.join(VolatileKind)}"),
        (
            "{kind: clok}",
            "volatile[0].kind: must be one of clock, date, epoch, uuid, hash, counter, path, pid, git, "
            "usage, header; did you mean clock?",
        ),
        ("{pattern: '('}", "volatile[0].pattern: is no regular expression of RE2: missing ): ("),
        ("{pattern: 'a*'}", "volatile[0].pattern: matches the empty text"),
        (
            "{pattern: 'b(?=a)'}",
            "volatile[0].pattern: is no regular expression of RE2: invalid perl operator",
        ),
        ("{pattern: 7}", "volatile[0].pattern: must be a regular expression, but is a number"),
        (f"{{pattern: '{'a' * 513}'}}", "volatile[0].pattern: is longer than 512 characters"),
        ("{pattern: 'a{99999999999}'}", "volatile[0].pattern: has a repetition that is none"),
        ("{kind: clock, pattern: a}", "volatile[0]: gives a kind and a pattern"),
        ("{}", "volatile[0]: must give a kind or a pattern"),
        ("{regex: a}", "volatile[0].regex: is not a known field"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_place(entry: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        team(f"{{level: declared, volatile: [{entry}]}}")
    shown = [str(each) for each in caught.value.problems]
    assert any(each.startswith("c.yaml:14:") and f"teams.research.layout.{problem}" in each for each in shown)


def test_entries_that_have_no_effect_are_warned_of() -> None:
    warned = read_text(text("{level: safe, volatile: [clock]}")).warnings
    assert any("layout.volatile: is not used at the level safe" in str(each) for each in warned)
    assert not any(
        "layout" in str(each) for each in read_text(text("{level: learned, volatile: [clock]}")).warnings
    )


class Asking:
    """An inbound request as far as its level goes."""

    def __init__(self, level: str | None) -> None:
        self.headers = {} if level is None else {"x-ctxgate-layout": level}


@pytest.mark.parametrize("allowed", Level)
@pytest.mark.parametrize("asked", [None, *Level])
def test_a_request_may_only_ask_for_less(allowed: Level, asked: Level | None) -> None:
    config = read_text(text(f"{{level: {allowed}, volatile: [clock]}}")).config
    rules = frozenset({Rule.TOOLS})
    inbound: Any = Asking(asked)
    order = ["off", "safe", "declared", "learned"]
    if asked is not None and order.index(asked) > order.index(allowed):
        with pytest.raises(Refused, match=f"the team's level is '{allowed}'"):
            policy_of(inbound, config.keys[0], config, rules)
        return
    expected = Policy(asked or allowed, rules, frozenset({VolatileKind.CLOCK}))
    assert policy_of(inbound, config.keys[0], config, rules) == expected
