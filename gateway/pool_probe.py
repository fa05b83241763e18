"""Asks one replica what it can do, for each of its models: the effects behind `template_probe`.

Calls that use tokens are attempts like any other: metered, priced and booked, to an organisation that no
configuration can name. So the ledger stays equal to the engines' own counters.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.gateway.own_calls import Cost, heard, own_call
from ctxgate.inference import engine_load, template_probe
from ctxgate.inference.client import UpstreamFailed
from ctxgate.inference.engine_load import EngineLoad
from ctxgate.inference.template_facts import Extension, Findings, Verdict
from ctxgate.inference.template_probe import Complete, Detokenize, Render, Told

if TYPE_CHECKING:
    from ctxgate.gateway.config import Model
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.flow import Answered
    from ctxgate.gateway.services import Services
    from ctxgate.inference.template_facts import TemplateFacts
    from ctxgate.inference.template_probe import Ask

PATIENCE_S: Final = 60.0  # for one call; then it is ended as if its client had gone
_ASK_TIMEOUT_S: Final = 10.0
_RENDER: Final = "/v1/chat/completions/render"


@dataclass(frozen=True, slots=True)
class Examined:
    """What is known of one model on one replica; `problems` says what is wrong, in words."""

    model: str
    served_name: str
    window: int | None
    block_size: int | None
    aborts: bool
    findings: Findings
    problems: tuple[str, ...] = ()
    cost: Cost = field(default_factory=Cost)
    missing: bool = False  # the replica names its models, and this one is not among them


async def examine(services: Services, record: ReplicaRecord) -> list[Examined]:
    """Examine a replica that is up, for every model that its pool serves, and tell the fleet."""
    url, headers = record.replica.url, services.upstream_headers(record.pool)
    cache = await cache_config(services, record)
    load = EngineLoad(kv_tokens=engine_load.kv_tokens(cache))
    services.fleet.told_load(record.pool.name, record.replica.name, load)
    services.misses.index.tell_size((record.pool.name, record.replica.name), load.kv_tokens)
    told = cache.get("block_size", "")  # before the first calls: silent events are known by what these store
    services.misses.index.tell_block(
        (record.pool.name, record.replica.name), int(told) or None if told.isdecimal() else None
    )
    aborts = await services.client.abort(url, [f"ctxgate-probe-{services.new_id()}"], headers)
    record.reports_cached = None  # what is known may be of an engine that was here before
    found: list[Examined] = []
    for model in _models(services, record):
        found.append(await _Examination(services, record, model).run(cache, aborts=aborts is True))
        services.fleet.examined(record, model.engine_name, found[-1].findings)
        services.misses.index.tell_block((record.pool.name, record.replica.name), found[-1].block_size)
    turns = [each for one in found for each in (one.findings.facts.plain, one.findings.facts.tools)]
    turned = {each.extension for each in turns} - {Extension.UNKNOWN}
    if turned:
        place = (record.pool.name, record.replica.name)
        services.misses.index.tell_answers(place, kept=turned == {Extension.YES})
    return found


async def cache_config(services: Services, record: ReplicaRecord) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`, empty where the replica does not show them."""
    headers = services.upstream_headers(record.pool)
    try:
        _, text = await services.client.get(f"{record.replica.url}/metrics", headers, _ASK_TIMEOUT_S)
    except UpstreamFailed:
        return {}
    return engine_load.cache_config(text)


def _models(services: Services, record: ReplicaRecord) -> list[Model]:
    """The models that lead to the replica's pool, each name of the engine once."""
    models = [one for one in services.config.models.values() if record.pool.name in one.pools]
    return [*{model.engine_name: model for model in reversed(models)}.values()][::-1]


class _Examination:
    """One model on one replica."""

    def __init__(self, services: Services, record: ReplicaRecord, model: Model) -> None:
        self._services = services
        self._record = record
        self._model = model
        self._headers = services.upstream_headers(record.pool)
        self._cost = Cost()

    async def run(self, cache: dict[str, str], *, aborts: bool) -> Examined:
        """Play the probe. `cache`: the labels of the engine's cache configuration."""
        name, windows = self._model.engine_name, self._record.windows
        if windows and name not in windows:
            problem = f"the replica does not serve {name}; it serves {', '.join(sorted(windows))}"
            return Examined(self._model.name, name, None, None, aborts, Findings(), (problem,), missing=True)
        told = cache.get("block_size", "")
        block = int(told) if told.isdecimal() and int(told) else None
        work = template_probe.probe(secrets.token_hex(16), block, windows.get(name))
        answer: Told | None = None
        try:
            while True:
                answer = await self._told(next(work) if answer is None else work.send(answer))
        except StopIteration as end:
            findings: Findings = end.value
        pool = self._record.pool
        caching = cache.get("enable_prefix_caching") != "False"
        return Examined(
            self._model.name,
            name,
            windows.get(name),
            block or findings.cache.block_size,
            aborts,
            findings,
            problems(findings, caching=caching, aborts_wanted=pool.abort and not aborts),
            self._cost,
        )

    async def _told(self, ask: Ask) -> Told:
        match ask:
            case Render(body):
                document = await self._post(_RENDER, body | {"model": self._model.engine_name})
                return Told(tokens=_token_ids(document.get("token_ids")))
            case Detokenize(tokens):
                document = await self._post(
                    "/detokenize", {"model": self._model.engine_name, "tokens": tokens}
                )
                text = document.get("prompt")
                return Told(text=text if isinstance(text, str) else None)
            case Complete(body):
                return await self._completed(body)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that a path answered with status 200, else an empty one."""
        url = self._record.replica.url + path
        try:
            status, document = await self._services.client.post_json(url, body, self._headers, _ASK_TIMEOUT_S)
        except UpstreamFailed:
            return {}
        return document if status == 200 and isinstance(document, dict) else {}

    async def _completed(self, body: dict[str, Any]) -> Told:
        """The usage of a chat call of one token, as the engine reported it."""
        if not self._services.ledger.healthy:  # a call that cannot be booked is not made
            return Told()
        more = {"model": self._model.engine_name, "max_tokens": 1}
        held = own_call(self._services, self._record, self._model, msgspec.json.encode(body | more))
        found = await heard(self._services, held, PATIENCE_S)
        return Told() if found is None else self._counted(found[0])

    def _counted(self, answered: Answered) -> Told:
        usage = answered.usage
        if usage.prompt is None:
            return Told()
        self._cost.count(answered)
        return Told(prompt=usage.prompt, cached=usage.cached.reported)


def _token_ids(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        return None
    return tuple(value)


def problems(findings: Findings, *, caching: bool, aborts_wanted: bool) -> tuple[str, ...]:
    """What is wrong with a replica, each with its cure. `caching`: the engine does not deny a cache."""
    cache, facts = findings.cache, findings.facts
    found: list[str] = []
    if not caching:
        found.append("prefix caching is off (vLLM: --enable-prefix-caching)")
    elif cache.reports is False:
        found.append(
            "it does not report cached tokens, so they are booked as unknown "
            "(vLLM: --enable-prompt-tokens-details)"
        )
    elif cache.reports is None:
        found.append("a prompt that was sent twice had no cached tokens, or was not answered")
    if cache.isolates is False:
        found.append("a prompt hit the cache under another cache_salt: tenants are not isolated")
    if aborts_wanted:
        found.append("it cannot abort by id although its pool says so (vLLM: --enable-scale-out)")
    found += _template_problems(facts)
    return tuple(found)


def _template_problems(facts: TemplateFacts) -> list[str]:
    turns = {
        "plain": facts.plain,
        "tools": facts.tools,
        "reasoning": facts.reasoning,
        "tool results": facts.tool_results,
    }
    rules = {
        "arguments": facts.arguments,
        "empty content": facts.empty_content,
        "tools": facts.tool_order,
        "call ids": facts.call_ids,
    }
    lost = [name for name, turn in turns.items() if turn.extension is Extension.NO]
    off = [name for name, verdict in rules.items() if verdict is Verdict.DIFFERENT]
    found = []
    if lost:
        found.append(f"its template renders earlier turns anew ({', '.join(lost)}): each such turn misses")
    if off:
        found.append(
            f"its template shows what layout takes for the same ({', '.join(off)}): not unified here"
        )
    return found
