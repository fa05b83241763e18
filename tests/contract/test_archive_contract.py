"""What every archive must do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.archive import Original
from ctxgate.gateway.ledger import LedgerError
from support.archives import ARCHIVES

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ctxgate.gateway.archive import Archive

    Opened = Callable[[], AbstractAsyncContextManager[Archive]]

TENANT, OTHER = "acme/alpha", "acme/beta"
A, B, C = ("a" * 24, "b" * 24, "c" * 24)
ONE, TWO = b"conversation one", b"conversation two"


@pytest.fixture(params=ARCHIVES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Open one more process's archive on the same place."""
    return lambda: ARCHIVES[request.param](tmp_path)


async def test_an_original_comes_back_in_its_own_bytes(opened: Opened) -> None:
    texts = {A: b'{"role": "tool",  "content": "\\ud83d"}', B: os.urandom(700_000), C: b""}
    async with opened() as archive:
        await archive.keep(TENANT, "task", texts, 1)
        assert [await archive.get(TENANT, id_) for id_ in texts] == list(texts.values())
        assert await archive.get(TENANT, "d" * 24) is None


async def test_context_m8_originals_outlive_the_process(opened: Opened) -> None:
    async with opened() as archive:
        await archive.keep(TENANT, "task", {A: b"one", B: b"two"}, 1, ONE)
    async with opened() as archive:
        assert await archive.get(TENANT, A) == b"one"
        assert await archive.of_conversation(TENANT, ONE) == [Original(A, b"one"), Original(B, b"two")]


async def test_context_p6_the_id_of_another_tenants_original_opens_nothing(opened: Opened) -> None:
    async with opened() as archive:
        await archive.keep(TENANT, "task", {A: b"secret"}, 1, ONE)
        assert await archive.get(OTHER, A) is None
        assert await archive.of_conversation(OTHER, ONE) == []
        assert (await archive.delete(OTHER, "task", 0)).originals == 0
        await archive.keep(OTHER, "task", {A: b"another"}, 2, ONE)
        assert await archive.get(OTHER, A) == b"another"
        assert (await archive.delete(OTHER, "task", 0)).originals == 1
        assert await archive.get(TENANT, A) == b"secret"


async def test_context_p7_names_that_look_alike_are_apart(opened: Opened) -> None:
    async with opened() as archive:
        for at, task in enumerate(("a:b", "a_b", "a/b", "a", "A", "a ")):
            await archive.keep(TENANT, task, {f"{at:024x}": task.encode()}, 1, task.encode())
        assert (await archive.delete(TENANT, "a_b", 0)).originals == 1
        assert await archive.of_conversation(TENANT, b"a:b") == [Original(f"{0:024x}", b"a:b")]
        assert await archive.get(TENANT, f"{1:024x}") is None
        assert await archive.get(TENANT, f"{3:024x}") == b"a"


async def test_the_first_text_under_an_id_stays(opened: Opened) -> None:
    async with opened() as archive, opened() as other:
        await archive.keep(TENANT, "task", {A: b"first"}, 1)
        await other.keep(TENANT, "task", {A: b"second"}, 2)
        assert await archive.get(TENANT, A) == b"first"


async def test_a_conversation_is_found_in_the_order_in_which_it_was_kept(opened: Opened) -> None:
    async with opened() as archive:
        await archive.keep(TENANT, "task", {C: b"3", A: b"1"}, 1, ONE)
        await archive.keep(TENANT, "task", {B: b"2"}, 2, TWO)
        await archive.keep(TENANT, "other", {A: b"1", B: b"2"}, 3, ONE)
        assert await archive.of_conversation(TENANT, ONE) == [
            Original(C, b"3"),
            Original(A, b"1"),
            Original(B, b"2"),
        ]
        assert await archive.of_conversation(TENANT, TWO) == [Original(B, b"2")]
        assert await archive.of_conversation(TENANT, b"") == []


async def test_deleting_a_task_leaves_what_others_share(opened: Opened) -> None:
    async with opened() as archive:
        await archive.keep(TENANT, "one", {A: b"1", B: b"2"}, 1, ONE)
        await archive.keep(TENANT, "one", {A: b"1"}, 1, TWO)
        await archive.keep(TENANT, "two", {B: b"2", C: b"3"}, 1, TWO)
        assert (await archive.delete(TENANT, "one", 0)).originals == 2
        assert (await archive.delete(TENANT, "one", 0)).originals == 0
        assert [await archive.get(TENANT, id_) for id_ in (A, B, C)] == [None, b"2", b"3"]
        assert await archive.of_conversation(TENANT, ONE) == []
        assert (await archive.delete(TENANT, "two", 0)).originals == 2
        assert await archive.get(TENANT, B) is None


async def test_nothing_of_requests_from_before_a_task_was_deleted_is_kept_any_more(opened: Opened) -> None:
    async with opened() as archive, opened() as other:
        assert await archive.keep(TENANT, "one", {A: b"1"}, 5, ONE, since_us=5)
        assert (await archive.delete(TENANT, "one", 10)).originals == 1
        assert not await other.keep(TENANT, "one", {A: b"1"}, 11, ONE, since_us=10)
        assert await archive.get(TENANT, A) is None
        assert await archive.of_conversation(TENANT, ONE) == []
        assert await other.keep(TENANT, "two", {B: b"2"}, 11, ONE, since_us=9)
        assert await other.keep(OTHER, "one", {B: b"2"}, 11, ONE, since_us=9)
        assert await archive.keep(TENANT, "one", {C: b"3"}, 12, ONE, since_us=11)
        assert [original.id for original in await archive.of_conversation(TENANT, ONE)] == [B, C]


async def test_the_forms_of_a_task_are_named_when_it_is_deleted(opened: Opened) -> None:
    keys = [bytes([at]) * 32 for at in range(3)]
    async with opened() as archive:
        await archive.keep(TENANT, "one", {A: b"1"}, 1, forms=keys[:2])
        await archive.keep(TENANT, "two", {}, 1, forms=keys[1:])
        first = await archive.delete(TENANT, "one", 2)
        assert (first.originals, set(first.forms)) == (1, {keys[0]})
        assert set((await archive.delete(TENANT, "two", 3)).forms) == set(keys[1:])
        assert await archive.delete(TENANT, "two", 4) == (0, ())


async def test_what_was_kept_long_ago_goes_first_and_in_steps(opened: Opened) -> None:
    async with opened() as archive:
        await archive.keep(TENANT, "task", {A: b"1"}, 30, ONE)
        await archive.keep(TENANT, "task", {B: b"2", C: b"3"}, 10, ONE)
        await archive.keep(TENANT, "task", {C: b"3"}, 20, ONE)  # again: it lasts longer
        assert await archive.expire(10, 5) == 0
        assert await archive.expire(30, 1) == 1
        assert [original.id for original in await archive.of_conversation(TENANT, ONE)] == [A, C]
        assert await archive.expire(30, 5) == 1
        assert await archive.expire(30, 5) == 0
        assert [await archive.get(TENANT, id_) for id_ in (A, B, C)] == [b"1", None, None]
        assert (await archive.delete(TENANT, "task", 0)).originals == 1


async def test_keeping_nothing_is_nothing(opened: Opened) -> None:
    async with opened() as archive:
        await archive.keep(TENANT, "task", {}, 1, ONE)
        assert (await archive.delete(TENANT, "task", 0)).originals == 0


async def test_a_closed_archive_says_so(opened: Opened) -> None:
    async with opened() as archive:
        pass
    for work in (
        archive.keep(TENANT, "task", {A: b"1"}, 1),
        archive.get(TENANT, A),
        archive.of_conversation(TENANT, ONE),
        archive.delete(TENANT, "task", 1),
        archive.expire(1, 1),
    ):
        with pytest.raises(LedgerError):
            await work
