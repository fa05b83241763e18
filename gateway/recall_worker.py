"""The recall process: it indexes what left prompts and answers questions about it, off the gateway's loop.

    stdin: Add, Ask, Forget        stdout: Told        (see `recall_wire`)

One thread reads, one keeps the indexes and answers, one embeds, if the extra `dense` is installed and a
model is given. Questions go before everything else that waits. Indexes are bounded in memory: the
conversation that was used longest ago goes first, and is then unknown. The process ends with its input.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias

from ctxgate.compression.recall_bm25 import best
from ctxgate.compression.recall_index import combined
from ctxgate.compression.recall_question import meaning_of, question_of
from ctxgate.compression.recall_text import searchable
from ctxgate.compression.said import read_said
from ctxgate.gateway import recall_dense
from ctxgate.gateway.recall_embedding import Conversation, Embedding
from ctxgate.gateway.recall_wire import PREFIX, Add, Ask, Forget, Hit, Told, framed, length_of, said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ctxgate.gateway.recall_wire import Said

Work: TypeAlias = "bytes | tuple[bytes, str, bytes] | Forget"
"""A conversation that begins, a message of one by its id, or what to forget."""

MEMORY_BYTES: Final = 256 * 2**20
LONGEST_TEXT: Final = 4_000_000  # characters of one message that are indexed: some million tokens
NICENESS: Final = 10
_ANSWERING_S: Final = 0.03  # left for everything behind the embedding of a question


class Indexes:
    """The conversations' indexes, the one used last at the end. `embedding` None: by terms alone."""

    def __init__(self, embedding: Embedding | None = None, limit: int = MEMORY_BYTES) -> None:
        self._embedding = embedding
        self._limit = limit
        self._known: OrderedDict[bytes, Conversation] = OrderedDict()

    def begin(self, name: bytes) -> None:
        """Know a conversation from now on."""
        self._known.setdefault(name, Conversation())
        self._known.move_to_end(name)

    def add(self, name: bytes, id_: str, message: bytes) -> None:
        """Index a message of a known conversation; then drop what is too much, but never this one."""
        conversation = self._known.get(name)
        if conversation is None:
            return
        self._known.move_to_end(name)
        text = searchable(read_said(message))[:LONGEST_TEXT]
        numbers = conversation.index.add(id_, text)
        if self._embedding is not None and numbers:
            windows = conversation.index.windows[numbers.start : numbers.stop]
            self._embedding.add(conversation, numbers, [text[each.start : each.stop] for each in windows])
        size = sum(each.size for each in self._known.values())
        while size > self._limit and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            size -= oldest.size
            self._drop([oldest])

    def forget(self, prefix: bytes) -> None:
        """Drop the conversations whose names begin so."""
        names = [name for name in self._known if name.startswith(prefix)]
        self._drop([self._known.pop(name) for name in names])

    def answer(self, ask: Ask, deadline: float) -> Told:
        """The windows that answer best. `deadline` is by `time.monotonic`."""
        conversation = self._known.get(ask.conversation)
        if conversation is None:
            return Told(ask.number, False, False, [])
        self._known.move_to_end(ask.conversation)
        index = conversation.index
        looked = index.look(question_of(ask.text))
        likeness = self._likeness(conversation, ask.text, deadline)
        relevance = combined(looked, likeness)
        if ask.among is not None:  # runs that begin alike share a conversation, but not what was said in them
            windows = index.windows
            relevance = {at: how for at, how in relevance.items() if windows[at].id in ask.among}
        hits = [Hit(*index.windows[number], relevance[number]) for number in best(relevance, ask.count)]
        return Told(ask.number, True, likeness is not None, hits)

    def _likeness(self, conversation: Conversation, text: str, deadline: float) -> dict[int, float] | None:
        """Cosines of the nearest windows; None while fewer than half of them are embedded, or too late."""
        if self._embedding is None or 2 * len(conversation.vectors) < len(conversation.index.windows):
            return None
        vector = self._embedding.vector(meaning_of(text), deadline - _ANSWERING_S - time.monotonic())
        return None if vector is None else conversation.vectors.likeness(vector)

    def _drop(self, gone: list[Conversation]) -> None:
        if self._embedding is not None and gone:
            self._embedding.forget(gone)


class Inbox:
    """What was said and is not done yet. Filled by one thread and emptied by another."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._asks: deque[tuple[Ask, float]] = deque()
        self._work: deque[Work] = deque()
        self._ended = False

    def put(self, message: Said) -> None:
        """Take a message; those that an `Add` brings count one by one, so that questions get between them."""
        with self._change:
            if isinstance(message, Ask):
                self._asks.append((message, time.monotonic() + message.within_s))
            elif isinstance(message, Add):
                if message.begins:
                    self._work.append(message.conversation)
                self._work.extend((message.conversation, id_, body) for id_, body in message.items)
            else:
                self._work.append(message)
            self._change.notify()

    def end(self) -> None:
        """Nothing more will be said, and nobody waits for what is not done."""
        with self._change:
            self._asks.clear()
            self._work.clear()
            self._ended = True
            self._change.notify()

    def finish(self) -> None:
        """Nothing more will be said."""
        with self._change:
            self._ended = True
            self._change.notify()

    def take(self) -> tuple[Ask, float] | Work | None:
        """What to do next, a question first; None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._asks or self._work or self._ended)
            if self._asks:
                return self._asks.popleft()
            return self._work.popleft() if self._work else None


def serve(inbox: Inbox, indexes: Indexes, tell: Callable[[Told], None]) -> None:
    """Do what is said until the end."""
    while (task := inbox.take()) is not None:
        if isinstance(task, Forget):
            indexes.forget(task.prefix)
        elif isinstance(task, bytes):
            indexes.begin(task)
        elif len(task) == 3:
            indexes.add(*task)
        elif time.monotonic() < task[1]:  # else nobody waits for it any more
            tell(indexes.answer(*task))


def messages(stream: BinaryIO) -> Iterator[Said]:
    """What is said on a stream, until its end."""
    while len(prefix := stream.read(PREFIX)) == PREFIX:
        length = length_of(prefix)
        body = stream.read(length)
        if len(body) < length:
            return
        yield said(body)


def _read(inbox: Inbox, stream: BinaryIO) -> None:
    try:
        for message in messages(stream):
            inbox.put(message)
    finally:
        inbox.end()


def _tell(stream: BinaryIO, told: Told) -> None:
    stream.write(framed(told))
    stream.flush()


def main() -> None:
    """Serve the gateway that started this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="the sentence-transformers model; without one, terms alone answer")
    parser.add_argument("--memory-bytes", type=int, default=MEMORY_BYTES)
    arguments = parser.parse_args()
    os.nice(NICENESS)
    inbox = Inbox()
    threading.Thread(target=_read, args=(inbox, sys.stdin.buffer), daemon=True).start()
    embedding = None
    if arguments.model is not None and recall_dense.installed():
        embedding = Embedding(partial(recall_dense.Embedder, arguments.model))
    output = sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints must not come between the frames
    try:
        serve(inbox, Indexes(embedding, arguments.memory_bytes), partial(_tell, output))
    except BrokenPipeError:
        pass  # the gateway is gone
    finally:
        os._exit(0)  # the embedding thread may be inside a model, which nobody waits for


if __name__ == "__main__":
    main()
