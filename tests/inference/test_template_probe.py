"""The start-up probe's conclusions, on answers made by hand and on an engine whose tokens are characters."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.inference.template_facts import (
    UNKNOWN_FACTS,
    CacheReport,
    Extension,
    Findings,
    TemplateFacts,
    Turns,
    Verdict,
)
from ctxgate.inference.template_probe import Complete, Detokenize, Render, Told, block_of_hit, probe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Template = Callable[[dict[str, Any]], str]

YES, NO, BUT = Extension.YES, Extension.NO, Extension.BUT_ANSWER
BLOCK: Final = 16


def start(told: Sequence[Told], block_size: int | None = None) -> tuple[list[Any], Findings | None]:
    """What a probe asks while these are the answers, and its result if it ended with them."""
    work = probe("s", block_size)
    asked = [next(work)]
    try:
        asked += [work.send(one) for one in told]
    except StopIteration as end:
        return asked, end.value
    return asked, None


def report(*figures: tuple[int | None, int | None], block_size: int | None = None) -> CacheReport:
    """The cache report of three answers (prompt, cached); rendering is refused."""
    told = [Told(prompt=prompt, cached=cached) for prompt, cached in figures]
    work = probe("s", block_size)
    next(work)
    try:
        for one in told:
            work.send(one)
        work.send(Told())  # the render endpoint
        while True:
            work.send(Told())  # whatever it goes on to ask
    except StopIteration as end:
        cache: CacheReport = end.value.cache
        return cache


def test_the_same_prompt_goes_out_twice_and_then_under_another_salt() -> None:
    asked, _ = start([Told(prompt=200, cached=0), Told(prompt=200, cached=192)], 32)
    assert all(isinstance(one, Complete) for one in asked)
    assert [one.body["cache_salt"] for one in asked] == ["s-a", "s-a", "s-b"]
    assert asked[0].body["messages"] == asked[1].body["messages"] == asked[2].body["messages"]
    assert len(asked[0].body["messages"][0]["content"].split()) >= 3 * 32


@pytest.mark.parametrize(
    ("block_size", "window", "words"),
    [(None, None, 1536), (None, 2048, 682), (128, 2048, 384), (16, None, 64)],
)
def test_the_repeated_prompt_is_three_blocks_long_and_fits_the_window(
    block_size: int | None, window: int | None, words: int
) -> None:
    ask = next(probe("s", block_size, window))
    assert isinstance(ask, Complete)
    assert len(ask.body["messages"][0]["content"].split()) == words


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ([(200, 0), (200, 192), (200, 0)], CacheReport(True, True, 32)),
        ([(200, None), (200, 192), (200, None)], CacheReport(True, True, 32)),  # a zero is left out
        ([(200, 0), (200, 192), (200, 192)], CacheReport(True, False, 32)),
        ([(200, 192), (200, 192), (200, 0)], CacheReport(True, False, 32)),  # a fresh salt that hits
        ([(200, None), (200, None), (200, None)], CacheReport(False, None, None)),
        ([(200, 0), (200, 0), (200, 0)], CacheReport(None, None, None)),
        ([(200, 0), (200, None), (200, 0)], CacheReport(False, None, None)),
        ([(None, None)], CacheReport(None, None, None)),
    ],
)
def test_gateways_b7_what_the_answers_say_of_the_cache(
    figures: list[tuple[int | None, int | None]], expected: CacheReport
) -> None:
    assert report(*figures, block_size=32 if expected.reports else None) == expected


@pytest.mark.parametrize(
    ("prompt", "hit", "block"),
    [
        (1600, 1584, 16),  # 1599 = 99 * 16 + 15
        (1600, 1536, 64),  # 63 tokens short of 1599: no block of 16, 32 or 48 ends there
        (1600, 1568, 32),
        (1665, 1664, 16),  # any divisor would do: the smallest usual one
        (100, 99, None),
        (2000, 16, None),
    ],
)
def test_a_block_size_from_a_hit(prompt: int, hit: int, block: int | None) -> None:
    assert block_of_hit(prompt, hit) == block


@dataclass
class Engine:
    """A server whose template is a function and whose tokens are characters."""

    template: Template
    renders: bool = True
    detokenizes: bool = True
    spare: int = 0  # blocks that a hit is short of, as with a draft model
    prompts: list[tuple[str, str]] = field(default_factory=list)
    calls: int = 0

    def told(self, ask: Any) -> Told:
        if isinstance(ask, Detokenize):
            return Told(text="".join(map(chr, ask.tokens)) if self.detokenizes else None)
        if isinstance(ask, Render):
            return Told(tokens=tuple(map(ord, self.template(ask.body))) if self.renders else None)
        text, salt = self.template(ask.body), ask.body["cache_salt"]
        shared = (common(text, other) for other_salt, other in self.prompts if other_salt == salt)
        hit = max((min(length, len(text) - 1) // BLOCK - self.spare for length in shared), default=0)
        self.prompts.append((salt, text))
        self.calls += 1
        return Told(prompt=len(text), cached=max(hit, 0) * BLOCK)

    def found(self) -> Findings:
        work = probe("s", BLOCK)
        answer: Told | None = None
        while True:
            try:
                answer = self.told(next(work) if answer is None else work.send(answer))
            except StopIteration as end:
                findings: Findings = end.value
                return findings


def common(one: str, other: str) -> int:
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def rendered(
    body: dict[str, Any],
    *,
    arguments: Callable[[str], str] = lambda text: text,
    empty: Callable[[dict[str, Any]], str] = lambda message: message.get("content") or "",
    ids: bool = False,
    head: Callable[[list[Any]], str] = json.dumps,
    thinks: bool = False,
    opening: str = "",
) -> str:
    """A template with one trait after the other."""
    messages = body["messages"]
    last = max(at for at, message in enumerate(messages) if message["role"] == "user")
    parts = [head(body["tools"])] if "tools" in body else []
    for at, message in enumerate(messages):
        parts.append(f"<{message['role']}>")
        if thinks and at > last:
            parts.append(f"({message.get('reasoning', '')})")
        parts.append(empty(message))
        for call in message.get("tool_calls", ()):
            shown = arguments(call["function"]["arguments"])
            parts.append(f"[{call['id'] if ids else ''}{shown}]")
    if body.get("add_generation_prompt", True):
        parts.append(f"<assistant>{opening}")
    return "".join(parts)


PLAIN: Final = TemplateFacts(
    plain=Turns(YES),
    tools=Turns(YES),
    reasoning=Turns(YES),
    tool_results=Turns(YES),
    arguments=Verdict.REORDERED,
    empty_content=Verdict.EQUIVALENT,
    tool_order=Verdict.REORDERED,
    call_ids=Verdict.EQUIVALENT,
)


def parsed(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True)


def sorted_tools(tools: list[Any]) -> str:
    return json.dumps(sorted(tools, key=lambda tool: str(tool["function"]["name"])), sort_keys=True)


TRAITS: Final[list[tuple[dict[str, Any], dict[str, Any]]]] = [
    ({}, {}),
    ({"arguments": parsed}, {"arguments": Verdict.EQUIVALENT}),
    ({"arguments": lambda text: f"{len(text)} characters"}, {"arguments": Verdict.DIFFERENT}),
    ({"empty": lambda message: str(message.get("content", ""))}, {"empty_content": Verdict.DIFFERENT}),
    ({"head": sorted_tools}, {"tool_order": Verdict.EQUIVALENT}),
    ({"head": lambda tools: tools[0]["function"]["name"]}, {"tool_order": Verdict.DIFFERENT}),
    ({"ids": True}, {"call_ids": Verdict.RENAMED}),
]


@pytest.mark.parametrize(("traits", "expected"), TRAITS)
def test_a_trait_of_a_template_is_found_in_its_tokens(
    traits: dict[str, Any], expected: dict[str, Any]
) -> None:
    engine = Engine(lambda body: rendered(body, **traits))
    found = engine.found()
    for name in TemplateFacts.__dataclass_fields__:
        assert getattr(found.facts, name) == expected.get(name, getattr(PLAIN, name)), name
    assert (found.renders, engine.calls) == (True, 3)  # nothing but the cache report uses tokens


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize(("traits", "expected"), TRAITS)
def test_a_trait_is_found_by_usage_as_far_as_that_tells(
    traits: dict[str, Any], expected: dict[str, Any], spare: int
) -> None:
    """Other tokens are other tokens: whether only their order differs is not told."""
    found = Engine(lambda body: rendered(body, **traits), renders=False, spare=spare).found()
    vague = {Verdict.REORDERED: Verdict.UNKNOWN, Verdict.DIFFERENT: Verdict.UNKNOWN}
    for name in TemplateFacts.__dataclass_fields__:
        exact = expected.get(name, getattr(PLAIN, name))
        assert getattr(found.facts, name) == vague.get(exact, exact), name
    assert found.renders is False


def test_routing_d1_reasoning_that_goes_with_the_next_message_of_the_user() -> None:
    """`(The notes must be read first.)` stands before `[`: all from its second character on is lost."""
    found = Engine(lambda body: rendered(body, thinks=True)).found()
    first = "(The notes must be read first.)[]" + '{"path":"notes.txt","lines":[1,20]}'
    behind = len(first) + len("<tool>()Buy milk.") + len("<assistant>")
    assert found.facts.reasoning == Turns(NO, behind)
    assert (found.facts.plain, found.facts.tools) == (Turns(YES), Turns(YES))
    # Without reasoning the brackets are empty, but they go as well.
    assert found.facts.tool_results.extension is NO

    by_usage = Engine(lambda body: rendered(body, thinks=True), renders=False).found().facts
    assert by_usage.reasoning.extension is NO
    assert by_usage.reasoning.lost % BLOCK == 0
    assert by_usage.plain == Turns(YES)


def test_an_answer_that_begins_otherwise_in_its_own_turn_loses_that_beginning_only() -> None:
    found = Engine(lambda body: rendered(body, opening="<think></think>")).found()
    assert found.facts.plain == Turns(BUT, len("<think></think>"))
    assert found.facts.tool_results.extension is BUT


def test_routing_d7_tools_beside_the_last_message_of_the_user_break_every_turn() -> None:
    def behind(body: dict[str, Any]) -> str:
        return "".join(
            f"<{message['role']}>{message.get('content')}"
            + (json.dumps(body.get("tools")) if message is body["messages"][-1] else "")
            for message in body["messages"]
        )

    for renders in (True, False):
        facts = Engine(behind, renders=renders).found().facts
        assert (facts.tools.extension, facts.tool_results.extension) == (NO, NO)


def test_without_detokenizing_only_the_same_tokens_in_another_order_are_told() -> None:
    found = Engine(rendered, detokenizes=False).found().facts
    assert found.tool_order is Verdict.REORDERED  # one token a character, and white space is the same
    assert found.arguments is Verdict.UNKNOWN  # the spelling with more white space has more tokens
    named = Engine(lambda body: rendered(body, ids=True), detokenizes=False).found().facts
    assert named.call_ids is Verdict.UNKNOWN


def test_what_a_template_refuses_stays_unknown() -> None:
    @dataclass
    class NoTools(Engine):
        def told(self, ask: Any) -> Told:
            return Told() if "tools" in getattr(ask, "body", {}) else super().told(ask)

    for renders in (True, False):
        facts = NoTools(rendered, renders=renders).found().facts
        assert facts == TemplateFacts(plain=Turns(YES))


def test_a_server_that_tells_neither_tokens_nor_hits_leaves_everything_unknown() -> None:
    @dataclass
    class Mute(Engine):
        def told(self, ask: Any) -> Told:
            return Told(prompt=100) if isinstance(ask, Complete) else Told()

    assert Mute(rendered).found() == Findings(CacheReport(reports=False), False, UNKNOWN_FACTS)


def test_every_comparison_by_usage_has_a_salt_of_its_own() -> None:
    engine = Engine(rendered, renders=False)
    engine.found()
    salts = [salt for salt, _ in engine.prompts]
    assert len(set(salts)) == 2 + 4 + 5  # two for the report; turns; spellings, empty content in two pairs
    assert all(salt.startswith("s-") and len(salt) <= 128 for salt in salts)
    assert engine.calls == 22
