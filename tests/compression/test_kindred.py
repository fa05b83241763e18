"""Which earlier conversation's first request has another version of a head."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.compression.kindred import LARGEST, Kindred
from ctxgate.compression.previous import Owner
from ctxgate.compression.sent import Digester
from ctxgate.inference import wire

US, THEM = Owner("acme/search", "t"), Owner("acme/ads", "t")
TEXT = "You look things up in the catalogue and say where they are. " * 5
DIGESTER = Digester(7)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


class Asking:
    """What begins conversations, and whose head it is a version of."""

    def __init__(self, limit: int = 2**20) -> None:
        self.kindred = Kindred(limit)

    def __call__(
        self, *system: str, tools: str = "", owner: Owner = US, user: str = "Hi", **more: Any
    ) -> str | None:
        messages = [{"role": "system", "content": text} for text in system]
        document = {"model": "m", "messages": [*messages, {"role": "user", "content": user}], **more}
        if tools:
            document["tools"] = [tool(name) for name in tools]
        body = wire.parse(json.dumps(document).encode())
        sent = DIGESTER.chat(body, body.items("messages"))
        kin = self.kindred.find(owner, sent, body)
        self.kindred.keep(owner, sent, body, place=("p", "r"), tokens=1, now_us=0)
        return None if kin is None else json.loads(kin.body.raw)["messages"][-1]["content"]


@pytest.fixture
def asking() -> Asking:
    return Asking()


def test_a_head_that_begins_or_ends_like_another_is_a_version_of_it(asking: Asking) -> None:
    assert asking(TEXT + "09:00", user="one") is None
    assert asking(TEXT + "09:01", user="two") == "one"
    assert asking("09:02 " + TEXT, user="three") is None
    assert asking("09:03 " + TEXT, user="four") == "three"
    assert asking(TEXT + "09:04", "More.", user="five") == "two"


def test_a_head_that_was_sent_before_is_no_other_version(asking: Asking) -> None:
    assert asking(TEXT + "a") is None
    assert asking(TEXT + "b") == "Hi"
    assert asking(TEXT + "a") is None


def test_another_agent_is_no_version_whatever_tools_it_shares(asking: Asking) -> None:
    assert asking("Be brief.", tools="ab") is None
    assert asking("Answer in verse.", tools="ab") is None
    assert asking("Be brief.", tools="abc") == "Hi"


def test_tools_alone_are_versions_by_their_first_or_last(asking: Asking) -> None:
    assert asking(tools="ab", user="one") is None
    assert asking(tools="abc", user="two") == "one"
    assert asking(tools="xc", user="three") == "two"
    assert asking(tools="yz") is None


def test_what_has_no_head_and_what_selects_another_cache_has_no_kin(asking: Asking) -> None:
    assert asking() is asking(user="else") is None
    assert asking(TEXT + "a") is None
    assert asking(TEXT + "b", model="n") is None
    assert asking(TEXT + "b", owner=THEM) is None


def test_memory_is_bounded_and_long_requests_are_not_kept(asking: Asking) -> None:
    assert asking(TEXT + "a", user="x" * LARGEST) is None
    assert asking(TEXT + "b") is None
    small = Asking(1_500)  # a request has some 420 bytes
    assert small(TEXT + "a") is None
    assert small(TEXT + "b") == "Hi"
    for other in "cde":
        assert small(f"{other} " + other * 300) is None
    assert small(TEXT + "b") is None
