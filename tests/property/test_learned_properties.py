"""The invariants of level `learned`, over generated texts, orders and conversations, and recorded ones."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxgate.compression import layout
from ctxgate.compression.arrange import arranged
from ctxgate.compression.blocks import Splitter, contents_of, joined
from ctxgate.compression.moved import PLACEHOLDER
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.rates import OFTEN, TAIL
from ctxgate.compression.validity import Invalid
from ctxgate.gateway.perturb import Perturbation, perturb
from ctxgate.gateway.replay_run import Plan, request_body
from ctxgate.gateway.sessions import read_session
from ctxgate.inference import wire
from support.forms import Forms, Process
from support.seeds import printed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ctxgate.gateway.sessions import Turn

pytestmark = pytest.mark.integration

TRAJECTORIES = Path(__file__).parents[3] / "shared" / "trajectories"
LEARNED = Policy(level=Level.LEARNED)
PLAN = Plan("tiny")

LINES = [
    "# A",
    "## B",
    "### C",
    "<m>",
    "</m>",
    "<m>x</m>",
    "<n a='b'>",
    "</n>",
    "```",
    "~~~",
    "Rules: x",
    "- **Key**: y",
    "Current time: 2025-06-01T10:00:00Z",
    "it is 2025-06-01 10:00:00 and late",
    "plain",
    "  indented",
    "x-a-header: q",
]
texts = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.one_of(st.sampled_from([*LINES, "", "", "\t ", "\ud800"]), st.text(max_size=8)), max_size=24
    ).map("\n".join),
)
ranks = st.sampled_from([0, 0, 1, 2, 3, 4, OFTEN, TAIL])


@settings(deadline=None, max_examples=300)
@given(texts)
def test_blocks_join_to_the_text(text: str) -> None:
    blocks = Splitter().split(text)
    assert joined(blocks) == text
    assert [block.gap.strip() for block in blocks] == [""] * len(blocks)
    assert all("\n" in block.gap for block in blocks[:-1])
    assert all(0 <= block.label <= len(block.text) for block in blocks)
    # Units are numbered in the order of their first blocks, and an end stays an end.
    assert [*dict.fromkeys(block.unit for block in blocks)] == sorted({block.unit for block in blocks})
    edges = [block.edge for block in blocks]
    assert edges == sorted(edges)


@settings(deadline=None, max_examples=300)
@given(texts, st.data())
def test_an_order_moves_blocks_and_changes_none(text: str, data: st.DataObject) -> None:
    blocks = Splitter().split(text)
    order = {block.slot: data.draw(ranks) for block in blocks}
    found = arranged(blocks, order)
    assert Counter(block.gap for block in found.blocks) == Counter(block.gap for block in blocks)
    assert sorted(found.origin) == list(range(len(blocks)))
    restored = [
        block.text if words is None else block.text.removesuffix(PLACEHOLDER) + words
        for block, words in zip(found.blocks, found.taken, strict=True)
    ]
    assert restored == [blocks[at].text for at in found.origin]
    # What has no rank keeps its order, and nothing ranked stands before it.
    high = [max(order[b.slot] % TAIL for b in blocks if b.unit == each.unit) for each in blocks]
    placed = [high[at] for at in found.origin if not blocks[at].edge]
    assert placed == sorted(placed)
    assert [at for at in found.origin if high[at] == 0] == [at for at in range(len(blocks)) if high[at] == 0]
    # What the checker compares is the same.
    again = "".join(
        part for part, block in zip(restored, found.blocks, strict=True) for part in (part, block.gap)
    )
    assert Counter(contents_of(again)) == Counter(contents_of(text))
    assert found.changed() is (joined(found.blocks) != text or found.moved > 0)


@dataclass(frozen=True)
class Block:
    """A block of a generated head: its name, and when it changes."""

    name: str
    changes: str

    def text(self, conversation: int, request: int) -> str:
        count = {"never": 0, "conversation": conversation, "request": request}[self.changes]
        return f"{self.name}: {self.changes} {'z' * (count % 3)}{count}"


@st.composite
def agents(draw: st.DrawFn) -> list[Block]:
    changes = draw(st.lists(st.sampled_from(["never", "never", "conversation", "request"]), max_size=6))
    return [Block(f"Block {letter}", each) for letter, each in zip("ABCDEF", changes, strict=False)]


def body(agent: list[Block], conversation: int, turn: int, request: int) -> bytes:
    blocks = (block.text(conversation, request) for block in agent)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "\n\n".join(("You are an agent.", *blocks))},
        {"role": "user", "content": f"Task {conversation}"},
    ]
    for number in range(turn):
        messages += [
            {"role": "assistant", "content": f"{conversation}/{number}"},
            {"role": "user", "content": f"More {number}"},
        ]
    return json.dumps({"model": "m", "messages": messages}).encode()


def outline(raw: bytes) -> list[str]:
    """The names of the head's blocks in the order they were sent in, and which are placeholders."""
    parts = json.loads(raw)["messages"][0]["content"].split("\n\n")
    return [part.partition(":")[0] + ("!" if PLACEHOLDER in part else "") for part in parts]


@settings(deadline=None, max_examples=60)
@given(agents(), st.data())
def test_an_order_never_changes_inside_a_conversation(agent: list[Block], data: st.DataObject) -> None:
    """Conversations side by side, in a fleet whose processes have each seen a part, one of them forgetful."""
    forms = Forms()
    fleet = [
        Process(forms, policy=LEARNED),
        Process(forms, policy=LEARNED),
        Process(forms, policy=LEARNED, memory=layout.Memory(conversations=2)),
    ]
    turns = dict.fromkeys(range(data.draw(st.integers(1, 7))), 0)
    began: dict[int, list[str]] = {}
    later: list[tuple[bytes, bytes]] = []
    for request in range(len(turns) * 3):
        conversation = data.draw(st.sampled_from(sorted(turns)[:3]))
        turn = turns[conversation]
        raw = body(agent, conversation, turn, request)
        out = data.draw(st.sampled_from(fleet)).checked(raw)
        assert outline(out) == began.setdefault(conversation, outline(out))
        turns[conversation] += 1
        if turn:
            later.append((raw, out))
        if turns[conversation] == 3:
            del turns[conversation]
    # A process that has seen nothing repeats every later request byte for byte.
    fresh = Process(forms, policy=LEARNED)
    assert [fresh.checked(raw) for raw, _ in later] == [out for _, out in later]


@settings(deadline=None, max_examples=40)
@given(agents())
def test_each_block_is_where_its_changes_call_for_from_the_third_conversation_on(agent: list[Block]) -> None:
    process, request = Process(policy=LEARNED), 0
    for conversation in range(5):
        out = []
        for turn in range(3):
            out.append(process.checked(body(agent, conversation, turn, request)))
            request += 1
        if conversation < 2:
            assert outline(out[0]) == ["You are an agent.", *(block.name for block in agent)]
            continue
        stays = [
            block.name + "!" * (block.changes == "request") for block in agent if block.changes[0] != "c"
        ]
        behind = [block.name for block in agent if block.changes[0] == "c"]
        for before, after in pairwise(out):
            assert outline(before) == ["You are an agent.", *stays, *behind]
            known = [bytes(each) for each in wire.parse(before).items("messages")]
            assert [bytes(each) for each in wire.parse(after).items("messages")][: len(known)] == known


@settings(deadline=None, max_examples=40)
@given(agents(), st.data())
def test_the_checker_finds_a_head_that_is_not_the_same_blocks(
    agent: list[Block], data: st.DataObject
) -> None:
    process = Process(policy=LEARNED)
    for conversation in range(3):
        for turn in range(2):
            raw = body(agent, conversation, turn, 2 * conversation + turn)
            result = process.result(raw)
    out = json.loads(b"".join(wire.splice(raw, result.edits)))
    head = out["messages"][0]["content"]
    at = data.draw(st.integers(0, len(head) - 1))
    for changed in (
        head[:at] + "#" + head[at + 1 :],
        head[:at] + head[at + 1 :],
        head[:at] + "\n#" + head[at:],
    ):
        out["messages"][0]["content"] = changed
        with pytest.raises(Invalid):
            process.check(raw, json.dumps(out).encode(), result.moved)


def recorded() -> list[Path]:
    return sorted(TRAJECTORIES.glob("airline-*.jsonl"))[:6] + sorted(TRAJECTORIES.glob("repair-*.jsonl"))


def sent(process: Process, turns: list[Turn]) -> list[bytes]:
    return [process.checked(request_body(turn, PLAN)) for turn in turns]


def with_memory(turn: Turn, user: int) -> Turn:
    """The turn with a section about its user in the middle of the system prompt, longer for some."""
    facts = "\n\n".join(f"- fact {user * 5 + at}: likes {at}" for at in range(user % 3 + 1))
    before, rest = turn.messages[0]["content"].split("\n\n", 1)
    content = f"{before}\n\n<user_memory>\nName: user {user}\n\n{facts}\n</user_memory>\n\n{rest}"
    return replace(turn, messages=({**turn.messages[0], "content": content}, *turn.messages[1:]))


def known_messages(raw: bytes) -> list[bytes]:
    return [bytes(each) for each in wire.parse(raw).items("messages")]


@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository")
def test_recorded_sessions_are_never_changed_without_a_habit() -> None:
    process = Process(policy=LEARNED)
    for path in recorded():
        for turn in read_session(path).turns():
            assert process.result(request_body(turn, PLAN)).edits == ()


@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository")
@pytest.mark.parametrize("habits", [[Perturbation.CLOCK], list(Perturbation)])
def test_recorded_sessions_with_clock_and_memory_extend_themselves(habits: list[Perturbation]) -> None:
    """From the third session on, the unkept newest note excepted; and behind the memory nothing is new."""
    process, heads = Process(policy=LEARNED), set()
    for user, path in enumerate(recorded()[:6]):
        known: list[bytes] = []
        for turn in read_session(path).turns():
            raw = request_body(perturb(with_memory(turn, user), habits), PLAN)
            result = process.result(raw)
            out = b"".join(wire.splice(raw, result.edits))
            process.check(raw, out, result.moved)
            messages = known_messages(out)
            if user >= 2:
                assert messages[: len(known)] == known
                heads.add(json.loads(messages[0])["content"].partition("<user_memory>")[0])
            kept = not any("do not repeat" in reason.reason for reason in result.reasons)
            known = messages if kept else messages[:-1]
    assert len(heads) == 1, "all that does not change stands before the memory, and is the same for all"
    assert heads.pop().count("\n") > 50


PLAYED = """
import hashlib, json, sys
from ctxgate.compression.policy import Level, Policy
from support.forms import Process
process = Process(policy=Policy(level=Level.LEARNED))
digest = hashlib.sha256()
for turn in json.load(sys.stdin):
    digest.update(process.checked(turn.encode()))
print(digest.hexdigest())
"""


def bodies() -> Iterator[bytes]:
    agent = [
        Block("A", "conversation"),
        Block("B", "request"),
        Block("C", "never"),
        Block("D", "conversation"),
    ]
    for conversation in range(5):
        for turn in range(3):
            yield body(agent, conversation, turn, 10 * conversation + turn)


def test_the_hash_seed_of_the_interpreter_changes_nothing() -> None:
    document = json.dumps([each.decode() for each in bodies()])
    found = printed(PLAYED, document, "1", "2")
    process = Process(policy=LEARNED)
    expected = hashlib.sha256(b"".join([process.checked(each) for each in bodies()])).hexdigest()
    assert found == {expected + "\n"}
