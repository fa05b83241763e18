"""How long prompts may be, and how many tokens they have where bytes alone are not exact enough.

A configured tokenizer counts what has come since the last answer; only where a length lies near an edge is
the engine itself asked to count.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from ctxgate.compression.recent import Recent
from ctxgate.compression.said import read_said
from ctxgate.gateway.context_sizes import MEASURED_MESSAGES
from ctxgate.gateway.recall_probe_file import reliable_lengths
from ctxgate.inference.client import UpstreamFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.compression.ask import Text
    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.compression.window_errors import Overflow
    from ctxgate.gateway.config import Model, Pool, Tokenizer
    from ctxgate.gateway.fleet import Fleet
    from ctxgate.gateway.services import Services
    from ctxgate.inference.wire import Body

log = logging.getLogger(__name__)
COUNT_WITHIN_S: Final = 10.0
Count: TypeAlias = "Callable[[str], int]"
"""Counts the tokens of a text."""

_COUNT: Final = re.compile(rb'"count"\s*:\s*(\d{1,10})')
_COUNT_BYTES: Final = 4096
_MESSAGE_TOKENS: Final = 6  # of a template's own around one message, where a tokenizer counted the text
_RENDERED_WITH: Final = ("tools", "chat_template_kwargs")


class Windows:
    """The window of each model on each pool, in tokens of prompt and answer together.

    A model whose recall was probed counts as having no more than what was found reliable.
    """

    def __init__(self, fleet: Fleet, models: Mapping[str, Model]) -> None:
        self._fleet = fleet
        self._learned: dict[tuple[str, str], int] = {}  # by configured names, so it is bounded
        self._reliable = reliable_lengths(models)

    def of(self, pool: Pool, model: Model) -> int | None:
        """The tokens that a prompt and its answer should keep to; None where nothing is known."""
        told, reliable = self._told(pool, model), self._reliable.get(model.name)
        return min((each for each in (told, reliable) if each is not None), default=None)

    def _told(self, pool: Pool, model: Model) -> int | None:
        """What the engine said when it refused a prompt, else the configuration, else what replicas report.

        Of replicas that report different ones the smallest counts: any of them may get the request.
        """
        learned = self._learned.get((pool.name, model.name))
        if learned is not None:
            return learned
        if model.window is not None:
            return model.window
        records = (self._fleet.record(pool.name, replica.name) for replica in pool.replicas)
        told = [window for each in records if (window := each.windows.get(model.engine_name)) is not None]
        return min(told, default=None)

    def learn(self, pool: Pool, model: Model, overflow: Overflow) -> None:
        """Note the window that an engine names in a refusal."""
        self._learned[pool.name, model.name] = overflow.window


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
    return sum(
        counter(text) for text in (said.text, *(f"{call.name}{call.arguments}" for call in said.calls))
    )


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


async def count_exactly(services: Services, pool: Pool, model: Model, body: Body) -> int | None:
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
    headers = services.upstream_headers(pool)
    states = services.fleet.snapshot((pool,))
    healthy = [state.name for state in states if state.healthy]
    for replica in pool.replicas:
        if replica.name not in healthy:
            continue
        try:
            async with asyncio.timeout(COUNT_WITHIN_S):
                url = replica.url + "/tokenize"
                async with await services.client.open(url, pieces, headers) as response:
                    if response.status != 200:
                        return None
                    found = _COUNT.search(await response.start_of_body(_COUNT_BYTES))
                    return None if found is None else int(found[1])
        except (UpstreamFailed, TimeoutError):
            return None
    return None
