"""The recall process from inside: questions first, memory in bounds, terms alone where embeddings fail."""

from __future__ import annotations

import io
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.recall_embedding import Conversation, Embedding
from ctxgate.gateway.recall_wire import LONGEST, Add, Ask, Forget, Told, framed, length_of, told
from ctxgate.gateway.recall_worker import Inbox, Indexes, messages, serve
from support.recalling import ORIGINALS, work

if TYPE_CHECKING:
    from collections.abc import Sequence

A, B, C = ORIGINALS
SOON = 30.0


def ask(text: str, conversation: bytes = b"one", number: int = 7, count: int = 1) -> Ask:
    return Ask(number, conversation, text, count, SOON)


def filled(conversation: bytes = b"one") -> Add:
    return Add(conversation, list(ORIGINALS.items()), begins=True)


def ids(answer: Told) -> list[str]:
    return [hit.id for hit in answer.hits]


def test_messages_survive_the_pipe() -> None:
    sent: list[Add | Ask | Forget] = [filled(), ask("what?"), Forget(b"one")]
    stream = io.BytesIO(b"".join(map(framed, sent)) + b"\0\0\0\x09half")
    assert list(messages(stream)) == sent
    answer = Told(7, True, False, [])
    assert told(framed(answer)[4:]) == answer
    with pytest.raises(ValueError, match="too long"):
        length_of((LONGEST + 1).to_bytes(4, "big"))


def test_questions_go_before_what_is_to_be_indexed() -> None:
    inbox = Inbox()
    for message in (filled(), ask("d56a046e", number=1), ask("port", number=2)):
        inbox.put(message)
    assert [(each.number, each.known) for each in work(inbox, Indexes())] == [(1, False), (2, False)]


def test_a_question_whose_time_is_over_is_not_answered() -> None:
    inbox = Inbox()
    inbox.put(Ask(1, b"one", "port", 1, 0.0))
    inbox.put(ask("port", number=2))
    assert [answer.number for answer in work(inbox, Indexes())] == [2]


def test_the_end_of_the_input_ends_the_work_at_once() -> None:
    inbox = Inbox()
    inbox.put(filled())
    inbox.put(ask("port"))
    inbox.end()
    answers: list[Told] = []
    serve(inbox, Indexes(), answers.append)
    assert answers == []


def test_half_of_a_conversation_is_not_taken_for_it() -> None:
    indexes, inbox = Indexes(), Inbox()
    inbox.put(Add(b"one", list(ORIGINALS.items())))
    work(inbox, indexes)
    assert not indexes.answer(ask("d56a046e"), 0.0).known


def test_the_conversation_used_longest_ago_makes_room() -> None:
    one = Indexes()
    fill(one, b"one")
    size = next(iter(one._known.values())).size
    indexes = Indexes(limit=2 * size + size // 2)
    for name in (b"one", b"two"):
        fill(indexes, name)
    assert ids(indexes.answer(ask("d56a046e", b"one"), 0.0)) == [C]
    fill(indexes, b"three")
    assert [indexes.answer(ask("d56a046e", name), 0.0).known for name in (b"one", b"two", b"three")] == [
        True,
        False,
        True,
    ]


def test_one_conversation_larger_than_the_bound_stays() -> None:
    indexes = Indexes(limit=1)
    fill(indexes, b"one")
    assert ids(indexes.answer(ask("d56a046e"), 0.0)) == [C]


def test_forgetting_goes_by_the_beginning_of_names() -> None:
    indexes = Indexes()
    for name in (b"a/b\0one", b"a/b\0two", b"a/bc\0one"):
        fill(indexes, name)
    indexes.forget(b"a/b\0")
    known = [indexes.answer(ask("x", name), 0.0).known for name in (b"a/b\0one", b"a/b\0two", b"a/bc\0one")]
    assert known == [False, False, True]


def test_a_message_that_is_none_harms_nothing() -> None:
    indexes = Indexes()
    indexes.begin(b"one")
    for at, body in enumerate((b"", b"[1]", b"{", b'{"role": 3, "content": {"a": 1}}', b"\xff")):
        indexes.add(b"one", str(at), body)
    assert indexes.answer(ask("anything"), 0.0) == Told(7, True, False, [])


class Axes:
    """An embedder whose texts lie on the axis of the first word that they hold: `billing` or `deploy`."""

    def __init__(self, *, fails: bool = False) -> None:
        self.batches: list[list[str]] = []
        self._fails = fails

    def embedded(self, texts: Sequence[str]) -> Any:
        if self._fails:
            raise RuntimeError("no kernel")
        self.batches.append(list(texts))
        return [self._axis(text) for text in texts]

    def _axis(self, text: str) -> tuple[float, float, float]:
        if "billing" in text or "invoices" in text:
            return (1.0, 0.0, 0.0)
        return (0.0, 1.0, 0.0) if "deploy" in text or "release" in text else (0.0, 0.0, 1.0)


class ListedVectors:
    """The vectors of a conversation as a list."""

    size = 0

    def __init__(self) -> None:
        self._all: list[tuple[int, Sequence[float]]] = []
        self.grown = threading.Condition()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, numbers: Sequence[int], vectors: Any) -> None:
        with self.grown:
            self._all.extend(zip(numbers, vectors, strict=True))
            self.grown.notify_all()

    def likeness(self, vector: Any) -> dict[int, float]:
        [one] = vector
        return {number: sum(a * b for a, b in zip(one, other, strict=True)) for number, other in self._all}


def fill(indexes: Indexes, name: bytes) -> None:
    indexes.begin(name)
    for id_, body in ORIGINALS.items():
        indexes.add(name, id_, body)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxgate.gateway.recall_embedding.recall_dense.Vectors", ListedVectors)


def embedded(indexes: Indexes, name: bytes, count: int) -> None:
    """Wait until so many windows of a conversation are embedded."""
    vectors: Any = indexes._known[name].vectors
    with vectors.grown:
        assert vectors.grown.wait_for(lambda: len(vectors) >= count, SOON)


@pytest.mark.usefixtures("listed")
def test_meaning_finds_what_no_word_does() -> None:
    indexes = Indexes(Embedding(Axes))
    fill(indexes, b"one")
    embedded(indexes, b"one", 3)
    answer = indexes.answer(ask("who writes invoices?"), time.monotonic() + SOON)
    assert (answer.dense, ids(answer)) == (True, [A])
    assert answer.hits[0].relevance == 1.0
    # An exact string still goes by its letters.
    assert ids(indexes.answer(ask("d56a046e invoices"), time.monotonic() + SOON)) == [C]


@pytest.mark.usefixtures("listed")
def test_without_time_or_before_half_is_embedded_terms_answer_alone() -> None:
    embedding = Embedding(Axes)
    indexes = Indexes(embedding)
    fill(indexes, b"one")
    embedded(indexes, b"one", 3)
    late = indexes.answer(ask("d56a046e"), time.monotonic())
    assert (late.dense, ids(late)) == (False, [C])
    index = indexes._known[b"one"].index
    for at in range(4):
        index.add(f"new {at}", "more text")
    early = indexes.answer(ask("d56a046e"), time.monotonic() + SOON)
    assert (early.dense, ids(early)) == (False, [C])


@pytest.mark.parametrize("fails_at", ["load", "use"])
@pytest.mark.usefixtures("listed")
def test_a_model_that_fails_leaves_the_terms(fails_at: str, caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Axes:
        if fails_at == "load":
            raise OSError("no such model")
        return Axes(fails=True)

    embedding = Embedding(load)
    indexes = Indexes(embedding)
    fill(indexes, b"one")
    embedding.join(SOON)
    answer = indexes.answer(ask("d56a046e"), time.monotonic() + SOON)
    assert (answer.dense, ids(answer)) == (False, [C])
    fill(indexes, b"two")
    assert embedding.waiting == 0
    assert "nothing is embedded" in caplog.text
    assert embedding.broken
    assert "billing" not in caplog.text


@pytest.mark.usefixtures("listed")
def test_windows_are_embedded_in_small_batches_and_only_so_many_wait() -> None:
    axes = Axes()
    ready = threading.Event()

    def load() -> Axes:
        assert ready.wait(SOON)
        return axes

    embedding = Embedding(load, most=6)
    conversation, gone = Conversation(), Conversation()
    embedding.add(gone, range(1), ["gone"])
    embedding.add(conversation, range(4), ["x" * 600] * 4)
    embedding.add(conversation, range(4, 6), ["too", "many"])
    embedding.forget([gone])
    assert embedding.waiting == 4
    embedding.add(conversation, range(6, 7), ["last"])
    ready.set()
    vectors: Any = conversation.vectors
    with vectors.grown:
        assert vectors.grown.wait_for(lambda: len(vectors) == 5, SOON)
    assert [[len(text) for text in batch] for batch in axes.batches] == [[600, 600], [600, 600, 4]]
