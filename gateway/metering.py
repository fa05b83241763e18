"""From what an answer said to what the call used: measured where the engine told, estimated where not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.plan import stream_options
from ctxgate.gateway.flow import Surface
from ctxgate.gateway.instants import day_of
from ctxgate.inference.chat_stream import FinishFacts, StreamTerms
from ctxgate.inference.chunk_edit import top_level, with_first
from ctxgate.inference.estimate import estimate_output_tokens, fill_unknown
from ctxgate.inference.rates import charge, format_usd
from ctxgate.inference.record import Record
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, Certainty
from ctxgate.inference.usage_meter import UsageDialect
from ctxgate.inference.usage_parse import never_scheduled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.gateway.flow import Held
    from ctxgate.inference.chat_stream import StreamReader
    from ctxgate.inference.estimate import TokenRatio
    from ctxgate.inference.rates import Charge
    from ctxgate.inference.usage import Usage
    from ctxgate.inference.usage_parse import ParsedUsage
    from ctxgate.inference.wire import Body

_ABORTED: Final = "abort"
_LIST: Final = 0x5B
_SHOWN: Final = 64
_TIER: Final = b'"service_tier"'
_TOKEN_IDS: Final = re.compile(rb"\[[ \t\r\n]*[-0-9]").match


class _UsageMember(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw(b"")


_USAGE: Final = msgspec.json.Decoder(_UsageMember)


class Metered(Record, frozen=True):
    """A call's usage, with what was odd about the engine's report."""

    usage: Usage
    anomalies: tuple[str, ...] = ()


class Basis(Record, frozen=True):
    """What an estimate of a call stands on: its prompt's estimated length and the output's ratio."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output: TokenRatio


def terms_of(held: Held, *, reports_cached: bool, fingerprint: str | None, window: int | None) -> StreamTerms:
    """How this call's answer is to be read, from what the client asked for and the plan added."""
    planned = held.routed.planned
    inbound = planned.allowed.identified.inbound
    options = stream_options(inbound.body) if inbound.stream else {}
    prompts = prompt_count(inbound.body) if inbound.surface is Surface.COMPLETIONS else 1
    dialect = UsageDialect(
        held.routed.pool.usage_convention,
        cached_absent_is_zero=reports_cached or inbound.surface is Surface.EMBEDDINGS,
        choices=(inbound.body.value("n") or 1) * prompts,
        prompts=prompts,
        window=window,
    )
    return StreamTerms(
        client_wants_usage=options.get("include_usage") is True,
        client_wants_continuous=options.get("continuous_usage_stats") is True,
        injected_continuous=planned.plan.injected_continuous,
        dialect=dialect,
        fingerprint=fingerprint,
    )


def usage_of_answer(facts: FinishFacts, dialect: UsageDialect, surface: Surface, basis: Basis) -> Metered:
    """What a whole answer used.

    vLLM counts a prompt with its first output token. So an aborted call without output was not counted,
    also where no metrics say so: of several choices it gives none.
    """
    parsed = dialect.parse(facts.usage)
    aborted = _ABORTED in facts.finish_reasons.values()
    if aborted and never_scheduled(facts.usage, facts.metrics):
        return Metered(NOTHING_USED)
    events = 0 if surface is Surface.EMBEDDINGS else len(facts.finish_reasons)
    return _filled(parsed, facts.text_bytes, events, basis)


def usage_of_stream(reader: StreamReader, basis: Basis) -> Metered:
    """What a stream used, so far or in all."""
    parsed = reader.usage()
    # vLLM ends a call aborted in the queue without any finish reason, and its usage names the prompt.
    idle = not reader.content_events and set(reader.finish_reasons.values()) <= {_ABORTED}
    if idle and reader.done and never_scheduled(reader.meter.last_whole, reader.metrics):
        return Metered(NOTHING_USED)
    return _filled(parsed, reader.text_bytes, reader.content_events, basis)


def opaque_facts(metadata: bytes) -> FinishFacts:
    """What is known of an answer that is no JSON: vLLM tells its usage in a header, if at all."""
    try:
        usage = bytes(_USAGE.decode(metadata).usage) if metadata else b""
    except (msgspec.DecodeError, RecursionError):
        usage = b""
    return FinishFacts(usage=usage or None)


def was_aborted(reasons: Mapping[int, str]) -> bool:
    """Whether the engine ended any choice because it was told to."""
    return _ABORTED in reasons.values()


def nothing_reported(basis: Basis) -> Usage:
    """The estimate of a call that was cut off before it said anything."""
    return fill_unknown(NOTHING_KNOWN, prompt=basis.prompt_tokens, cached=basis.cached_tokens)


def _filled(parsed: ParsedUsage, text_bytes: int, events: int, basis: Basis) -> Metered:
    known = parsed.usage or NOTHING_KNOWN
    if not any(count.value is None for count in (known.uncached, known.cached, known.output)):
        return Metered(known, parsed.anomalies)
    output = estimate_output_tokens(text_bytes, events, basis.output).value
    prompt = basis.prompt_tokens if parsed.usage is None else None
    return Metered(fill_unknown(known, prompt=prompt, output=output), parsed.anomalies)


def finish_reason(reasons: Mapping[int, str]) -> str | None:
    """One word for the ledger: the first choice's reason."""
    return reasons[min(reasons)] if reasons else None


def with_cost(document: bytes, cost_nano: int) -> bytes:
    """A JSON answer, or an event holding one, with `usage.cost` in dollars; unchanged without usage."""
    start, end = document.find(b"{"), document.rfind(b"}") + 1
    try:
        usage = bytes(_USAGE.decode(document[start:end]).usage)
    except (msgspec.DecodeError, RecursionError):
        return document
    if usage[:1] != b"{" or not usage[1:-1].strip():
        return document
    brace = document.rfind(usage) + len(usage) - 1
    if document.find(usage) + len(usage) - 1 != brace:  # the same bytes stand elsewhere too
        ends = [member.end for member in top_level(document[start:end]) if member.name == "usage"]
        brace = start + ends[-1] - 1
    return b"".join((document[:brace], b',"cost":', format_usd(cost_nano).encode(), document[brace:]))


def with_tier(document: bytes, tier: str) -> bytes:
    """A JSON object with `service_tier`, unless its engine says one itself. Any other text is unchanged."""
    if document[:1] != b"{" or document[1:].lstrip()[:1] != b'"':
        return document
    member = b'"service_tier":"%s"' % tier.encode()
    if _TIER not in document:
        return with_first(document, member)
    for found in top_level(document):
        if found.name == "service_tier":
            value = document[found.start : found.end].partition(b":")[2].strip()
            if value != b"null":
                return document
            return b"".join((document[: found.start], member, document[found.end :]))
    return with_first(document, member)


def with_tier_in_event(out: bytes, tier: str) -> bytes:
    """What a stream forwards first, with `service_tier` in its first event where that is an object."""
    if not out.startswith(b"data:"):
        return out
    end = out.find(b"\n")
    line, rest = (out, b"") if end < 0 else (out[:end], out[end:])
    payload = line[5:].lstrip()
    return line[: len(line) - len(payload)] + with_tier(payload, tier) + rest


def prompt_count(body: Body) -> int:
    """How many prompts a completions call holds: a text or a list of token ids is one."""
    prompt = body.get("prompt")
    if prompt is None or memoryview(prompt)[0] != _LIST or _TOKEN_IDS(bytes(memoryview(prompt)[:_SHOWN])):
        return 1  # a million token ids are told by their beginning
    prompts = body.items("prompt")
    return len(prompts) if prompts and memoryview(prompts[0])[0] in b'"[' else 1


def charge_of(held: Held, usage: Usage) -> Charge:
    """The price of a usage at the rates of the day the attempt was opened."""
    return charge(usage, held.routed.pool.rates, day_of(held.attempt.opened_at_us))


def counted(usage: Usage) -> tuple[int | None, int | None]:
    """The prompt's tokens and the cached ones among them, each None unless the engine told."""
    measured = Certainty.MEASURED
    if usage.cached.certainty is measured and usage.uncached.certainty is measured:
        return usage.prompt, usage.cached.value
    return (usage.prompt_total.value if usage.prompt_total.certainty is measured else None), None
