"""The ten steps of the conformance probe: what a replica offers, and what degrades where it does not.

Drawn from the examination (`pool_probe`) and from one more call, a short stream.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.gateway.errors import Refused
from ctxgate.gateway.extras import has_events
from ctxgate.gateway.own_calls import heard, own_call
from ctxgate.inference.client import UpstreamFailed
from ctxgate.inference.template_facts import Extension
from ctxgate.inference.template_texts import filler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.gateway.config import KvEvents
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.pool_probe import Examined
    from ctxgate.gateway.services import Services
    from ctxgate.inference.kv_events import Batch

METRICS: Final = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
)
"""Samples that are read of a server's `/metrics`, without their prefix `vllm:`."""

YES, NO, PARTLY, UNKNOWN = "yes", "no", "partly", "unknown"
_NAME: Final = re.compile(rb"^vllm:(\w+)", re.MULTILINE)
_DATE: Final = re.compile(
    r"\b(?:19|20)\d\d-\d\d-\d\d\b"
    r"|\b\d{1,2} (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* 20\d\d\b"
)
_ASK_S: Final = 10.0
_EVENTS_WITHIN_S: Final = 5.0
_PATIENCE_S: Final = 60.0
_WORDS: Final = 200  # several cache blocks, so that there is something to publish


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its number and name, what was found in a word and in detail, what degrades without it."""

    number: int
    step: str
    found: str
    told: str = ""
    degrades: str = ""


@dataclass(slots=True)
class _Streamed:
    """What one streamed call told."""

    answered: bool = False
    usage: dict[str, Any] | None = None
    metrics: bool = False
    fingerprint: str | None = None
    load: bool = False


async def steps(services: Services, record: ReplicaRecord, found: Sequence[Examined]) -> tuple[Step, ...]:
    """All ten steps for one replica that was examined, by the first model that it serves."""
    known = next((one for one in found if not one.missing), None)
    if known is None:
        return ()
    heard = _Heard(record.replica.kv_events)
    await heard.begin()
    try:
        body = _body(known.served_name)
        streamed = await _streamed(services, record, known, body)
        rendered = await _rendered(services, record, body)
        events = await _events(services, record, heard)
    finally:
        await heard.end()
    pool = record.pool
    return (
        _models(known),
        _metrics(await _text(services, record, "/metrics")),
        _cached(known),
        _streams(streamed),
        _render(rendered, streamed),
        await _template(services, record, known, rendered),
        events,
        _priority(pool.engine is not None),
        _load(streamed),
        _fingerprint(streamed),
    )


def _body(served_name: str) -> dict[str, Any]:
    message = {"role": "user", "content": f"{secrets.token_hex(8)} {filler(_WORDS)}"}
    return {"model": served_name, "messages": [message], "max_tokens": 2}


async def _streamed(
    services: Services, record: ReplicaRecord, known: Examined, body: dict[str, Any]
) -> _Streamed:
    """What a stream tells, and a whole answer: vLLM tells its load in the head of whole answers alone."""
    told = _Streamed()
    asking = replace(record, pool=replace(record.pool, load="header"))
    more = {"stream": True, "stream_options": {"include_usage": True}}
    kept = await _asked(services, asking, known, body | more)
    if kept is None:
        return told
    told.answered = True
    for line in kept.decode("utf-8", "replace").split("\n"):
        if line.startswith("data: {"):
            _read(told, line.removeprefix("data: "))
    before = record.load
    await _asked(services, asking, known, body | {"max_tokens": 1})
    told.load = record.load is not before
    return told


async def _asked(
    services: Services, record: ReplicaRecord, known: Examined, body: dict[str, Any]
) -> bytes | None:
    """The answer's bytes, None without status 200; the call is booked and counted."""
    if not services.ledger.healthy:  # a call that cannot be booked is not made
        return None
    model = services.config.models[known.model]
    try:
        held = own_call(services, record, model, msgspec.json.encode(body))
    except Refused:
        return None
    found = await heard(services, held, _PATIENCE_S)
    if found is None:
        return None
    answered, answer = found
    known.cost.count(answered)
    return answer


def _read(told: _Streamed, data: str) -> None:
    try:
        chunk = json.loads(data)
    except ValueError:
        return
    if isinstance(chunk.get("usage"), dict):
        told.usage = chunk["usage"]
    told.metrics = told.metrics or isinstance(chunk.get("metrics"), dict)
    if isinstance(name := chunk.get("system_fingerprint"), str):
        told.fingerprint = name


async def _text(services: Services, record: ReplicaRecord, path: str) -> bytes | None:
    """The body of a GET with status 200, else None."""
    headers = services.upstream_headers(record.pool)
    try:
        status, body = await services.client.get(record.replica.url + path, headers, _ASK_S)
    except UpstreamFailed:
        return None
    return body if status == 200 else None


async def _posted(services: Services, record: ReplicaRecord, path: str, body: object) -> dict[str, Any]:
    headers = services.upstream_headers(record.pool)
    try:
        status, document = await services.client.post_json(record.replica.url + path, body, headers, _ASK_S)
    except UpstreamFailed:
        return {}
    return document if status == 200 and isinstance(document, dict) else {}


async def _rendered(services: Services, record: ReplicaRecord, body: dict[str, Any]) -> list[int] | None:
    tokens = (await _posted(services, record, "/v1/chat/completions/render", body)).get("token_ids")
    return tokens if isinstance(tokens, list) else None


def _models(known: Examined) -> Step:
    if known.window is None:
        return Step(1, "models", PARTLY, "no window", "a prompt that is too long is only known once refused")
    return Step(1, "models", YES, f"{known.window:,} tokens")


def _metrics(text: bytes | None) -> Step:
    lost = "load of other clients, cache size and counters to compare with are unknown"
    if text is None:
        return Step(2, "metrics", NO, "", lost)
    there = {name.decode() for name in _NAME.findall(text)}
    missing = [name for name in METRICS if name not in there]
    if not missing:
        return Step(2, "metrics", YES, f"{len(METRICS)} of {len(METRICS)}")
    found = PARTLY if len(missing) < len(METRICS) else NO
    return Step(2, "metrics", found, f"without {', '.join(missing)}", lost)


def _cached(known: Examined) -> Step:
    cache = known.findings.cache
    if cache.reports and cache.isolates:
        return Step(3, "cached tokens", YES, f"blocks of {known.block_size} tokens")
    if cache.reports:
        return Step(3, "cached tokens", PARTLY, "a hit under another salt", "tenants are not kept apart")
    found = NO if cache.reports is False else UNKNOWN
    return Step(3, "cached tokens", found, "", "cached tokens are booked as unknown, misses not explained")


def _streams(told: _Streamed) -> Step:
    if not told.answered:
        return Step(4, "usage of streams", UNKNOWN, "the call was not answered")
    if told.usage is None:
        return Step(4, "usage of streams", NO, "", "streams are metered by estimate")
    details = told.usage.get("prompt_tokens_details")
    if not isinstance(details, dict) or details.get("cached_tokens") is None:
        return Step(4, "usage of streams", PARTLY, "no details", "cached tokens of streams are unknown")
    times = "with times" if told.metrics else "without times (--enable-per-request-metrics)"
    return Step(4, "usage of streams", YES, times)


def _render(tokens: list[int] | None, told: _Streamed) -> Step:
    if tokens is None:
        return Step(5, "render", NO, "", "templates are examined by some twenty calls instead of three")
    prompt = None if told.usage is None else told.usage.get("prompt_tokens")
    if prompt is not None and prompt != len(tokens):
        told_apart = f"{len(tokens)} tokens, {prompt} measured"
        return Step(5, "render", PARTLY, told_apart, "rendered prompts are not what is served")
    return Step(5, "render", YES, f"{len(tokens)} tokens" + ("" if prompt is None else ", as measured"))


async def _template(
    services: Services, record: ReplicaRecord, known: Examined, tokens: list[int] | None
) -> Step:
    facts = known.findings.facts
    turns = {
        "plain": facts.plain,
        "reasoning": facts.reasoning,
        "tools": facts.tools,
        "tool results": facts.tool_results,
    }
    bad = [name for name, turn in turns.items() if turn.extension is Extension.NO]
    open_ = [name for name, turn in turns.items() if turn.extension is Extension.UNKNOWN]
    dated = False
    if tokens is not None:
        asked = {"model": known.served_name, "tokens": tokens}
        text = (await _posted(services, record, "/detokenize", asked)).get("prompt")
        dated = isinstance(text, str) and _DATE.search(text) is not None
    notes = [f"renders earlier turns anew: {', '.join(bad)}"] if bad else []
    notes += ["puts a date into the prompt"] if dated else []
    notes += [f"not known: {', '.join(open_)}"] if open_ else []
    if bad or dated:
        return Step(6, "template", PARTLY, "; ".join(notes), "such turns, or every new day, miss the cache")
    return Step(6, "template", UNKNOWN if len(open_) == len(turns) else YES, "; ".join(notes))


async def _events(services: Services, record: ReplicaRecord, heard: _Heard) -> Step:
    lost = "what is cached is concluded from what was sent, and evictions are not seen"
    configured = record.replica.kv_events
    if configured is None:
        published = _documents(await _text(services, record, "/kv_event_sources"))
        told = "published, not listened to (kv_events)" if published else "none are published"
        return Step(7, "cache events", PARTLY if published else NO, told, lost)
    if not heard.listens or not await heard.within(_EVENTS_WITHIN_S):
        told = "needs the extra `events`" if not heard.listens else heard.problem or "nothing was heard"
        return Step(7, "cache events", NO if heard.listens else UNKNOWN, told, lost)
    if heard.problem or configured.replay_endpoint is None:
        told = heard.problem or "heard, no replay"
        return Step(7, "cache events", PARTLY, told, "a gap makes what is known void")
    return Step(7, "cache events", YES, "heard, with replay")


def _documents(body: bytes | None) -> object:
    try:
        return json.loads(body or b"null")
    except ValueError:
        return None


def _priority(started_here: bool) -> Step:
    if started_here:
        return Step(8, "priority", YES, "as `ctxgate pools up` starts it")
    note = "accepted is not honoured: only --scheduling-policy priority is, and no endpoint tells it"
    return Step(8, "priority", UNKNOWN, note)


def _load(told: _Streamed) -> Step:
    if not told.answered:
        return Step(9, "load header", UNKNOWN, "the call was not answered")
    if told.load:
        return Step(9, "load header", YES)
    return Step(9, "load header", NO, "", "load is as old as the last look at /metrics")


def _fingerprint(told: _Streamed) -> Step:
    if told.fingerprint is None:
        lost = "a changed engine is only noticed by an outage"
        return Step(10, "fingerprint", NO if told.answered else UNKNOWN, "", lost)
    return Step(10, "fingerprint", YES, told.fingerprint[:64])


@dataclass(slots=True)
class _Heard:
    """Listens to a replica's cache events while the probe calls it; a follower of `kv_subscriber`."""

    configured: KvEvents | None
    problem: str = ""
    _stored: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    @property
    def listens(self) -> bool:
        return self._task is not None

    async def begin(self) -> None:
        """Start to listen, where there is something to listen to."""
        if self.configured is None or not has_events():
            return
        from ctxgate.inference.kv_subscriber import Endpoints, Subscriber  # noqa: PLC0415 - only with events

        endpoints = Endpoints(
            self.configured.endpoint, self.configured.replay_endpoint, self.configured.topic
        )
        self._task = asyncio.get_running_loop().create_task(Subscriber(endpoints, _Follower(self)).run())
        await asyncio.sleep(0.5)  # a subscription takes effect a moment after it was made

    async def within(self, seconds: float) -> bool:
        """Whether an event came."""
        try:
            await asyncio.wait_for(self._stored.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def end(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def came(self) -> None:
        """Something was published."""
        self._stored.set()


@dataclass(slots=True)
class _Follower:
    heard: _Heard

    def begin(self, first: int) -> None:
        """What was known is void; nothing was."""

    def apply(self, batch: Batch) -> None:
        """One step's events."""
        if batch.events:
            self.heard.came()

    def lost(self, problem: str) -> None:
        """Something was not understood, or could not be fetched."""
        self.heard.problem = problem

    def quiet(self) -> None:
        """Nothing came for a while."""
