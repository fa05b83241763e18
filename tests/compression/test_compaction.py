"""Records of compactions: how they are kept, which one counts, and what it does to a body."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ctxgate.compression.carriers import notice
from ctxgate.compression.chain import Chains, chain
from ctxgate.compression.compaction import (
    VERSION,
    Compaction,
    chosen,
    covered,
    decode,
    edits_of,
    encode,
    joined,
    newly_left_out,
    root_of,
    slot_key,
)
from ctxgate.compression.cut import Range
from ctxgate.compression.dialects.chat import facts_of
from ctxgate.compression.masked_record import Made, masked_record, masking_of
from ctxgate.compression.masking import Masking, Split
from ctxgate.compression.said import read_said
from ctxgate.compression.splitting import split_message
from ctxgate.compression.validity import Invalid, check_cut
from ctxgate.inference import wire
from support.chats import chat, raw
from support.compacting import CompactingProcess, messages_of
from support.long_chats import long_chat
from support.seeds import printed

HASHES = tuple(bytes([at]) * 32 for at in range(1, 12))
RECORD = Compaction(
    anchor=HASHES[5],
    covers=6,
    dropped=((2, 4), (5, 6)),
    masked=(4,),
    split=((1, 900),),
    carrier=b'{"role":"user","content":"left out"}',
    reference="ab" * 12,
    reason="window",
    by="masking",
    tokens=77,
)


def test_a_record_comes_back_as_it_was_kept() -> None:
    assert decode(encode(RECORD)) == RECORD


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([VERSION]),
        msgspec.msgpack.encode((VERSION + 1, *msgspec.structs.astuple(RECORD))),
        encode(msgspec.structs.replace(RECORD, anchor=b"short")),
        encode(msgspec.structs.replace(RECORD, dropped=((4, 2),))),
        encode(msgspec.structs.replace(RECORD, dropped=((2, 4), (4, 6)))),
        encode(msgspec.structs.replace(RECORD, dropped=((2, 9),))),
        encode(msgspec.structs.replace(RECORD, masked=(6,))),
    ],
)
def test_what_is_no_record_is_none(text: bytes) -> None:
    assert decode(text) is None


def test_slots_of_one_root_and_of_two_have_different_keys() -> None:
    keys = {slot_key(root, number) for root in HASHES[:3] for number in range(4)}
    assert len(keys) == 12


def test_the_root_ends_with_the_first_user_message() -> None:
    def root(text: str) -> bytes:
        facts = chat(text)
        return root_of(facts, chain("acme/alpha", [each.digest for each in facts]))

    assert root("S U A U") == root("S U A[a] Ra")
    assert root("S A U") == root("S A U A U")
    assert root("S A A") == root("S A A A")  # the head alone
    assert root("A A") == root("A A A")
    with pytest.raises(ValueError, match="without messages"):
        root("")


def test_the_longest_anchor_that_the_request_holds_counts_and_of_two_the_later() -> None:
    short = msgspec.structs.replace(RECORD, anchor=HASHES[2], covers=3)
    later = msgspec.structs.replace(RECORD, reason="money")
    other = msgspec.structs.replace(RECORD, anchor=b"x" * 32, covers=8)
    assert chosen([short, RECORD, later, other], HASHES[:9]) is later
    assert chosen([short, RECORD, other], HASHES[:5]) is short
    assert chosen([RECORD], HASHES[:5]) is None
    assert chosen([], HASHES) is None


def test_context_b2_a_late_result_of_a_dropped_call_makes_a_record_useless() -> None:
    record = Compaction(HASHES[3], 4, dropped=((2, 4),))
    assert covered(record, chat("S U A[a] Ra A U"))
    assert not covered(record, chat("S U A[a] Ra A Ra U"))
    assert not covered(record, chat("S U A[a] Ra")), "the end would be left out"
    assert not covered(Compaction(HASHES[3], 4, masked=(2,)), chat("S U A[a] Ra A U"))


def body(*messages: dict[str, Any]) -> wire.Body:
    return wire.parse(json.dumps({"messages": messages, "x": 1}).encode())


def test_ranges_give_way_to_one_carrier() -> None:
    before = body(*({"role": "user", "content": str(at)} for at in range(7)))
    spans = wire.array_spans(before, "messages")
    assert spans is not None
    edits = edits_of(spans, ((1, 3), (4, 5)), b'{"c":1}', {3: b'{"t":3}', 4: b"gone"})
    after = json.loads(b"".join(wire.splice(before.raw, edits)))
    contents = [message.get("content", message) for message in after["messages"]]
    assert contents == ["0", {"c": 1}, {"t": 3}, "5", "6"]
    assert after["x"] == 1
    with pytest.raises(ValueError, match="the end of a conversation"):
        edits_of(spans, ((5, 7),), b"{}", {})


def test_a_split_message_keeps_its_ends_and_a_user_s_rules() -> None:
    text = "Begin. " + "lorem ipsum. " * 400 + "Never push to main. " + "dolor sit. " * 400 + "The end."
    raw = json.dumps({"role": "user", "content": text, "name": "n"}).encode()
    out = read_said(split_message(raw, 1200, "id1"))
    assert out.text.startswith("Begin. lorem")
    assert "The end." in out.text
    assert out.text.endswith("- Never push to main.")
    assert "id1" in out.text
    assert len(out.text) < 2400
    tool = read_said(split_message(raw.replace(b'"user"', b'"tool"'), 1200, "id1"))
    assert "Never push" not in tool.text
    assert len(tool.text.encode()) <= 1200


def test_parts_that_are_no_texts_survive_a_split() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "a" * 90}, image, {"type": "text", "text": "b" * 9000}]
    out = json.loads(split_message(json.dumps({"role": "tool", "content": parts}).encode(), 600, "r"))[
        "content"
    ]
    assert out[:2] == parts[:2]
    assert len(out[2]["text"]) <= 600 - 90
    with pytest.raises(ValueError, match="not a message"):
        split_message(b"[]", 600, "r")


def test_context_g3_pictures_are_never_split_as_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 50_000}}
    alone = json.dumps({"role": "user", "content": [image]}).encode()
    assert split_message(alone, 600, "r") == alone
    text = {"type": "text", "text": "word " * 5000}
    both = json.loads(
        split_message(json.dumps({"role": "user", "content": [text, image]}).encode(), 600, "r")
    )
    assert both["content"][1] == image
    assert len(both["content"][0]["text"]) <= 600


def test_long_arguments_of_a_call_are_cut_and_stay_json() -> None:
    written = {"path": "src/a.py", "lines": ["x" * 9000, 3], "more": {"text": "y" * 50}}
    call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": json.dumps(written)}}
    broken = {"id": "d", "function": {"name": "f", "arguments": "{" + "z" * 3000}}
    message = {"role": "assistant", "content": "I write.", "tool_calls": [call, broken]}
    out = json.loads(split_message(json.dumps(message).encode(), 1000, "r"))
    plain = out["tool_calls"][1]["function"]["arguments"]
    assert plain.startswith("{zzz")
    assert len(plain) <= 600
    assert (out["content"], out["tool_calls"][0]["id"]) == ("I write.", "c")
    arguments = json.loads(out["tool_calls"][0]["function"]["arguments"])
    assert (arguments["path"], arguments["lines"][1]) == ("src/a.py", 3)
    assert arguments["more"] == written["more"]
    assert arguments["lines"][0].startswith("xxx")
    assert len(arguments["lines"][0]) <= 1000
    assert "id r" in arguments["lines"][0]
    small = json.dumps({"role": "assistant", "content": "a", "tool_calls": [call]}).encode()
    assert json.loads(split_message(small, 99_999, "r")) == json.loads(small)


def test_context_f16_what_a_model_thought_is_cut_as_well() -> None:
    thought = "First. " + "hmm " * 3000 + "Done."
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": thought, "reasoning": None}
    out = json.loads(split_message(json.dumps(message).encode(), 900, "r"))
    assert (out["content"], out["reasoning"]) == ("Yes.", None)
    assert out["reasoning_content"].startswith("First. ")
    assert out["reasoning_content"].endswith("Done.")
    assert len(out["reasoning_content"]) <= 900


@pytest.mark.parametrize("arguments", ['{"t": "\\ud800', '{"t": "\ud800'])
def test_context_f16_half_a_surrogate_pair_keeps_no_text_whole(arguments: str) -> None:
    """In the arguments it is escaped once, or twice; in the content it is escaped as well."""
    call = {"id": "c", "function": {"name": "f", "arguments": arguments + "x" * 9000 + '"}'}}
    message = {"role": "assistant", "content": "\ud800" + "y" * 9000, "tool_calls": [call]}
    out = json.loads(split_message(json.dumps(message).encode(), 2000, "r"))
    cut = json.loads(out["tool_calls"][0]["function"]["arguments"])["t"]
    assert cut.startswith("\ufffdxxx")
    assert out["content"].startswith("\ufffdyyy")
    assert len(cut.encode()) + len(out["content"].encode()) <= 2000


def test_the_bytes_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import sys, json, hashlib;from support.compacting import CompactingProcess as P;"
        "h=json.load(sys.stdin);p=P();out=p.sent(h,2000);assert p.made;"
        "print(hashlib.sha256(out+b''.join(p.forms.by_key.values())).hexdigest())"
    )
    history: list[dict[str, Any]] = [{"role": "user", "content": "Go. Never stop. Always log."}]
    for at in range(20):
        call = {"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        history.append({"role": "assistant", "content": None, "tool_calls": [call]})
        history.append({"role": "tool", "tool_call_id": f"c{at}", "content": f"{at} " * 40})
        history.append({"role": "user", "content": f"You must hold {at}."})
    assert len(printed(program, json.dumps(history), "0", "7")) == 1


def test_masking_becomes_a_record_that_the_next_one_builds_on() -> None:
    raws = [json.dumps({"role": "user", "content": f"You must hold {at}."}).encode() for at in range(8)]
    masking = Masking((6,), (Range(2, 4),), (Split(5, 300),), 50, fits=True)
    first = masked_record(masking, None, raws, HASHES, lambda name: name.hex()[:8], Made("window", 60))
    assert first is not None
    assert (first.covers, first.anchor, first.dropped) == (7, HASHES[6], ((2, 4),))
    assert (first.masked, first.split, first.by, first.tokens) == ((6,), ((5, 900),), "masking", 60)
    said = read_said(first.carrier)
    assert said.role == "user"
    assert said.text.startswith("[Record by the gateway")
    assert "- You must hold 2.\n- You must hold 3." in said.text
    assert "hold 4" not in said.text
    again = masking_of(first)
    assert (again.masked, again.dropped, again.split) == ((6,), (Range(2, 4),), (Split(5, 300),))
    same = masked_record(again, first, raws, HASHES, lambda _: "r", Made("window", 9))
    assert same is None, "nothing new"
    nothing = Masking((), (), (), 1, fits=True)
    assert masked_record(nothing, None, raws, HASHES, lambda _: "r", Made("window", 9)) is None


def test_context_m7_a_summary_stays_when_masking_follows_it() -> None:
    summary = json.dumps({"role": "user", "content": "[Summary] Never touch main."}).encode()
    rule = b'{"role":"user","content":"Never touch main. You must log."}'
    text = read_said(notice("r1", [rule, b'{"role":"tool","content":"must"}'], summary)).text
    assert text.startswith("[Summary] Never touch main.\n[Record by the gateway")
    assert text.count("Never touch main.") == 1
    assert text.endswith("- You must log.")


def test_context_f11_of_many_rules_the_newest_are_said_and_how_many_are_not() -> None:
    raws = [json.dumps({"role": "user", "content": f"You must hold {at}."}).encode() for at in range(300)]
    text = read_said(notice("r1", raws, room=2000)).text
    # "You must hold 299." has 18 bytes and 4 around it: 90 of them fit into 2,000.
    assert "[210 older instructions of the user " in text
    assert text.endswith("- You must hold 299.")
    assert [at for at in range(300) if f"- You must hold {at}." in text] == [*range(210, 300)]
    assert read_said(notice("r1", raws[:90], room=2000)).text == read_said(notice("r1", raws[:90])).text
    summary = json.dumps({"role": "user", "content": "[Summary]\n" + "It is. " * 5000}).encode()
    short = read_said(notice("r1", raws, summary, room=2000)).text
    assert short.startswith("[Summary]\nIt is.")
    assert len(short) <= 4000 + len(text) + 1


def test_context_f11_a_summary_stays_when_masking_follows_masking() -> None:
    summary = json.dumps({"role": "user", "content": "[Summary] All is well."}).encode()
    rules = [b'{"role":"user","content":"You must log."}', b'{"role":"user","content":"You must test."}']
    once = notice("r1", rules[:1], summary)
    twice = read_said(notice("r2", rules, once, reference_before="r1")).text
    assert twice == read_said(notice("r2", rules, summary)).text


def test_what_is_new_in_a_record() -> None:
    assert newly_left_out(RECORD, None) == [1, 2, 3, 4, 5]
    assert newly_left_out(RECORD, Compaction(b"", 0, dropped=((2, 4),), split=((1, 9),))) == [4, 5]
    assert joined([(5, 6), (2, 4), (4, 5), (8, 9)]) == ((2, 6), (8, 9))


def test_context_o5_of_two_records_made_at_once_the_later_takes_up_the_other_or_gives_way() -> None:
    other = Compaction(b"", 0, dropped=((2, 3),), masked=(3, 8), split=((1, 700), (2, 9), (7, 50)))
    both = RECORD.with_others(other)
    assert both is not None
    assert (both.dropped, both.masked, both.split) == (RECORD.dropped, (4, 8), ((1, 700), (7, 50)))
    assert (both.anchor, both.carrier) == (RECORD.anchor, RECORD.carrier)
    assert RECORD.with_others(Compaction(b"", 0, dropped=((4, 5),))) is None


@pytest.mark.parametrize(
    "end",
    [
        {"role": "user", "content": "stop"},
        {"role": "assistant", "content": "Shall I delete the old tables? Answer yes or no."},
    ],
)
def test_context_e6_s2_a_record_is_neither_the_last_word_nor_an_answer_of_the_user(
    end: dict[str, Any],
) -> None:
    """At a "stop", or where the user is asked to agree: that stays last, and nothing answers it."""
    task = {"role": "user", "content": "Port the billing service."}
    history = [task, *({"role": "assistant", "content": f"Step {at}. " + "x " * 200} for at in range(9)), end]
    process = CompactingProcess()
    sent = messages_of(process.sent(history, 3000))
    (record,) = process.made
    assert sent[0] == task
    assert sent[-1] == end
    synthetic = [message for message in sent if message not in history]
    assert synthetic == [json.loads(record.carrier)]
    assert synthetic[0]["role"] == "user"
    assert synthetic[0]["content"].startswith("[Record by the gateway")
    assert "continue" not in synthetic[0]["content"].lower()
    # In the next turn the record stands where it stood, and what the user says then is the last word.
    later = messages_of(process.sent([*history, {"role": "user", "content": "no"}]))
    assert later == [*sent, {"role": "user", "content": "no"}]


@pytest.mark.parametrize(
    ("before", "after", "dropped", "changed", "reason"),
    [
        ("S U A[a] Ra U", "S U N U", ((2, 4),), (), "carrier"),  # no user message stands there
        ("S U A[a] Ra U", "S U U U U", ((2, 4),), (), "count"),
        ("S U A[a] Ra A U", "S U U U", ((2, 4),), (), "count"),
        ("S U A[a] Ra U", "U U A[a] Ra U", ((0, 1),), (), "kept"),
        ("S U A[a] Ra U", "S U A[a] Ra U", ((1, 2),), (), "kept"),
        ("S U A[a] Ra U", "S U A[a] U", ((3, 5),), (), "kept"),
        ("S U A[a] Ra U", "S U A[a] Rb U", (), (3,), "pairing"),
        ("S U A[a] Ra U", "S U A[a] U U", ((3, 4),), (), "pairing"),
    ],
)
def test_the_checker_refuses(
    before: str, after: str, dropped: tuple[tuple[int, int], ...], changed: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(Invalid) as caught:
        check_cut(chat(before), chat(after), dropped, changed, carried=bool(dropped), added=999)
    assert caught.value.reason == reason


def test_the_checker_refuses_other_texts_and_longer_prompts() -> None:
    views = CompactingProcess().views
    raws = [b'{"role":"user","content":"a"}', b'{"role":"user","content":"b"}']
    other = b'{"role":"user","content":"much longer"}'
    facts, longer = views.messages("t", raws), views.messages("t", [raws[0], other])
    with pytest.raises(Invalid, match="messages"):
        check_cut(facts, longer, (), (), carried=False, added=99)
    with pytest.raises(Invalid, match="longer"):
        check_cut(facts, longer, (), (1,), carried=False)
    check_cut(facts, longer, (), (1,), carried=False, added=99)
    check_cut(facts, facts, (), (), carried=False)


def test_context_d4_d6_system_notes_keep_place_and_role_and_the_gateway_writes_none() -> None:
    first, *rest = long_chat(40)
    notes = [{"role": "system", "content": f"Note {number}: the branch is frozen."} for number in range(3)]
    messages = [first, *rest[:41], notes[0], *rest[41:81], notes[1], *rest[81:], notes[2]]
    process = CompactingProcess()
    sent = messages_of(process.sent(messages, most=12_000))
    assert len(process.made) == 1
    assert len(sent) < len(messages) // 2, "rounds were left out"
    assert (sent[0], sent[-1]) == (first, notes[2])
    others = [each for each in sent if each["role"] != "tool"]  # results may be shortened
    own = [each for each in others if each not in messages]
    assert [each["role"] for each in own] == ["user"]
    places = [messages.index(each) for each in others if each in messages]
    assert places == sorted(places)


def test_context_s4_what_is_kept_is_found_by_all_that_a_conversation_begins_with() -> None:
    def slot(tenant: str, text: str) -> bytes:
        facts = [
            facts_of(each) for each in (raw("S"), json.dumps({"role": "user", "content": text}).encode())
        ]
        return slot_key(root_of(facts, Chains().of(tenant, facts).hashes), 0)

    def under(system: str) -> bytes:
        head = json.dumps({"role": "system", "content": system}).encode()
        facts = [facts_of(head), facts_of(raw("U"))]
        return slot_key(root_of(facts, Chains().of("t", facts).hashes), 0)

    assert slot("t", "go on") == slot("t", "go on")
    assert len({slot("t", "go on"), slot("u", "go on"), slot("t", "go on!"), under("a"), under("b")}) == 5
