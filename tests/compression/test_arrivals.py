"""Tool results are shortened once, when they arrive, and the same bytes go out ever after."""

from __future__ import annotations

import json

import pytest

from ctxgate.compression.arrivals import NOTHING, SMALL_ERROR, ArrivalPolicy, ArrivalsMemory, arriving
from ctxgate.compression.dialects.chat import facts_of
from ctxgate.compression.tool_output import shrink_message
from support.arriving import DONE, LONG, SYSTEM, USER, Process, call, raws, reference, result
from support.forms import TENANT, Forms


def test_a_result_that_arrives_goes_out_shortened_with_the_id_of_its_original() -> None:
    messages = [SYSTEM, USER, call("c1"), result("c1")]
    sent = raws(messages)
    found = Process().arrived(sent)
    digest = facts_of(sent[3]).lasting
    assert found.texts == {3: shrink_message(sent[3], 2000, reference(digest))}
    assert found.originals == {reference(digest): sent[3]}
    assert reference(digest) in json.loads(found.texts[3])["content"]
    assert found.bytes_before == len(sent[3])
    assert found.bytes_saved == len(sent[3]) - len(found.texts[3])
    assert found.shortened == 1


def test_gateways_n2_it_goes_out_with_the_same_bytes_ever_after_and_is_archived_once() -> None:
    process = Process()
    messages = [SYSTEM, USER, call("c1"), result("c1")]
    first = process.arrived(raws(messages))
    later = process.arrived(raws([*messages, DONE, {"role": "user", "content": "more"}]))
    assert later.texts == first.texts
    assert (later.originals, later.bytes_before, later.bytes_saved) == ({}, 0, 0)


def test_the_same_request_again_names_its_originals_again() -> None:
    """Its process may have died between the claim and the archive."""
    forms = Forms()
    sent = raws([USER, call("c1"), result("c1")])
    assert Process(forms).arrived(sent) == Process(forms).arrived(sent)


def test_a_process_that_knows_a_decision_asks_nothing() -> None:
    process = Process()
    messages = raws([USER, call("c1"), result("c1")])
    process.arrived(messages)
    assert process.forms.asked == 1
    process.arrived([*messages, *raws([DONE, USER])])
    assert process.forms.asked == 1
    process.memory.forget()
    assert process.arrived([*messages, *raws([DONE, USER])]).texts
    assert process.forms.asked == 2


def test_small_conversations_ask_nothing() -> None:
    process = Process()
    assert process.arrived(raws([USER, call("c1"), result("c1", "ok")])) is NOTHING
    assert process.forms.asked == 0


def test_gateways_n2_results_from_before_the_feature_was_on_stay_as_they_came() -> None:
    process = Process()
    messages = [USER, call("c1"), result("c1"), call("c2"), result("c2", LONG + "\nother")]
    found = process.arrived(raws(messages))
    assert list(found.texts) == [4]
    # Also where a process without memory, or another conversation that begins alike, sees them later.
    again = Process(process.forms)
    assert list(again.arrived(raws([*messages, DONE, USER])).texts) == [4]
    assert again.arrived(raws(messages[:3])) == NOTHING


def test_an_equal_result_later_does_not_change_the_one_before() -> None:
    """The older one, sent before the feature was on, is known apart by its place among equal ones."""
    messages = [USER, call("c1"), result("c1"), call("c2"), result("c2")]
    assert list(Process().arrived(raws(messages)).texts) == [4]


def test_results_of_one_batch_arrive_together_and_what_a_user_adds_does_not_matter() -> None:
    batch = call("c1")
    batch["tool_calls"].append({**batch["tool_calls"][0], "id": "c2"})
    messages = [USER, batch, result("c1"), result("c2", LONG.upper()), {"role": "user", "content": "go on"}]
    assert sorted(Process().arrived(raws(messages)).texts) == [2, 3]


@pytest.mark.parametrize("limit", [400, 1000, 50_000])
def test_a_limit_that_changes_leaves_old_results_as_they_went_out(limit: int) -> None:
    forms = Forms()
    messages = [USER, call("c1"), result("c1"), call("c2"), result("c2", LONG[:1500])]
    before = Process(forms)
    sent = {**before.arrived(raws(messages[:3])).texts, **before.arrived(raws(messages)).texts}
    assert sorted(sent) == [2]
    after = Process(forms, ArrivalPolicy(limit))
    assert after.arrived(raws(messages)).texts == sent
    assert after.arrived(raws([*messages, DONE, USER])).texts == sent


def test_two_processes_with_other_limits_agree() -> None:
    forms = Forms()
    messages = raws([USER, call("c1"), result("c1")])
    first = Process(forms, ArrivalPolicy(50_000)).arrived(messages)
    assert first == NOTHING
    assert Process(forms, ArrivalPolicy(1000)).arrived(messages) == NOTHING


def test_new_ids_in_every_turn_and_a_new_system_message_change_nothing() -> None:
    process = Process()
    first = process.content([SYSTEM, USER, call("c1"), result("c1")], 3)
    later = [{"role": "system", "content": "It is noon."}, USER, call("x9"), result("x9"), DONE, USER]
    assert len(first) < len(LONG)
    assert process.content(later, 3) == first
    assert json.loads(process.arrived(raws(later)).texts[3])["tool_call_id"] == "x9"


def test_a_history_that_the_client_cuts_keeps_the_shortened_results() -> None:
    process = Process()
    messages = [USER, call("c1"), result("c1"), call("c2"), result("c2", LONG.upper())]
    process.arrived(raws(messages[:3]))
    kept = process.arrived(raws(messages)).texts[4]
    assert process.arrived(raws([USER, *messages[3:], DONE, USER])).texts == {2: kept}


def test_short_reports_of_errors_stay_whole() -> None:
    trace = "Traceback (most recent call last):\n" + "\n".join(f"  File x, line {n}" for n in range(150))
    error = f"{trace}\nValueError: bad"
    assert 2000 < len(error) < SMALL_ERROR
    assert Process().arrived(raws([USER, call("c1"), result("c1", error)])) == NOTHING
    long = Process().content([USER, call("c1"), result("c1", error * 3)], 2)
    assert len(long) <= 2000
    assert "ValueError: bad" in long


def test_context_e5_pinned_results_and_those_of_sticky_tools_stay_whole() -> None:
    pinned = [USER, call("c1"), result("c1", ctxgate={"pin": True})]
    assert Process().arrived(raws(pinned)) == NOTHING
    skill = [USER, call("c1", "read_skill"), result("c1")]
    sticky = ArrivalPolicy(2000, frozenset({"read_skill"}))
    assert Process(policy=sticky).arrived(raws(skill)) == NOTHING
    assert Process(policy=sticky).arrived(raws([USER, call("c1"), result("c1")])).shortened == 1


def test_parts_that_are_no_texts_stay() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3000}}
    parts = [{"type": "text", "text": LONG}, image, {"type": "text", "text": "short"}]
    found = Process().content([USER, call("c1"), result("c1", parts)], 2)
    assert found[1:] == parts[1:]
    assert found[0]["text"].startswith("line 0 ")
    assert len(found[0]["text"]) <= 2000


def test_what_layout_has_put_behind_a_result_stays() -> None:
    messages = raws([USER, call("c1"), result("c1")])
    noted = json.loads(messages[2])
    noted["content"] += "\n\n[As of this message]\nIt is noon."
    process = Process()
    found = process.arrived(messages, [*messages[:2], json.dumps(noted).encode()])
    plain = process.content([USER, call("c1"), result("c1")], 2)
    assert len(plain) <= 2000
    assert json.loads(found.texts[2])["content"] == plain + "\n\n[As of this message]\nIt is noon."
    listed = json.loads(raws([result("c1", [{"type": "text", "text": LONG}])])[0])
    note = {"type": "text", "text": "[As of this message]\nIt is noon."}
    client = [*messages[:2], json.dumps(listed).encode()]
    goes = [*messages[:2], json.dumps({**listed, "content": [*listed["content"], note]}).encode()]
    content = json.loads(Process().arrived(client, goes).texts[2])["content"]
    assert [len(content[0]["text"]) <= 2000, content[1]] == [True, note]


def test_a_result_whose_text_layout_has_changed_goes_out_as_layout_left_it() -> None:
    messages = raws([USER, call("c1"), result("c1")])
    changed = messages[2].replace(b"line 3 ", b"[see latest note] ")
    assert Process().arrived(messages, [*messages[:2], changed]) == NOTHING


def test_what_cannot_be_read_as_a_message_goes_out_as_it_came() -> None:
    raw = b'{"role":"tool","tool_call_id":"c1","content":"\\ud83d %s"}' % (b"word " * 1000)
    assert Process().arrived([*raws([USER, call("c1")]), raw]) == NOTHING


def test_what_is_no_message_is_left_alone() -> None:
    assert Process().arrived([b'"text"', b"[1]", *raws([USER])]) == NOTHING


def test_how_much_there_is_to_shorten_is_known_before() -> None:
    messages = raws([USER, call("c1"), result("c1"), call("c2"), result("c2", LONG.upper())])
    found = arriving(messages, [facts_of(raw) for raw in messages], ArrivalsMemory(), TENANT)
    assert (found.fresh, found.size) == ((4,), len(messages[4]))


def test_two_tenants_in_one_process_share_no_decision_and_no_id() -> None:
    process = Process()
    messages = raws([USER, call("c1"), result("c1")])
    mine = process.arrived(messages)
    process.tenant = "acme/beta"
    theirs = process.arrived(messages)
    assert mine.originals.keys().isdisjoint(theirs.originals)
    assert mine.texts != theirs.texts
    process.policy = ArrivalPolicy(50_000)
    process.tenant = "other/beta"
    assert process.arrived(messages) == NOTHING


def test_cache_marks_that_move_on_change_nothing_and_stay_where_the_client_puts_them() -> None:
    process = Process()
    mark = {"cache_control": {"type": "ephemeral"}}
    first = process.arrived(raws([USER, call("c1"), result("c1", **mark)])).texts[2]
    assert json.loads(first)["cache_control"] == mark["cache_control"]
    later = process.arrived(raws([USER, call("c1"), result("c1"), DONE, USER])).texts[2]
    assert "cache_control" not in json.loads(later)
    assert json.loads(later)["content"] == json.loads(first)["content"]
