"""The request before: found again by its messages, however the client changed the head."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.previous import BODIES, Before, Owner, Previous
from ctxgate.compression.sent import Digester
from ctxgate.inference import wire

if TYPE_CHECKING:
    from ctxgate.compression.sent import Sent

DIGESTER = Digester(seed=7)
PLACE = ("standard", "standard-0")


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def prompt(*messages: dict[str, Any], tools: int = 0, model: str = "m") -> Sent:
    listed = [{"type": "function", "function": {"name": f"t{number}"}} for number in range(tools)]
    body = wire.parse(json.dumps({"model": model, "messages": messages, "tools": listed}).encode())
    return DIGESTER.chat(body, body.items("messages"))


class Clients:
    """Sends prompts and says which earlier one each was recognized to follow."""

    def __init__(self, **limits: int) -> None:
        self.previous = Previous(**limits)

    def send(
        self, sent: Sent, name: str = "", *, tenant: str = "acme/search", task: str = "job"
    ) -> str | None:
        """The name under which the request before was sent, None where none was found."""
        owner = Owner(tenant, task)
        before = self.previous.find(owner, sent)
        told = None if before is None else self.previous.body(before)
        self.previous.keep(owner, sent, name.encode(), before, place=PLACE, tokens=len(name), now_us=5)
        return None if told is None else told.decode()


A, B, C = user("Find the bug."), said("Looking."), user("And?")


def test_a_growing_conversation_is_followed_turn_by_turn() -> None:
    clients = Clients()
    assert clients.send(prompt(system("s"), A), "one") is None
    assert clients.send(prompt(system("s"), A, B, C), "two") == "one"
    assert clients.send(prompt(system("s"), A, B, C, said("x"), user("y")), "three") == "two"


def test_what_is_kept_of_a_request_comes_back() -> None:
    clients = Clients()
    sent = prompt(system("s"), A, tools=2)
    clients.send(sent, "three")
    before = clients.previous.find(Owner("acme/search", "job"), prompt(system("s"), A, B, C, tools=2))
    assert before == Before(before.conversation if before else b"", sent.outline, PLACE, 5, 5, "job")


def test_gateways_l13_a_head_that_changes_each_turn_does_not_hide_the_conversation() -> None:
    clients = Clients()
    clients.send(prompt(system("09:00"), A, tools=1), "one", task="t1")
    assert clients.send(prompt(system("09:01"), A, B, C, tools=2), "two", task="t2") == "one"
    assert clients.send(prompt(system("09:02"), A, B, C, said("x"), user("y")), "3", task="t3") == "two"


def test_routing_d12_many_results_since_the_last_request_do_not_hide_it() -> None:
    clients = Clients()
    clients.send(prompt(system("s"), A), "one")
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"r{n}"} for n in range(200)]
    assert clients.send(prompt(system("s"), A, B, *results), task="other") == "one"


def test_two_conversations_that_end_with_the_same_words_are_told_apart() -> None:
    clients = Clients()
    clients.send(prompt(system("s"), A, said("first"), user("yes")), "first", task="t1")
    clients.send(prompt(system("s"), user("Other"), said("second"), user("yes")), "second", task="t2")
    turn = prompt(system("s"), A, said("first"), user("yes"), said("done"), user("more"))
    assert clients.send(turn, task="t3") == "first"


def test_gateways_l9_a_single_common_message_is_no_conversation() -> None:
    clients = Clients()
    many = [user(f"m{n}") for n in range(10)]
    clients.send(prompt(system("s"), *many, user("yes")), "long")
    assert clients.send(prompt(system("t"), user("yes"), said("ok"), user("so")), task="other") is None


def test_a_rewritten_history_is_found_by_its_task() -> None:
    clients = Clients()
    clients.send(prompt(system("s"), A, B, C, said("x"), user("y")), "long")
    summary = prompt(system("s"), user("So far: nothing."), user("z"))
    assert clients.previous.find(Owner("acme/search", "elsewhere"), summary) is None
    assert clients.send(summary) == "long"


def test_a_task_of_several_conversations_does_not_mix_those_that_share_nothing() -> None:
    clients = Clients()
    clients.send(prompt(system("planner"), A), "planner")
    assert clients.send(prompt(system("worker"), user("Do it."))) is None


def test_tenants_do_not_find_each_others_requests() -> None:
    clients = Clients()
    clients.send(prompt(system("s"), A), "one")
    assert clients.send(prompt(system("s"), A, B, C), tenant="acme/ads") is None
    assert clients.send(prompt(system("s"), A, B, C), tenant="globex/search") is None


def test_two_branches_of_a_conversation_go_on_side_by_side() -> None:
    clients = Clients()
    root = (system("s"), A)
    clients.send(prompt(*root), "root")
    left, right = (*root, said("l"), user("left")), (*root, said("r"), user("right"))
    assert clients.send(prompt(*left), "left") == "root"
    clients.send(prompt(*right), "right")
    assert clients.send(prompt(*left, B, C), "left 2") == "left"
    assert clients.send(prompt(*right, B, C), "right 2") == "right"


def test_the_same_prompt_again_follows_itself() -> None:
    clients = Clients()
    clients.send(prompt(system("s"), A), "one")
    assert clients.send(prompt(system("s"), A), "two") == "one"


def test_a_conversation_takes_one_place_however_long_it_grows() -> None:
    clients = Clients(elements=4_000)
    clients.send(prompt(system("quiet"), A), "quiet", task="quiet")
    history: list[dict[str, Any]] = [system("loud"), user("go")]
    for number in range(50):
        clients.send(prompt(*history), "loud", task="loud")
        history += [said(f"a{number}"), user(f"u{number}")]
    assert clients.send(prompt(system("quiet"), A, B, C), task="quiet") == "quiet"


TALK = [A, B, C, said("x"), user("y"), said("z"), user("w"), said("v"), user("u")]


@pytest.mark.parametrize("model", ["m", "n"])
@pytest.mark.parametrize("clock", [False, True])
def test_a_replay_follows_its_own_requests_and_not_the_longer_ones_of_another_task(
    model: str, clock: bool
) -> None:
    clients = Clients()

    def turn(length: int, arm: str, model: str = "m") -> Sent:
        return prompt(system(f"{arm} {length}" if clock else "s"), *TALK[:length], tools=1, model=model)

    for length in (1, 3, 5, 7, 9):
        clients.send(turn(length, "a"), f"a{length}", task="a")
    followed = [clients.send(turn(length, "b", model), f"b{length}", task="b") for length in (1, 3, 5, 7, 9)]
    assert followed[1:] == ["b1", "b3", "b5", "b7"]


@pytest.mark.parametrize("models", ["mm", "mn"])
@pytest.mark.parametrize("clock", [False, True])
def test_two_arms_that_take_turns_follow_their_own_requests(models: str, clock: bool) -> None:
    clients = Clients()
    followed = []
    for length in (3, 5, 7, 9):
        for arm, model in zip("ab", models, strict=True):
            head = system(f"{arm} {length}" if clock else "s")
            turn = prompt(head, *TALK[:length], model=model)
            followed.append(clients.send(turn, f"{arm}{length}", task=arm))
    assert followed == [None, "a3", "a3", "b3", "a5", "b5", "a7", "b7"]


def test_another_attempt_at_the_last_step_follows_the_one_before() -> None:
    clients = Clients()
    clients.send(prompt(system("s"), A, B, C, said("x"), user("y")), "first")
    assert clients.send(prompt(system("s"), A, B, C, said("z"), user("w")), "second") == "first"
    assert clients.send(prompt(system("s"), A, B, C, said("v"), user("u"))) == "second"


def test_a_task_that_goes_on_with_another_model_follows_itself() -> None:
    clients = Clients()
    clients.send(prompt(*TALK[:3]), "m")
    assert clients.send(prompt(*TALK[:5], model="n")) == "m"


def test_the_last_request_of_a_task_is_not_taken_for_the_one_before_where_another_branch_is() -> None:
    """Both branches end in the same word, and the other one was the last to be sent."""
    clients = Clients()
    root = (A, B, C, said("x"))
    right = (*root, user("r"), said("right"), user("wait"))
    clients.send(prompt(system("1"), *root, user("l"), said("left"), user("go on")), "left")
    clients.send(prompt(system("2"), *right), "right 1")
    assert clients.send(prompt(system("2"), *right, said("so"), user("go on")), "right 2") == "right 1"
    turn = (*root, user("l"), said("left"), user("go on"), said("ok"), user("more"))
    assert clients.send(prompt(system("3"), *turn)) == "left"


def test_bodies_are_bounded_by_their_bytes() -> None:
    clients = Clients(body_bytes=100)
    clients.send(prompt(system("s"), A), "x" * 60)
    before = clients.previous.find(Owner("acme/search", "job"), prompt(system("s"), A, B, C))
    assert before is not None
    assert clients.previous.body(before) is None


def test_bodies_are_bounded_by_their_number() -> None:
    """However short: of so many conversations the first one's outline is known, and its body no longer."""
    clients = Clients()
    first = prompt(system("s"), A)
    clients.send(first, "first")
    for number in range(BODIES):
        clients.send(prompt(system("s"), user(f"task {number}")), "x")
    before = clients.previous.find(Owner("acme/search", "job"), prompt(system("s"), A, B, C))
    assert before is not None
    assert before.outline == first.outline
    assert clients.previous.body(before) is None
    last = clients.previous.find(Owner("acme/search", "job"), prompt(system("s"), user("task 1023"), B, C))
    assert last is not None
    assert clients.previous.body(last) == b"x"


def test_requests_without_messages_are_not_kept() -> None:
    clients = Clients()
    clients.send(prompt(), "none")
    assert clients.send(prompt()) is None
