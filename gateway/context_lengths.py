"""How long prompts may be, and how many tokens they have where bytes alone are not exact enough.

A configured tokenizer counts what has come since the last answer; only where a length lies near an edge is
the engine itself asked to count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from ctxgate.compression.recent import Recent
from ctxgate.compression.said import read_said
from ctxgate.gateway.context_sizes import MEASURED_MESSAGES
from ctxgate.gateway.recall_probe_file import reliable_lengths
from ctxgate.inference.client import UpstreamFailed
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.compression.ask import Text
    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.gateway.config import Model, Pool, Replica, Tokenizer
    from ctxgate.gateway.fleet import Fleet
    from ctxgate.gateway.services import Services
    from ctxgate.inference.wire import Body

log = logging.getLogger(__name__)
COUNT_WITHIN_S: Final = 0.3  # a request waits for it
UNCOUNTED_US: Final = 60_000_000
"""How long a replica is not asked to count after it gave no count in time."""

LEARNED_FOR_US: Final = 3_600_000_000
Count: TypeAlias = "Callable[[str], int]"
"""Counts the tokens of a text."""

_COUNT: Final = re.compile(rb'"count"\s*:\s*(\d{1,10})')
_COUNT_BYTES: Final = 4096
_MESSAGE_TOKENS: Final = 6  # of a template's own around one message, where a tokenizer counted the text
_REASONING: Final = ("reasoning_content", "reasoning")  # two names of the same
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT: Final = msgspec.json.Decoder(str)
_RENDERED_WITH: Final = ("tools", "chat_template_kwargs")


class _Learned(Record, frozen=True):
    """A window that one replica named, and when (microseconds of the fleet's clock).

    `started` and `reported`: what was known of the replica then. Another engine may stand there later.
    """

    window: int
    at_us: int
    started: int
    reported: int | None


class Windows:
    """The window of each model on each pool, in tokens of prompt and answer together.

    A model whose recall was probed counts as having no more than what was found reliable.
    """

    def __init__(self, fleet: Fleet, models: Mapping[str, Model]) -> None:
        self._fleet = fleet
        self._learned: dict[tuple[str, str, str], _Learned] = {}  # by configured names, so it is bounded
        self._reliable = reliable_lengths(models)
        self._warned: set[tuple[str, str]] = set()  # bounded likewise

    def of(self, pool: Pool, model: Model) -> int | None:
        """The tokens that a prompt and its answer should keep to; None where nothing is known.

        Of replicas that have different ones the smallest counts: any of them may get the request.
        """
        told = [self._told(pool, replica.name, model) for replica in pool.replicas]
        if not any(told):
            self._warn(pool, model.name)
        known = (*told, self._reliable.get(model.name))
        return min((each for each in known if each is not None), default=None)

    def _warn(self, pool: Pool, model: str) -> None:
        """Say once that a model's window is not known, as soon as a replica was asked for it."""
        asked = any(self._fleet.record(pool.name, replica.name).asked for replica in pool.replicas)
        if asked and (pool.name, model) not in self._warned:
            self._warned.add((pool.name, model))
            log.warning("pool %s, model %s: %s", pool.name, model, unknown_window(model))

    def _told(self, pool: Pool, replica: str, model: Model) -> int | None:
        """The configuration's word, else the replica's; less where it refused a prompt with less."""
        record = self._fleet.record(pool.name, replica)
        reported = record.windows.get(model.engine_name)
        told = reported if model.window is None else model.window
        learned = self._learned.get((pool.name, replica, model.name))
        if learned is None:
            return told
        age_us = self._fleet.clock() - learned.at_us
        if (record.started, reported) != (learned.started, learned.reported) or age_us > LEARNED_FOR_US:
            del self._learned[pool.name, replica, model.name]
            return told
        return learned.window if told is None else min(told, learned.window)

    def learn(self, pool: Pool, replica: str, model: Model, window: int) -> None:
        """Note the window that a replica has named in a refusal, once it has taken a shorter prompt.

        It counts until the replica starts anew, reports another window or takes more, at most for
        `LEARNED_FOR_US`.
        """
        record = self._fleet.record(pool.name, replica)
        reported = record.windows.get(model.engine_name)
        learned = _Learned(window, self._fleet.clock(), record.started, reported)
        self._learned[pool.name, replica, model.name] = learned

    def took(self, pool: Pool, replica: str, model: Model, tokens: int) -> None:
        """Note a prompt and answer of so many tokens: a window below them is none."""
        learned = self._learned.get((pool.name, replica, model.name))
        if learned is not None and tokens > learned.window:
            del self._learned[pool.name, replica, model.name]


def unknown_window(model: str) -> str:
    """What an unknown window comes to, and its cure."""
    return (
        "the window is not known, so a prompt is shortened for it only once an engine has refused one "
        f"(models.{model}.window states it)"
    )


class Tokenizers:
    """The tokenizers that models are configured with; loaded when first used, off the event loop.

    One that cannot be loaded is said once, and its model's tokens are estimated by bytes.
    """

    def __init__(self) -> None:
        self._counters: dict[str, Count | None] = {}
        self._known: Recent[tuple[str, bytes], int] = Recent(MEASURED_MESSAGES)

    async def count(self, model: Model, facts: Sequence[Facts], messages: Sequence[Text]) -> int | None:
        """Tokens of messages; None where the model has no usable tokenizer."""
        if model.tokenizer is None:
            return None
        counts = [self._known.get((model.name, each.digest)) for each in facts]
        missing = [at for at, count in enumerate(counts) if count is None]
        if missing:
            texts = [bytes(messages[at]) for at in missing]
            fresh = await asyncio.to_thread(self._count, model.name, model.tokenizer, texts)
            if fresh is None:
                return None
            for at, count in zip(missing, fresh, strict=True):
                self._known.put((model.name, facts[at].digest), count)
                counts[at] = count
        return sum(count + _MESSAGE_TOKENS for count in counts if count is not None)

    def _count(self, name: str, tokenizer: Tokenizer, messages: Sequence[bytes]) -> list[int] | None:
        if name not in self._counters:
            self._counters[name] = _loaded(name, tokenizer)
        counter = self._counters[name]
        return None if counter is None else [_said(message, counter) for message in messages]


def _said(message: bytes, counter: Count) -> int:
    said = read_said(message)
    texts = [said.text, *(f"{call.name}{call.arguments}" for call in said.calls)]
    return sum(counter(text) for text in (*texts, *_reasoning(message)))


def _reasoning(message: bytes) -> set[str]:
    """What a model thought before this answer, where the client sends it back."""
    try:
        members = _MEMBERS.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return set()
    texts: set[str] = set()
    for name in _REASONING:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # null, or no text
            if name in members:
                texts.add(_TEXT.decode(members[name]))
    return texts


def _loaded(name: str, tokenizer: Tokenizer) -> Count | None:
    try:
        if tokenizer.tiktoken is not None:
            import tiktoken  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415 - optional

            encoding: Any = tiktoken.get_encoding(tokenizer.tiktoken)
            return lambda text: len(encoding.encode(text, disallowed_special=()))
        from tokenizers import Tokenizer as Fast  # noqa: PLC0415 - belongs to an extra

        fast = Fast.from_file(str(tokenizer.file))
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for a missing or broken file
        log.warning("model %s: its tokenizer cannot be used: %s", name, type(error).__name__)
        return None
    return lambda text: len(fast.encode(text, add_special_tokens=False).ids)


class ExactCounts:
    """Asks engines how many tokens a prompt has; one that does not answer is left alone for a while."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._silent_until_us: dict[tuple[str, str], int] = {}  # by configured names

    async def count(self, pool: Pool, model: Model, body: Body) -> int | None:
        """The prompt's tokens as an engine of the pool counts them; None where none tells in time."""
        frame = body.frame()
        if frame is None:
            return None
        members = b"".join(
            b',"%s":%s' % (name.encode(), bytes(value))
            for name in _RENDERED_WITH
            if (value := body.get(name)) is not None
        )
        head = b'{"model":' + msgspec.json.encode(model.engine_name) + members + b',"messages":'
        pieces = (head, memoryview(body.raw)[frame.start : frame.end], b"}")
        replica = self._asked(pool)
        if replica is None:
            return None
        count = await self._count(replica.url + "/tokenize", pieces, self._services.upstream_headers(pool))
        if count is None:
            self._silent_until_us[pool.name, replica.name] = self._services.fleet.clock() + UNCOUNTED_US
        return count

    def _asked(self, pool: Pool) -> Replica | None:
        """The first healthy replica that answered when it was asked last."""
        now_us = self._services.fleet.clock()
        healthy = {state.name for state in self._services.fleet.snapshot((pool,)) if state.healthy}
        return next(
            (
                each
                for each in pool.replicas
                if each.name in healthy and self._silent_until_us.get((pool.name, each.name), 0) <= now_us
            ),
            None,
        )

    async def _count(
        self, url: str, pieces: tuple[bytes | memoryview, ...], headers: Mapping[str, str]
    ) -> int | None:
        try:
            async with (
                asyncio.timeout(COUNT_WITHIN_S),
                await self._services.client.open(url, pieces, headers) as response,
            ):
                if response.status != 200:
                    return None
                found = _COUNT.search(await response.start_of_body(_COUNT_BYTES))
                return None if found is None else int(found[1])
        except (UpstreamFailed, TimeoutError):
            return None
