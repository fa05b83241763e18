"""What every store of first-seen forms must do."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.ledger import LedgerError
from support.forms import FORM_STORES

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ctxgate.gateway.forms import FormStore

    Opened = Callable[[], AbstractAsyncContextManager[FormStore]]

A, B, C = (bytes([n]) * 32 for n in (1, 2, 3))


@pytest.fixture(params=FORM_STORES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Open one more process's store on the same place."""
    return lambda: FORM_STORES[request.param](tmp_path)


async def test_context_o5_the_first_text_under_a_key_stays(opened: Opened) -> None:
    async with opened() as store:
        assert await store.claim("t", {A: b"one"}, (), 1) == {A: b"one"}
        assert await store.claim("t", {A: b"two", B: b"three"}, (), 2) == {A: b"one", B: b"three"}
        assert await store.claim("t", {}, (A, B, C), 3) == {A: b"one", B: b"three"}


async def test_claims_and_reads_come_back_together(opened: Opened) -> None:
    async with opened() as store:
        await store.claim("t", {A: b"one"}, (), 1)
        assert await store.claim("t", {B: b"two"}, (A, C), 2) == {A: b"one", B: b"two"}
        assert await store.claim("t", {}, (C,), 3) == {}


async def test_tenants_see_nothing_of_one_another(opened: Opened) -> None:
    async with opened() as store:
        await store.claim("acme/alpha", {A: b"one"}, (), 1)
        assert await store.claim("acme/beta", {}, (A,), 2) == {}
        assert await store.claim("acme/beta", {A: b"two"}, (), 3) == {A: b"two"}
        assert await store.claim("acme/alpha", {}, (A,), 4) == {A: b"one"}


async def test_any_bytes_are_kept(opened: Opened) -> None:
    texts = {A: b"", B: bytes(range(256)) * 5_000, C: b"\xff\x00'\"; DROP TABLE forms"}
    async with opened() as store:
        assert await store.claim("t", texts, (), 1) == texts
        assert await store.claim("t", {}, tuple(texts), 2) == texts


async def test_more_keys_than_one_statement_takes(opened: Opened) -> None:
    texts = {n.to_bytes(32, "big"): b"%d" % n for n in range(2_345)}
    async with opened() as store:
        assert await store.claim("t", texts, (), 1) == texts
        assert await store.claim("t", {}, tuple(texts), 2) == texts


async def test_context_o5_processes_agree_on_one_text(opened: Opened) -> None:
    """Each of four processes claims its own text under every key, all at once."""
    keys = [os.urandom(32) for _ in range(50)]
    async with opened() as one, opened() as two, opened() as three, opened() as four:
        answers = await asyncio.gather(
            *(
                store.claim("t", {key: b"%d" % number}, (), 1)
                for key in keys
                for number, store in enumerate((one, two, three, four))
            )
        )
    for position, key in enumerate(keys):
        texts = {answer[key] for answer in answers[4 * position : 4 * position + 4]}
        assert len(texts) == 1
        assert texts <= {b"0", b"1", b"2", b"3"}


async def test_forms_outlive_the_process(opened: Opened) -> None:
    async with opened() as store:
        await store.claim("t", {A: b"one"}, (), 1)
    async with opened() as store:
        assert await store.claim("t", {A: b"two"}, (), 2) == {A: b"one"}


async def test_a_closed_store_says_so(opened: Opened) -> None:
    async with opened() as store:
        pass
    with pytest.raises(LedgerError):
        await store.claim("t", {A: b"one"}, (), 1)
    with pytest.raises(LedgerError):
        await store.claim("t", {}, (A,), 1)


DAY = 86_400_000_000


async def test_what_nobody_used_for_long_is_forgotten(opened: Opened) -> None:
    async with opened() as store:
        await store.claim("t", {A: b"one", B: b"two"}, (), 10 * DAY)
        await store.claim("t", {C: b"three"}, (), 20 * DAY)
        assert await store.forget(10 * DAY, 100) == 0
        assert await store.forget(10 * DAY + 1, 100) == 2
        assert await store.claim("t", {}, (A, B, C), 20 * DAY) == {C: b"three"}
        assert await store.claim("t", {A: b"anew"}, (), 21 * DAY) == {A: b"anew"}


async def test_use_is_noted_by_claims_and_by_reads(opened: Opened) -> None:
    async with opened() as store:
        await store.claim("t", {A: b"one", B: b"two", C: b"three"}, (), 1 * DAY)
        await store.claim("t", {A: b"other"}, (), 9 * DAY)
        assert await store.claim("t", {}, (B,), 9 * DAY) == {B: b"two"}
        assert await store.forget(8 * DAY, 100) == 1
        assert await store.claim("t", {}, (A, B, C), 9 * DAY) == {A: b"one", B: b"two"}


async def test_the_longest_unused_go_first_and_reserved_tenants_keep_theirs(opened: Opened) -> None:
    async with opened() as store:
        await store.claim("/ctxgate", {A: b"secret"}, (), 1 * DAY)
        for day, key in ((3, C), (1, A), (2, B)):
            await store.claim("t", {key: b"text"}, (), day * DAY)
        assert await store.forget(9 * DAY, 2) == 2
        assert set(await store.claim("t", {}, (A, B, C), 3 * DAY)) == {C}
        assert await store.forget(9 * DAY, 2) == 1
        assert await store.claim("/ctxgate", {}, (A,), 9 * DAY) == {A: b"secret"}
