"""The invariants of a plan at level `declared`, over generated and recorded sessions with clocks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxgate.compression import layout
from ctxgate.compression.expressions import Expression
from ctxgate.compression.growth import FLOOR
from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.validity import Invalid
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway.perturb import Perturbation, perturb
from ctxgate.gateway.replay_run import Plan, request_body
from ctxgate.gateway.sessions import read_session
from ctxgate.inference import wire
from support.forms import Forms, Process
from support.seeds import printed

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.integration

TRAJECTORIES = Path(__file__).parents[3] / "shared" / "trajectories"
POLICY = Policy(
    Level.DECLARED,
    kinds=frozenset({VolatileKind.CLOCK, VolatileKind.UUID}),
    patterns=(Expression.compile(r"mood (?P<value>\S+)"),),
)
PLAN = Plan("tiny")
VOLATILE = {"ctxgate": {"stability": "volatile"}}

Document = dict[str, Any]

texts = st.text(max_size=12)
clocks = st.builds("Now 2026-01-05T09:{:02}:{:02}Z".format, st.integers(0, 59), st.integers(0, 59))
moods = st.builds("mood {}".format, st.sampled_from(["calm", "sour", "\U0001f600", "[x]"]))
pieces = st.one_of(
    texts, clocks, moods, st.just("\n"), st.just("\n\n"), st.sampled_from([HEADING, PLACEHOLDER])
)


@st.composite
def conversations(draw: st.DrawFn) -> list[list[Document]]:
    """The messages of each request of a session: a head whose clocks move, and blocks marked volatile.

    Every request has the messages of the one before, but for volatile text, and more.
    """
    lines = draw(st.lists(st.tuples(texts, st.booleans()), max_size=4))
    in_parts = draw(st.booleans())
    requests: list[list[Document]] = []
    history: list[Document] = []
    for number in range(draw(st.integers(1, 6))):
        content: Any = "\n".join(f"{text} {draw(clocks)}" if moves else text for text, moves in lines)
        if in_parts:
            content = [
                {"type": "text", "text": content},
                {"type": "text", "text": draw(moods), **draw(st.sampled_from([VOLATILE, {}]))},
            ]
        if number and draw(st.booleans()):
            results = draw(st.integers(1, 2))
            ids = [f"c{number}-{at}" for at in range(results)]
            calls = [
                {"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id_ in ids
            ]
            history.append({"role": "assistant", "content": None, "tool_calls": calls})
            history += ({"role": "tool", "tool_call_id": id_, "content": draw(texts)} for id_ in ids)
        else:
            if number:
                history.append({"role": "assistant", "content": draw(texts)})
            block = {"type": "text", "text": draw(texts | clocks), **VOLATILE}
            said: Any = draw(texts)
            history.append(
                {
                    "role": "user",
                    "content": draw(st.sampled_from([said, [block, {"type": "text", "text": said}]])),
                }
            )
        requests.append([{"role": "system", "content": content}, *history])
    return requests


def raw(messages: Sequence[Document]) -> bytes:
    return json.dumps({"model": "m", "messages": list(messages)}, ensure_ascii=False).encode()


def messages(out: bytes) -> list[bytes]:
    return [bytes(each) for each in wire.parse(out).items("messages")]


@settings(deadline=None, max_examples=60)
@given(conversations())
def test_each_request_extends_the_one_before_up_to_its_newest_note(requests: list[list[Document]]) -> None:
    """Invariant 2, wherever the head without its clocks is the same."""
    process = Process(policy=POLICY)
    before: tuple[Any, list[bytes], tuple[Any, ...]] | None = None
    for each in requests:
        body = raw(each)
        result = process.result(body)
        out = messages(b"".join(wire.splice(body, result.edits)))
        if before is not None and json.loads(before[1][0]) == json.loads(out[0]):
            known, kept = before[1], before[2]
            last = len(known) - 1
            unkept = any("do not repeat" in reason.reason for reason in kept)
            assert out[:last] == known[:last]
            if not unkept:
                assert out[last] == known[last]
        before = (each, out, result.reasons)


@settings(deadline=None, max_examples=60)
@given(conversations())
def test_words_are_kept_and_everything_else_stays_where_it_was(requests: list[list[Document]]) -> None:
    """Invariants 4 to 6: put back at their placeholders, the words that moved give the client's own texts."""
    process = Process(policy=POLICY)
    for each in requests:
        body = raw(each)
        result = process.result(body)
        out = json.loads(b"".join(wire.splice(body, result.edits)))["messages"]
        words: dict[int, list[str]] = {}
        for passage in result.moved:
            words.setdefault(passage.message, []).extend(passage.words)
            assert all(word in passage.line for word in passage.words)
        said = "\n".join(text for message in out for text in _texts(message) if HEADING in text)
        assert all(word in said for each_ in words.values() for word in each_)
        assert [message["role"] for message in out] == [message["role"] for message in each]
        for at, (ours, theirs) in enumerate(zip(each, out, strict=True)):
            assert _restored(_texts(theirs), words.get(at, []), _texts(ours)) == _texts(ours)
            assert {k: v for k, v in theirs.items() if k != "content"} == {
                k: v for k, v in ours.items() if k != "content"
            }
        fields = [reason.field for reason in result.reasons]
        changed = [f"messages[{at}]" for at, (a, b) in enumerate(zip(each, out, strict=True)) if a != b]
        assert sorted(fields) == sorted(changed), "each move is told, once"
        grown = len("".join(map("".join, map(_texts, out)))) - len("".join(map("".join, map(_texts, each))))
        assert grown <= max(FLOOR, len(body) // 100) + 2 * FLOOR


def _texts(message: Document) -> list[str]:
    content = message["content"]
    if isinstance(content, list):
        return [part["text"] for part in content]
    return [] if content is None else [content]


def _restored(texts: list[str], words: list[str], ours: list[str]) -> list[str]:
    """Without its note, and with words at their placeholders: a reader of its own."""
    if len(texts) > len(ours):
        assert texts[-1].startswith(HEADING)
        texts = texts[:-1]
    elif len(texts) == 1 and texts[0].count(HEADING) > ours[0].count(HEADING):
        texts = [texts[0][: texts[0].rindex("\n\n" + HEADING)]]
    queue = list(words)
    found = []
    for text, own in zip(texts, ours, strict=True):
        while PLACEHOLDER in text and PLACEHOLDER not in own:
            text = text.replace(PLACEHOLDER, queue.pop(0), 1)  # noqa: PLW2901 - it grows in place
        found.append(text)
    assert queue == []
    return found


@settings(deadline=None, max_examples=60)
@given(conversations(), st.data())
def test_any_process_sends_the_same_bytes(requests: list[list[Document]], data: st.DataObject) -> None:
    """Invariant 3: processes that share a store, start in the middle and forget everything agree."""
    bodies = [raw(each) for each in requests]
    one = Process(policy=POLICY)
    expected = [one.checked(body) for body in bodies]
    assert [one.checked(body) for body in bodies] == expected
    assert [Process(one.forms, policy=POLICY).checked(body) for body in reversed(bodies)] == expected[::-1]
    forms = Forms()
    fleet = [
        Process(forms, policy=POLICY),
        Process(forms, policy=POLICY, memory=layout.Memory(conversations=2)),
    ]
    assert [data.draw(st.sampled_from(fleet)).checked(body) for body in bodies] == expected


@settings(deadline=None, max_examples=60)
@given(conversations(), st.data())
def test_the_checker_finds_any_other_text(requests: list[list[Document]], data: st.DataObject) -> None:
    """A change anywhere in the outgoing messages, notes and placeholders included, is no longer valid."""
    process = Process(policy=POLICY)
    body = raw(requests[-1])
    result = process.result(body)
    out = json.loads(b"".join(wire.splice(body, result.edits)))
    places = [
        (message, at)
        for message in out["messages"]
        for at in range(len(_texts(message)))
        if _texts(message)[at]
    ]
    if not places:
        return
    message, at = data.draw(st.sampled_from(places))
    text = _texts(message)[at]
    cut = data.draw(st.integers(0, len(text) - 1))
    if text.startswith(HEADING) or "\n\n" + HEADING in text:
        cut = data.draw(st.integers(0, max(0, text.rfind(HEADING) - 3)))  # what a note says besides is free
        if text.startswith(HEADING):
            return
    changed = text[:cut] + "#" + text[cut + 1 :]
    if changed == text:
        return
    if isinstance(message["content"], list):
        message["content"][at]["text"] = changed
    else:
        message["content"] = changed
    with pytest.raises(Invalid):
        process.check(body, json.dumps(out).encode(), result.moved)


PLAYED = """
import hashlib, json, sys
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.volatile import VolatileKind
from ctxgate.compression.expressions import Expression
from support.forms import Process
process = Process(policy=Policy(Level.DECLARED, kinds=frozenset(VolatileKind)))
digest = hashlib.sha256()
for turn in json.load(sys.stdin):
    digest.update(process.checked(turn.encode()))
print(digest.hexdigest())
"""


def test_the_hash_seed_of_the_interpreter_changes_nothing() -> None:
    clock = "{}: 2026-01-05T09:{:02}:00Z, pid {}, 123e4567-e89b-42d3-a456-4266141740{:02}"
    turns = []
    history: list[Document] = [{"role": "user", "content": "Go."}]
    for at in range(6):
        head = "\n".join(clock.format(name, at, 4711 + at, at) for name in ("one", "two", "three"))
        turns.append(raw([{"role": "system", "content": head}, *history]).decode())
        history += [{"role": "assistant", "content": "x" * 2000}, {"role": "user", "content": str(at)}]
    found = printed(PLAYED, json.dumps(turns), "1", "2")
    process = Process(policy=Policy(Level.DECLARED, kinds=frozenset(VolatileKind)))
    expected = hashlib.sha256(b"".join([process.checked(turn.encode()) for turn in turns])).hexdigest()
    assert found == {expected + "\n"}


@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository")
@pytest.mark.parametrize("kinds", [[], [Perturbation.CLOCK], list(Perturbation)])
def test_recorded_sessions_are_valid_and_extend_themselves(kinds: list[Perturbation]) -> None:
    process = Process(policy=Policy(Level.DECLARED, kinds=frozenset({VolatileKind.CLOCK})))
    requests = unkept = 0
    for path in sorted(TRAJECTORIES.glob("*-0.jsonl"))[:8] + sorted(TRAJECTORIES.glob("repair-*.jsonl")):
        known: list[bytes] = []
        kept = True
        for turn in read_session(path).turns():
            body = request_body(perturb(turn, kinds), PLAN)
            result = process.result(body)
            out = b"".join(wire.splice(body, result.edits))
            process.check(body, out, result.moved)
            now = messages(out)
            size = len(known) if kept else len(known) - 1
            assert now[:size] == known[:size]
            known, requests = now, requests + 1
            kept = not any("do not repeat" in reason.reason for reason in result.reasons)
            unkept += not kept
    assert requests > 100
    assert unkept < 0.75 * requests  # the sessions are short, and a room of 512 bytes holds nine notes
