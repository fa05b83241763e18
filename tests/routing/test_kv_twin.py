"""The bar for predictions by events, on the twin: many conversations, few blocks, evictions all the time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from ctxgate.inference.kv_events import Batch, Cleared
from ctxgate.inference.twin import Twin
from ctxgate.inference.twin_job import Job, Vocabulary
from ctxgate.inference.twin_profile import PROFILES
from ctxgate.routing.kv_sessions import KvSessions, Outcome

if TYPE_CHECKING:
    from ctxgate.inference.twin_job import Output
    from ctxgate.routing.kv_sessions import Dispatched

PLACE = ("standard", "twin")
BLOCK = 16
OPENING = (1, 2, 3)
VOCABULARY = Vocabulary(words=tuple(range(50, 90)), end=4)


@dataclass
class Conversation:
    """Messages as tokens; `salt` parts the caches of two tenants."""

    session: str
    salt: str
    messages: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def chain(self) -> tuple[bytes, ...]:
        links, digest = [], self.salt
        for message in self.messages:
            digest = str(hash((digest, message)))
            links.append(digest.encode())
        return (self.salt.encode(), *links)

    @property
    def prompt(self) -> list[int]:
        return [*(token for message in self.messages for token in message), *OPENING]


class Played:
    """Conversations that grow, in a seeded order, `at_once` requests at a time, on one twin."""

    def __init__(self, at_once: int, *, keeps_answers: bool) -> None:
        self.random = random.Random(3)
        self.twin = Twin(PROFILES["fast"], VOCABULARY, blocks=400, block_size=BLOCK, max_model_len=3000)
        self.twin.pool.events = []
        self.sessions = KvSessions()
        self.sessions.place(PLACE).begin(complete=True)
        self.heads = [self.text(150) for _ in range(3)]
        self.talks: list[Conversation] = []
        self.at_once = at_once
        self.keeps_answers = keeps_answers
        self.right = self.wrong = self.untold = 0

    def text(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(100, 1000), k=tokens))

    def run(self, requests: int) -> None:
        now, sent_so_far = 0.0, 0
        running: dict[str, tuple[Conversation, Dispatched, list[Output]]] = {}
        while sent_so_far < requests or running:
            while len(running) < self.at_once and sent_so_far < requests:
                sent_so_far += 1
                talk = self.next({one.session for one, _, _ in running.values()})
                sent = self.sessions.sent(PLACE, talk.session, talk.chain)
                job = Job(str(sent_so_far), talk.prompt, 20, salt=talk.salt, session=talk.session)
                running[job.id] = (talk, sent, [])
                self.twin.submit(job, now)
            step = self.twin.begin(now)
            assert step is not None
            now = step.ends
            outputs = self.twin.complete(now)
            self.sessions.apply(PLACE, Batch(tuple(self.twin.take_events())))
            for output in outputs:
                running[output.id][2].append(output)
                if output.finish is not None:
                    self.ended(*running.pop(output.id))

    def next(self, busy: set[str]) -> Conversation:
        free = [one for one in self.talks if one.session not in busy and len(one.prompt) < 1500]
        if len(free) < 12:
            salt = self.random.choice("ab")
            messages = [self.random.choice(self.heads), self.text(30)]
            self.talks.append(Conversation(f"s{len(self.talks)}", salt, messages))
            return self.talks[-1]
        return self.random.choice(free[-12:])

    def ended(self, talk: Conversation, sent: Dispatched, outputs: list[Output]) -> None:
        cached = outputs[0].admission.cached
        if sent.foreseen is None:
            self.untold += 1
        else:
            self.right += sent.foreseen.tokens == cached
            self.wrong += sent.foreseen.tokens != cached
        finish = outputs[-1].finish or ""
        outcome = Outcome(len(talk.prompt), cached, len(outputs), finish)
        self.sessions.settled(sent, outcome)
        said = tuple(one.token for one in outputs) if self.keeps_answers else self.text(20)
        talk.messages = [*talk.messages, (*OPENING, *said), self.text(25)]


@pytest.mark.parametrize("keeps_answers", [False, True])
@pytest.mark.integration
def test_one_at_a_time_what_is_foretold_is_found(keeps_answers: bool) -> None:
    played = Played(1, keeps_answers=keeps_answers)
    played.run(250)
    told = played.right + played.wrong
    assert played.twin.pool.evicted > 2 * played.twin.pool.size
    assert told > 225
    assert played.right >= 0.99 * told, (played.right, played.wrong)
    assert played.untold < 20
    assert played.sessions.place(PLACE).tree.strays == 0


@pytest.mark.integration
def test_four_at_a_time_what_is_foretold_is_mostly_found() -> None:
    played = Played(4, keeps_answers=False)
    played.run(250)
    told = played.right + played.wrong
    assert told > 225
    assert played.right >= 0.97 * told, (played.right, played.wrong)


def test_the_twin_tells_of_a_reset_and_of_nothing_unless_asked() -> None:
    twin = Twin(PROFILES["fast"], VOCABULARY, blocks=400, block_size=BLOCK, max_model_len=3000)
    twin.submit(Job("1", range(100), 1), 0.0)
    step = twin.begin(0.0)
    assert step is not None
    twin.complete(step.ends)
    assert twin.take_events() == []
    twin.pool.events = []
    assert twin.pool.reset()
    assert twin.take_events() == [Cleared()]
