"""What events tell of prompts that are under way at once; engine and prompts are made up."""

from __future__ import annotations

from ctxgate.routing.kv_sessions import Outcome
from support.kv_talk import PLACE, Talk, message


def test_attempts_of_one_session_at_once_are_told_apart_by_what_they_found() -> None:
    talk = Talk()
    head = [message(1, 100)]
    talk.ask(head, message(50, 10))
    one, two = [*head, (1, 2, *message(60, 60))], [*head, (1, 2, *message(61, 90))]
    sent = [talk.send(one), talk.send(two)]
    found = [talk.engine.read(talk.prompt(prompt), "A", len(talk.prompt(prompt))) for prompt in (one, two)]
    for prompt, dispatched, cached in reversed([*zip((one, two), sent, found, strict=True)]):
        talk.sessions.settled(dispatched, Outcome(len(talk.prompt(prompt)), cached, 0, "stop"))
    assert talk.sessions.expected(PLACE, talk.chain([*one, message(5, 20)])) == 160
    assert talk.sessions.expected(PLACE, talk.chain([*two, message(5, 20)])) == 192


def test_what_another_attempt_is_storing_just_now_is_not_guessed() -> None:
    talk = Talk()
    head = [message(1, 100)]
    talk.ask(head, message(50, 10))
    longer = [*head, (1, 2, *message(60, 60)), message(2, 40)]
    running = talk.send(longer)
    assert talk.sessions.expected(PLACE, talk.chain(longer)) is None
    talk.sessions.settled(running, None)
    assert talk.sessions.expected(PLACE, talk.chain(longer)) == 96


def test_a_prompt_that_another_attempt_reads_just_now_is_known_once_its_blocks_are_told_of() -> None:
    talk = Talk()
    head = [message(1, 100)]
    talk.ask(head, message(50, 10))
    longer = [*head, (1, 2, *message(60, 60)), message(2, 40)]  # 204 tokens
    running = talk.send(longer)
    tokens = [*talk.prompt(longer), *message(70, 40)]
    talk.engine.read(tokens, "A", 204)
    assert (
        talk.sessions.expected(PLACE, talk.chain(longer)) == 192
    )  # its answer's blocks are not the prompt's
    assert talk.sessions.expected(PLACE, talk.chain([*longer, message(3, 9)])) is None
    second = talk.send([*head, (1, 2, *message(61, 60))])  # of the same session: which one has stored?
    assert talk.sessions.expected(PLACE, talk.chain(longer)) is None
    talk.sessions.settled(second, None)
    talk.engine.evict(tokens, 8)
    assert talk.ask(longer) == (128, 128)
    talk.sessions.settled(running, Outcome(204, 96, 40, "stop"))
    assert talk.ask([*longer, message(4, 30)]) == (192, 192)


def test_two_prompts_of_one_session_with_as_many_blocks_are_told_apart_by_what_they_go_on_from() -> None:
    talk = Talk()
    heads = [[message(1, 100)], [message(3, 100)]]
    for head in heads:
        talk.ask(head, message(50, 10))
    longer = [[*head, (1, 2, *message(60, 60))] for head in heads]
    sent = [talk.send(prompt) for prompt in longer]
    for prompt in longer:
        talk.engine.read(talk.prompt(prompt), "A", 164)
    for each in sent:
        talk.sessions.settled(each, Outcome(164, 96, 1, "stop"))
    talk.engine.evict(talk.prompt(longer[1]), 7)
    assert talk.sessions.expected(PLACE, talk.chain([*longer[0], message(5, 20)])) == 160
    assert talk.sessions.expected(PLACE, talk.chain([*longer[1], message(5, 20)])) == 112


def test_an_attempt_that_cannot_be_told_from_another_of_its_session_waits_for_what_comes() -> None:
    talk = Talk()
    head = [message(1, 100)]
    talk.ask(head, message(50, 10))
    one, two = [*head, (1, 2, *message(60, 60))], [*head, (1, 2, *message(61, 60))]
    sent = [talk.send(one), talk.send(two)]
    answers = message(70, 20), message(71, 40)  # 164 tokens of prompt each, 11 and 12 blocks in all
    for prompt in (one, two):
        talk.engine.read(talk.prompt(prompt), "A", 164)
    talk.sessions.settled(sent[0], Outcome(164, 96, 20, "stop"))
    assert talk.sessions.expected(PLACE, talk.chain([*one, message(5, 20)])) == 160  # it was read just now
    for prompt, answer in zip((one, two), answers, strict=True):
        talk.engine.read([*talk.prompt(prompt), *answer], "A", 164)
    talk.sessions.settled(sent[1], Outcome(164, 96, 40, "stop"))
    talk.engine.evict(talk.prompt(one), 8)
    assert talk.sessions.expected(PLACE, talk.chain([*one, message(5, 20)])) == 128
    assert talk.sessions.expected(PLACE, talk.chain([*two, message(5, 20)])) == 160
