"""The invariants of a plan, at level `safe`, over generated sessions and what clients do to them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxgate.compression import layout
from ctxgate.compression.dialects.chat import facts_of
from ctxgate.compression.edited import edited, looked_at_again
from ctxgate.compression.validity import Invalid, check_length, check_same, pairing_faults
from ctxgate.gateway.perturb import Perturbation, perturb
from ctxgate.gateway.replay_run import Plan, request_body
from ctxgate.gateway.sessions import Session, read_session
from ctxgate.inference import wire
from ctxgate.inference.prompts import PromptRenderer
from support.forms import TENANT, Forms, Process

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ctxgate.gateway.sessions import Turn

pytestmark = pytest.mark.integration

TRAJECTORIES = Path(__file__).parents[3] / "shared" / "trajectories"

HARMLESS = (Perturbation.TOOL_ORDER, Perturbation.JSON_KEYS, Perturbation.RESERIALIZE)
PLAN = Plan("tiny")
RENDERER = PromptRenderer()

names = st.text("abcdef", min_size=1, max_size=3)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
texts = st.text(max_size=20)


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    """A session of up to six requests with tools, batches of calls, broken arguments and plain answers."""
    tools = tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": draw(texts),
                "parameters": {"type": "object", "properties": draw(st.dictionaries(names, values))},
            },
        }
        for name in draw(st.lists(names, max_size=5, unique=True))
    )
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": draw(texts)},
        {"role": "user", "content": draw(texts)},
    ]
    for number in range(draw(st.integers(0, 5))):
        arguments = [json.dumps(each) for each in draw(st.lists(st.dictionaries(names, values), max_size=2))]
        if draw(st.integers(0, 9)) == 0:
            arguments.append("{broken")
        calls = [
            {"id": f"c{number}-{at}", "type": "function", "function": {"name": "f", "arguments": text}}
            for at, text in enumerate(arguments)
        ]
        if not calls:
            messages += [
                {"role": "assistant", "content": draw(texts)},
                {"role": "user", "content": draw(texts)},
            ]
            continue
        messages.append({"role": "assistant", "content": draw(st.none() | texts), "tool_calls": calls})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": draw(texts)} for call in calls]
        messages += draw(st.permutations(results))
    messages.append({"role": "assistant", "content": "done"})
    return Session("s", tools, tuple(messages))


habits = st.sets(st.sampled_from(HARMLESS))


def sent(process: Process, turns: list[Turn]) -> list[bytes]:
    return [process.sent(request_body(turn, PLAN)) for turn in turns]


def renamed(turn: Turn, marks: Sequence[str]) -> Turn:
    """The turn with a mark before every id of message i's calls and results: `marks[i]` of the call."""
    current: dict[str, str] = {}
    messages = []
    for at, message in enumerate(turn.messages):
        for call in message.get("tool_calls", ()):
            current[call["id"]] = f"{marks[at]}-{call['id']}"
        calls = [call | {"id": current[call["id"]]} for call in message.get("tool_calls", ())]
        answer = message.get("tool_call_id")
        changed = (
            {"tool_calls": calls} if calls else {} if answer is None else {"tool_call_id": current[answer]}
        )
        messages.append({**message, **changed})
    return replace(turn, messages=tuple(messages))


def with_new_ids(turns: list[Turn]) -> list[Turn]:
    """As a client sends them that makes up all ids anew in every turn."""
    return [renamed(turn, [f"t{turn.number}"] * len(turn.messages)) for turn in turns]


def with_first_ids(turns: list[Turn]) -> list[Turn]:
    """As such a client would send them if it kept the ids that it first sent."""
    marks: list[str] = []
    found = []
    for turn in turns:
        marks += [f"t{turn.number}"] * (len(turn.messages) - len(marks))
        found.append(renamed(turn, marks))
    return found


def prompt(raw: bytes) -> str:
    body = json.loads(raw)
    return RENDERER.chat_text(body["messages"], body.get("tools"), add_generation_prompt=False)


def parts(raw: bytes, name: str) -> list[bytes]:
    return [bytes(item) for item in wire.parse(raw).items(name)] if name.encode() in raw else []


def value(message: bytes) -> Any:
    """What a message says, by Python's own reader: arguments parsed, the forms of no content unified."""
    found = json.loads(message)
    for each in found.get("tool_calls", ()):
        try:
            each["function"]["arguments"] = [json.loads(each["function"]["arguments"])]
        except ValueError:
            continue
    if found.get("tool_calls") and not found.get("content"):
        found.pop("content", None)
    return found


@settings(deadline=None, max_examples=30)
@given(sessions(), habits)
def test_each_request_extends_the_one_before(session: Session, kinds: set[Perturbation]) -> None:
    """Invariant 2, for every habit that only changes the form."""
    out = sent(Process(), [perturb(turn, kinds) for turn in session.turns()])
    for before, after in pairwise(out):
        assert parts(after, "tools") == parts(before, "tools")
        known = parts(before, "messages")
        assert parts(after, "messages")[: len(known)] == known


def assert_rendered_as_first_sent(session: Session, kinds: Collection[Perturbation]) -> None:
    """Every part renders as it was first sent; the test keeps its own list of first forms."""
    first: list[tuple[Any, Any]] = []  # what a message says, and its first form
    process, tools = Process(), None
    for turn in session.turns():
        raw = request_body(perturb(turn, kinds), PLAN)
        tools = tools or json.loads(raw).get("tools")
        expected = []
        for message in parts(raw, "messages"):
            said = value(message)
            form = next((known for says, known in first if says == said and type(says) is type(said)), None)
            if form is None or "tool_calls" not in form:
                form = json.loads(message)
                first.append((said, form))
            expected.append(form)
        outgoing = json.loads(process.sent(raw))
        text = RENDERER.chat_text(outgoing["messages"], outgoing.get("tools"))
        assert text == RENDERER.chat_text(expected, tools)


@settings(deadline=None, max_examples=30)
@given(sessions(), habits)
def test_prompts_are_those_of_the_first_form(session: Session, kinds: set[Perturbation]) -> None:
    assert_rendered_as_first_sent(session, kinds)


def assert_ids_as_first_sent(session: Session, kinds: Collection[Perturbation]) -> None:
    """A client that renames its calls gets the bytes of one that does not, and valid pairs."""
    turns = list(session.turns())
    out = sent(Process(), [perturb(turn, kinds) for turn in with_new_ids(turns)])
    assert out == sent(Process(), [perturb(turn, kinds) for turn in with_first_ids(turns)])
    for raw in out:
        facts = [facts_of(message) for message in parts(raw, "messages")]
        assert not +pairing_faults(facts)


@settings(deadline=None, max_examples=30)
@given(sessions(), habits)
def test_ids_are_those_first_sent(session: Session, kinds: set[Perturbation]) -> None:
    assert_ids_as_first_sent(session, kinds)


@settings(deadline=None, max_examples=30)
@given(sessions(), st.sets(st.sampled_from(Perturbation)), st.data())
def test_any_process_sends_the_same_ids(
    session: Session, kinds: set[Perturbation], data: st.DataObject
) -> None:
    turns = [perturb(turn, kinds) for turn in with_new_ids(list(session.turns()))]
    one = Process()
    expected = sent(one, turns)
    assert sent(Process(one.forms), turns) == expected
    forms = Forms()
    fleet = [Process(forms), Process(forms, memory=layout.Memory(conversations=2))]
    assert [data.draw(st.sampled_from(fleet)).sent(request_body(turn, PLAN)) for turn in turns] == expected


@settings(deadline=None, max_examples=30)
@given(sessions(), st.sets(st.sampled_from(Perturbation)), st.booleans())
def test_a_look_at_what_changed_finds_what_a_look_at_all_does(
    session: Session, kinds: set[Perturbation], rename: bool
) -> None:
    """The edited body and its facts, and the checker's word on them."""
    process = Process()
    turns = list(session.turns())
    for turn in with_new_ids(turns) if rename else turns:
        body = wire.parse(request_body(perturb(turn, kinds), PLAN))
        before = layout.look(body, body.items("messages"), TENANT, process.memory)
        edits = process.result(body.raw).edits
        short, after = edited(body, before, edits, TENANT, process.memory)
        long, expected = looked_at_again(body, edits, TENANT, layout.Memory())
        assert wire.rewritten(body, edits) is not None
        assert short.raw == long.raw
        assert after == expected
        assert parts(short.raw, "messages") == [bytes(item) for item in short.items("messages")]
        check_same(before, after)
        check_same(before, expected)


def test_the_checker_sees_a_change_wherever_it_looks_first() -> None:
    """What is the same object is equal; what is another one is compared in full."""
    raws = [
        b'{"role":"user","content":"a"}',
        b'{"role":"user","content":"b"}',
        b'{"role":"assistant","tool_calls":[{"id":"a"},{"id":"b"}]}',
        b'{"role":"assistant","tool_calls":[{"id":"c"},{"id":"b"}]}',
        b'{"role":"tool","tool_call_id":"a"}',
        b'{"role":"tool","tool_call_id":"b"}',
        b'{"role":"tool","tool_call_id":"c"}',
        b'{"role":"tool"}',
    ]
    known = [facts_of(raw) for raw in raws]
    found = set()
    for before in product(known, repeat=3):
        for place, other in product(range(3), known):
            after = (*before[:place], other, *before[place + 1 :])
            reasons = {
                _refusal(layout.Prompt(before, None), layout.Prompt(facts, None))
                for facts in (after, tuple(map(replace, after)))
            }
            assert len(reasons) == 1
            found |= reasons
    assert found == {"", "roles", "messages", "pairing"}


def _refusal(before: layout.Prompt, after: layout.Prompt) -> str:
    try:
        check_same(before, after)
    except Invalid as invalid:
        return invalid.reason
    return ""


@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository")
@pytest.mark.parametrize("name", ["repair-a", "airline-003-0", "airline-016-0"])
def test_recorded_ids_are_those_first_sent(name: str) -> None:
    session = read_session(TRAJECTORIES / f"{name}.jsonl")
    assert_ids_as_first_sent(session, ())
    assert_ids_as_first_sent(session, HARMLESS)


@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository")
@pytest.mark.parametrize("name", ["repair-a", "airline-003-0", "airline-016-0"])
def test_recorded_prompts_are_those_of_the_first_form(name: str) -> None:
    session = read_session(TRAJECTORIES / f"{name}.jsonl")
    assert_rendered_as_first_sent(session, HARMLESS)
    one, two = Process(), Process()
    turns = list(session.turns())
    out = sent(one, [perturb(turn, HARMLESS) for turn in turns])
    assert sent(two, [perturb(turn, HARMLESS) for turn in turns]) == out
    ids = [RENDERER.encode(prompt(raw)) for raw in out]
    for before, after in pairwise(ids):
        assert after[: len(before)] == before, "the engine finds the whole earlier prompt"


@settings(deadline=None, max_examples=30)
@given(sessions(), st.sets(st.sampled_from(Perturbation)), st.data())
def test_any_process_sends_the_same_bytes(
    session: Session, kinds: set[Perturbation], data: st.DataObject
) -> None:
    """Invariant 3: processes that share a store, start in the middle and forget everything agree."""
    turns = [perturb(turn, kinds) for turn in session.turns()]
    one = Process()
    expected = sent(one, turns)
    assert sent(Process(), turns) == expected
    assert sent(one, turns) == expected
    assert sent(Process(one.forms), turns) == expected
    forms = Forms()
    fleet = [Process(forms), Process(forms, memory=layout.Memory(conversations=2))]
    assert [data.draw(st.sampled_from(fleet)).sent(request_body(turn, PLAN)) for turn in turns] == expected


@settings(deadline=None, max_examples=30)
@given(sessions(), st.sets(st.sampled_from(Perturbation)))
def test_the_same_messages_go_out_in_the_same_order(session: Session, kinds: set[Perturbation]) -> None:
    """Invariants 4 and 6: nothing is moved, lost, added or made longer, and the checker agrees."""
    process = Process()
    for turn in session.turns():
        raw = request_body(perturb(turn, kinds), PLAN)
        result = process.result(raw)
        out = b"".join(wire.splice(raw, result.edits))
        assert [value(each) for each in parts(out, "messages")] == [
            value(each) for each in parts(raw, "messages")
        ]
        key = msgspec.json.Encoder(order="sorted").encode
        assert sorted(key(json.loads(each)) for each in parts(out, "tools")) == sorted(
            key(json.loads(each)) for each in parts(raw, "tools")
        )
        prompts = [
            layout.look(body, body.items("messages"), TENANT, process.memory)
            for body in (wire.parse(raw), wire.parse(out))
        ]
        check_same(*prompts)
        assert not +pairing_faults(prompts[1].facts)
        check_length(*prompts)
        assert len(result.reasons) == len({reason.field for reason in result.reasons})
        assert bool(result.reasons) == bool(result.edits)


@settings(deadline=None, max_examples=30)
@given(sessions())
def test_without_habits_every_byte_is_the_clients(session: Session) -> None:
    process = Process()
    for turn in session.turns():
        raw = request_body(turn, PLAN)
        assert process.sent(raw) == raw


@settings(deadline=None, max_examples=30)
@given(sessions(), habits)
def test_a_late_tool_is_appended_once(session: Session, kinds: set[Perturbation]) -> None:
    turns = [perturb(turn, kinds | {Perturbation.LATE_TOOL}) for turn in session.turns()]
    out = [parts(raw, "tools") for raw in sent(Process(), turns)]
    for before, after in pairwise(out):
        assert after[: len(before)] == before
        assert len(after) - len(before) in (0, 1)
