"""The slots of a root's records, as one process remembers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import pytest

from ctxgate.compression.chain import HASH_BYTES
from ctxgate.compression.compaction import Compaction, encode, slot_key
from ctxgate.gateway import context_records
from ctxgate.gateway.context_records import MOST_SLOTS, Records
from support.forms import TENANT, Forms

if TYPE_CHECKING:
    from ctxgate.compression.ask import Ask, Asking

T = TypeVar("T")
ROOT = b"r" * HASH_BYTES


def hashes_of(run: int) -> list[bytes]:
    """The chain hashes of a run of three messages; only the first one is the same in all runs."""
    return [ROOT, *(f"{run}/{at}".encode().rjust(HASH_BYTES, b"-") for at in (1, 2))]


def record_of(run: int, covers: int = 2, carrier: int = 10) -> Compaction:
    return Compaction(hashes_of(run)[covers - 1], covers, ((1, 2),), carrier=b"x" * carrier, by=str(run))


def answered(forms: Forms, work: Asking[T]) -> T:
    try:
        ask = next(work)
        while True:
            ask = work.send(forms.take(TENANT, ask.claims, ask.reads))
    except StopIteration as end:
        result: T = end.value
        return result


def continued(work: Asking[T], ask: Ask) -> Asking[T]:
    """The rest of a computation that has asked this last."""
    try:
        while True:
            ask = work.send((yield ask))
    except StopIteration as end:
        result: T = end.value
        return result


@pytest.fixture
def forms() -> Forms:
    return Forms()


def test_a_claim_passes_the_records_of_other_forks_by(forms: Forms) -> None:
    for run in range(12):
        claimed = answered(forms, Records().claim(ROOT, record_of(run), hashes_of(run)))
        assert claimed == record_of(run)
    late = Records()
    assert answered(forms, late.read(ROOT, hashes_of(5))) == record_of(5)
    for number in range(12):
        assert forms.by_key[TENANT, slot_key(ROOT, number)] == encode(record_of(number))


@pytest.mark.parametrize(("counts", "number"), [(True, 0), (False, 1)])
def test_a_claim_gives_way_to_a_record_of_its_own_conversation_that_counts(
    forms: Forms, counts: bool, number: int
) -> None:
    other, mine = record_of(1, carrier=20), record_of(1, carrier=30)
    slow = Records()
    claim = slow.claim(ROOT, mine, hashes_of(1), lambda _: counts)
    ask = next(claim)
    ask = claim.send(forms.take(TENANT, ask.claims, ask.reads))  # it finds the first slot free ...
    assert list(ask.claims) == [slot_key(ROOT, 0)]
    answered(forms, Records().claim(ROOT, other, hashes_of(1)))  # ... which another process is faster to take

    assert answered(forms, continued(claim, ask)) == (other if counts else mine)
    assert slow.known(ROOT, hashes_of(1)) == (other if counts else mine)
    assert forms.by_key[TENANT, slot_key(ROOT, number)] == encode(other if counts else mine)


def test_more_records_than_are_remembered_stay_in_use(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty records of 1 kB behind a memory of 10 kB."""
    monkeypatch.setattr(context_records, "REMEMBERED_BYTES", 20_000)
    records = Records()
    for run in range(20):
        assert answered(forms, records.claim(ROOT, record_of(run, carrier=1000), hashes_of(run))) is not None
    for each in (records, Records()):
        for run in range(20):
            assert answered(forms, each.read(ROOT, hashes_of(run))) == record_of(run, carrier=1000)
        forms.asked = 0
        assert answered(forms, each.claim(ROOT, record_of(30), hashes_of(30))) == record_of(30)
        assert forms.asked <= 2
    assert answered(forms, each.read(ROOT, hashes_of(99))) is None


def test_when_all_slots_are_taken_what_is_there_still_counts(forms: Forms) -> None:
    for number in range(MOST_SLOTS):
        forms.by_key[TENANT, slot_key(ROOT, number)] = encode(record_of(number))
    records = Records()
    assert answered(forms, records.claim(ROOT, record_of(-1), hashes_of(-1))) is None
    assert answered(forms, records.read(ROOT, hashes_of(MOST_SLOTS - 1))) == record_of(MOST_SLOTS - 1)


def test_a_record_whose_text_is_gone_leaves_its_slot_taken(forms: Forms) -> None:
    records = Records()
    for run in range(3):
        answered(forms, records.claim(ROOT, record_of(run), hashes_of(run)))
    assert records.key_of(ROOT, record_of(1)) == slot_key(ROOT, 1)
    forms.by_key[TENANT, slot_key(ROOT, 1)] = b""
    records.forget()
    assert answered(forms, records.read(ROOT, hashes_of(1))) is None
    assert answered(forms, records.read(ROOT, hashes_of(2))) == record_of(2)
    assert answered(forms, records.claim(ROOT, record_of(1), hashes_of(1))) == record_of(1)
    assert forms.by_key[TENANT, slot_key(ROOT, 3)] == encode(record_of(1))


def test_what_was_asked_before_all_was_forgotten_is_not_remembered(forms: Forms) -> None:
    answered(forms, Records().claim(ROOT, record_of(1), hashes_of(1)))
    records = Records()
    work = records.read(ROOT, hashes_of(1))
    ask = next(work)
    records.forget()
    work.send(forms.take(TENANT, ask.claims, ask.reads))
    work.close()
    assert records.known(ROOT, hashes_of(1)) is None


def test_a_record_is_new_once() -> None:
    records = Records()
    assert records.is_new(ROOT, record_of(1))
    records.forget()
    assert [records.is_new(ROOT, record_of(run)) for run in (1, 2, 2)] == [False, True, False]
