"""Recall in the gateway: it answers in time or not at all, and everything it says comes from the archive."""

from __future__ import annotations

import asyncio
import json

import pytest

from ctxgate.compression.recall_gate import Gate
from ctxgate.compression.recall_snippet import HEADING
from ctxgate.gateway.archive import Original, is_reference, reference_of
from ctxgate.gateway.config import Key
from ctxgate.gateway.identity import tenant_of
from ctxgate.gateway.ledger import LedgerUnavailable
from ctxgate.gateway.recall import OUTCOMES, Recall
from ctxgate.gateway.recall_wire import Add, Forget
from support.recalling import MESSAGES, ORIGINALS, NearProcess, Shelf

TENANT, ROOT = "acme/alpha", b"root"
ANY = Gate(least=0.0)
A, B, C = ORIGINALS


@pytest.fixture
def process() -> NearProcess:
    return NearProcess()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def outcomes() -> list[str]:
    return []


@pytest.fixture
async def recall(process: NearProcess, shelf: Shelf, outcomes: list[str]) -> Recall:
    recall = Recall(shelf, process, outcomes.append)
    recall.add(TENANT, ROOT)
    await recall.settled()
    return recall


async def asked(recall: Recall, text: str, gate: Gate = ANY, tenant: str = TENANT) -> tuple[str, ...] | None:
    """The ids of what is brought back for a text."""
    found = await recall.query(tenant, ROOT, text, 1, 500, 5.0, gate)
    return found.ids if found else None


async def test_what_was_dropped_is_found_by_its_exact_strings_and_its_words(
    recall: Recall, outcomes: list[str]
) -> None:
    assert await asked(recall, "what is d56a046e?") == (C,)
    assert await asked(recall, "open main.py") == (B,)
    assert await asked(recall, "may I change a billing table?") == (A,)
    assert outcomes == ["recalled"] * 3
    assert set(outcomes) <= set(OUTCOMES)


async def test_the_snippet_quotes_the_original_with_its_source(recall: Recall) -> None:
    found = await recall.query(TENANT, ROOT, "which port?", 1, 500, 5.0, ANY)
    assert found is not None
    assert found.text == f"{HEADING}\n[tool {B}]\n{MESSAGES[B]['content']}"


async def test_context_q2_every_id_that_is_told_leads_back_to_its_original(
    shelf: Shelf, recall: Recall
) -> None:
    found = await recall.query(TENANT, ROOT, "port of main.py, d56a046e and billing tables", 5, 900, 5.0, ANY)
    assert found is not None
    assert set(found.ids) == {A, B, C}
    for id_ in found.ids:
        body = await shelf.get(TENANT, id_)
        assert body is not None
        assert json.loads(body)["content"] in found.text


async def test_the_message_that_asks_is_not_its_own_answer(recall: Recall) -> None:
    itself = Gate(least=0.0, without=frozenset({C}))
    assert await asked(recall, "The deploy key is d56a046e; and the port?", itself) == (B,)


async def test_nothing_relevant_is_nothing(recall: Recall, outcomes: list[str]) -> None:
    assert await asked(recall, "completely unrelated: zebras", Gate()) is None
    assert await asked(recall, "port", Gate(least=2.0)) is None
    assert await asked(recall, "port", Gate(least=0.0, held=lambda _: True)) is None
    assert await recall.query(TENANT, ROOT, "port", 1, 10, 5.0, ANY) is None  # no room for the heading
    assert outcomes == ["irrelevant", "irrelevant", "nothing", "nothing"]


async def test_context_p1_p3_other_conversations_and_tenants_find_nothing(
    recall: Recall, outcomes: list[str]
) -> None:
    assert await asked(recall, "d56a046e", tenant="acme/beta") is None
    assert await asked(recall, "d56a046e", tenant="acme/alph") is None
    assert await recall.query(TENANT, b"roo", "d56a046e", 1, 500, 5.0, ANY) is None
    assert outcomes == ["unknown"] * 3


async def test_after_a_restart_the_archive_is_indexed_when_it_is_asked_for(
    process: NearProcess, recall: Recall, outcomes: list[str]
) -> None:
    process.dies()
    assert await asked(recall, "d56a046e") is None
    await recall.settled()
    assert await asked(recall, "d56a046e") == (C,)
    assert outcomes == ["unknown", "recalled"]


async def test_a_conversation_that_had_to_make_room_is_indexed_again(
    process: NearProcess, recall: Recall, outcomes: list[str]
) -> None:
    process.indexes.forget(b"")
    assert await asked(recall, "d56a046e") is None
    await recall.settled()
    assert await asked(recall, "d56a046e") == (C,)
    assert outcomes == ["unknown", "recalled"]


async def test_large_originals_are_read_off_the_loop(
    process: NearProcess, shelf: Shelf, outcomes: list[str]
) -> None:
    big = json.dumps({"role": "tool", "content": "filler words\n" * 20_000 + "the code is 77zulu"}).encode()
    shelf.kept[A] = big
    recall = Recall(shelf, process, outcomes.append)
    recall.add(TENANT, ROOT)
    await recall.settled()
    found = await recall.query(TENANT, ROOT, "77zulu", 1, 500, 5.0, ANY)
    assert found is not None
    assert found.text.endswith("the code is 77zulu")


async def test_only_what_is_new_is_sent(process: NearProcess, shelf: Shelf, recall: Recall) -> None:
    new = "e" * 24
    shelf.kept[new] = b'{"role": "user", "content": "Nightly job at 0417."}'
    recall.add(TENANT, ROOT)
    recall.add(TENANT, ROOT)
    await recall.settled()
    first, second = process.sent
    assert isinstance(first, Add)
    assert isinstance(second, Add)
    assert (first.begins, [id_ for id_, _ in first.items]) == (True, [A, B, C])
    assert (second.begins, [id_ for id_, _ in second.items]) == (False, [new])
    assert await asked(recall, "when is the nightly job?") == (new,)


async def test_a_process_that_is_new_gets_everything_again(
    process: NearProcess, shelf: Shelf, recall: Recall
) -> None:
    process.dies()
    shelf.kept["e" * 24] = b'{"role": "user", "content": "Nightly job at 0417."}'
    recall.add(TENANT, ROOT)
    await recall.settled()
    assert await asked(recall, "d56a046e") == (C,)


async def test_long_conversations_go_in_pieces(process: NearProcess, outcomes: list[str]) -> None:
    texts = {
        f"{at:024x}": b'{"role": "user", "content": "%s number%d"}' % (b"x " * 8_000, at) for at in range(20)
    }
    recall = Recall(Shelf(texts), process, outcomes.append)
    recall.add(TENANT, ROOT)
    await recall.settled()
    adds = [each for each in process.sent if isinstance(each, Add)]
    assert len(adds) > 3
    assert [each.begins for each in adds] == [True] + [False] * (len(adds) - 1)
    assert [id_ for each in adds for id_, _ in each.items] == list(texts)
    assert await asked(recall, "number17") == (f"{17:024x}",)


async def test_context_q2_what_was_deleted_is_never_told_even_while_it_is_indexed(
    shelf: Shelf, recall: Recall, outcomes: list[str]
) -> None:
    await shelf.delete(TENANT, "task", 1)
    assert await asked(recall, "d56a046e") is None
    assert outcomes == ["irrelevant"]


async def test_a_place_in_another_text_is_not_told(shelf: Shelf, recall: Recall) -> None:
    shelf.kept[C] = (
        b'{"role": "assistant", "content": "Something else of quite the same length, in its place"}'
    )
    assert await asked(recall, "d56a046e") is None


async def test_forgetting_a_tenant_drops_its_indexes(
    process: NearProcess, shelf: Shelf, recall: Recall
) -> None:
    await shelf.delete(TENANT, "task", 1)
    recall.forget(TENANT)
    assert process.sent[-1] == Forget(b"acme/alpha\0")
    assert await asked(recall, "d56a046e") is None
    await recall.settled()
    recall.forget("acme/beta")
    shelf.kept |= ORIGINALS
    recall.add(TENANT, ROOT)
    await recall.settled()
    assert await asked(recall, "d56a046e") == (C,)


async def test_forgetting_starts_no_process() -> None:
    process = NearProcess()
    Recall(Shelf(), process, pytest.fail).forget(TENANT)
    assert process.sent == []


async def test_no_answer_in_time_is_no_snippet(
    process: NearProcess,
    shelf: Shelf,
    recall: Recall,
    outcomes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process.answers = False
    assert await asked(recall, "d56a046e") is None
    process.answers = True

    async def never(*_: object) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(shelf, "get", never)
    assert await recall.query(TENANT, ROOT, "d56a046e", 1, 500, 0.0, ANY) is None
    assert outcomes == ["late", "late"]


async def test_a_store_that_fails_makes_nothing_fail(
    shelf: Shelf, process: NearProcess, recall: Recall, outcomes: list[str]
) -> None:
    shelf.fails = LedgerUnavailable("busy")
    assert await asked(recall, "d56a046e") is None
    assert outcomes == ["store"]
    process.dies()
    recall.add(TENANT, ROOT)
    await recall.settled()
    shelf.fails = None
    assert await asked(recall, "d56a046e") is None
    await recall.settled()
    assert await asked(recall, "d56a046e") == (C,)


async def test_after_the_end_nothing_is_begun(process: NearProcess, shelf: Shelf, recall: Recall) -> None:
    await recall.close()
    recall.add(TENANT, b"another")
    await recall.settled()
    assert process.closed
    assert shelf.read == 1


def test_context_p4_another_key_of_the_team_has_the_same_originals() -> None:
    keys = [Key(key_id, digest, "alpha", "acme") for key_id, digest in (("old", b"1"), ("new", b"2"))]
    assert {tenant_of(key) for key in keys} == {TENANT}


def test_context_p7_references_are_one_to_one_and_the_same_everywhere() -> None:
    pairs = [("a/b", b"c"), ("a", b"/bc"), ("a/bc", b""), ("a/b", b"d"), ("a/", b"bc")]
    names = {reference_of(tenant, digest) for tenant, digest in pairs}
    assert len(names) == len(pairs)
    assert all(map(is_reference, names))
    # It stands in frozen texts: blake2b of the length, the tenant and the digest to 12 bytes, for ever.
    assert reference_of("a/b", b"c") == "537e9fc70f5f66be4a4048f0"


@pytest.mark.parametrize("text", ["", "a" * 23, "a" * 25, "A" * 24, "g" * 24, "' OR 1=1 --aaaaaaaaaaaaa"])
def test_what_no_reference_is(text: str) -> None:
    assert not is_reference(text)


async def test_who_stops_waiting_for_the_index_does_not_end_it(process: NearProcess) -> None:
    """A look-up that took too long; the conversation is indexed all the same."""

    class SlowShelf(Shelf):
        async def of_conversation(self, tenant: str, conversation: bytes) -> list[Original]:
            reading.set()
            await go_on.wait()
            return await super().of_conversation(tenant, conversation)

    reading, go_on = asyncio.Event(), asyncio.Event()
    recall = Recall(SlowShelf(), process, lambda _: None)
    recall.add(TENANT, ROOT)
    waiting = asyncio.ensure_future(recall.settled())
    await reading.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    go_on.set()
    await recall.settled()
    assert await asked(recall, "what is d56a046e?") == (C,)
