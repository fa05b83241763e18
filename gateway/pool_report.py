"""What `ctxgate pools probe` shows: one block per replica, one column per model, problems in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ctxgate.compression.rules import Rule, allowed_rules
from ctxgate.gateway import pool_probe, pool_steps
from ctxgate.gateway.context_lengths import unknown_window
from ctxgate.gateway.replica_watch import PROBE_TIMEOUT_S
from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import probe
from ctxgate.inference.rates import format_usd
from ctxgate.inference.template_facts import Extension

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.pool_probe import Examined
    from ctxgate.gateway.pool_steps import Step
    from ctxgate.gateway.services import Services
    from ctxgate.inference.template_facts import TemplateFacts, Turns

_WHY: dict[Finding, str] = {
    Finding.UNWELL: "its health endpoint does not say 200",
    Finding.REFUSED: "nothing listens there",
    Finding.SILENT: "it does not answer in time",
}


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica: `down` says why it could not be probed, else `models` what was found."""

    pool: str
    replica: str
    url: str
    down: str | None
    models: tuple[Examined, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it, or one of the models that its pool should serve, could not be probed."""
        return self.down is not None or any(one.missing for one in self.models)


async def probed(services: Services, record: ReplicaRecord) -> ReplicaReport:
    """Probe one replica now."""
    pool, replica = record.pool.name, record.replica
    headers = services.upstream_headers(record.pool)
    result = await probe(services.client, replica.url, headers, PROBE_TIMEOUT_S)
    services.fleet.probed(pool, replica.name, result)
    if result.finding is not Finding.WELL:
        return ReplicaReport(pool, replica.name, replica.url, _WHY[result.finding])
    models = await pool_probe.examine(services, record)
    steps = () if record.pool.provider is not None else await pool_steps.steps(services, record, models)
    stated = {one.name for one in services.config.models.values() if one.window is not None}
    return ReplicaReport(
        pool, replica.name, replica.url, None, tuple(with_window(one, stated) for one in models), steps
    )


def with_window(one: Examined, stated: Collection[str]) -> Examined:
    """The same; an unknown window is a problem, but for models whose configuration has `stated` it."""
    if one.missing or one.window is not None or one.model in stated:
        return one
    return replace(one, problems=(*one.problems, unknown_window(one.model)))


def as_json(reports: Sequence[ReplicaReport]) -> dict[str, Any]:
    """The findings as plain values; what is unknown is null or `unknown`."""
    return {
        "ok": not any(report.failed for report in reports),
        "replicas": [
            {
                "pool": report.pool,
                "replica": report.replica,
                "url": report.url,
                "alive": report.down is None,
                "problem": report.down,
                "models": [_model_json(one) for one in report.models],
                "steps": [asdict(one) for one in report.steps],
            }
            for report in reports
        ],
    }


def _model_json(one: Examined) -> dict[str, Any]:
    facts = one.findings.facts
    return {
        "model": one.model,
        "served_name": one.served_name,
        "max_model_len": one.window,
        "block_size": one.block_size,
        "abort_by_id": one.aborts,
        "render": one.findings.renders,
        "reports_cached": one.findings.cache.reports,
        "salts_isolate": one.findings.cache.isolates,
        "extends": {name: asdict(turns) for name, turns in _turns(facts).items()},
        "rules": _rules(facts),
        "problems": list(one.problems),
        "calls": one.cost.calls,
        "tokens": one.cost.tokens,
        "cost_usd": format_usd(one.cost.nano),
    }


def _turns(facts: TemplateFacts) -> dict[str, Turns]:
    return {
        "plain": facts.plain,
        "tools": facts.tools,
        "reasoning": facts.reasoning,
        "tool_results": facts.tool_results,
    }


def _rules(facts: TemplateFacts) -> dict[str, dict[str, Any]]:
    verdicts = {
        Rule.ARGUMENTS: facts.arguments,
        Rule.EMPTY_CONTENT: facts.empty_content,
        Rule.TOOLS: facts.tool_order,
        Rule.CALL_IDS: facts.call_ids,
    }
    allowed = allowed_rules(facts)
    return {rule.value: {"found": found.value, "on": rule in allowed} for rule, found in verdicts.items()}


def as_text(reports: Sequence[ReplicaReport]) -> str:
    """The same for a reader; ends with a line feed."""
    return "\n".join(line for report in reports for line in _lines(report)) + "\n" + _cost_line(reports)


def _lines(report: ReplicaReport) -> Iterator[str]:
    yield f"{report.pool}/{report.replica}  {report.url}"
    if report.down is not None:
        yield f"  not reachable: {report.down}"
        yield ""
        return
    table = [_cells(one) for one in report.models]
    for row in zip(*table, strict=True):
        yield f"  {row[0][0]:<22}" + "  ".join(f"{value:<24}" for _, value in row).rstrip()
    for one in report.models:
        for problem in one.problems:
            yield f"  ! {one.model}: {problem}"
    yield from _step_lines(report.steps)
    yield ""


def _step_lines(steps: Sequence[Step]) -> Iterator[str]:
    """One line per step of the conformance probe, and what degrades under those that failed."""
    for one in steps:
        yield f"  {one.number:>2} {one.step:<19}{one.found:<8} {one.told}".rstrip()
        if one.degrades:
            yield f"      degrades: {one.degrades}"


def _cells(one: Examined) -> list[tuple[str, str]]:
    facts, cache = one.findings.facts, one.findings.cache
    shown = one.model if one.model == one.served_name else f"{one.model} ({one.served_name})"
    rows = [
        ("model", shown),
        ("window", "unknown" if one.window is None else f"{one.window:,} tokens"),
        ("cache block", "unknown" if one.block_size is None else f"{one.block_size} tokens"),
        ("abort by id", _yes(one.aborts)),
        ("render endpoint", _yes(one.findings.renders)),
        ("reports cached tokens", _yes(cache.reports)),
        ("salts isolate", _yes(cache.isolates)),
    ]
    for name, turns in _turns(facts).items():
        lost = f", {turns.lost} tokens" if turns.extension in (Extension.NO, Extension.BUT_ANSWER) else ""
        rows.append((f"extends: {name.replace('_', ' ')}", f"{turns.extension.value}{lost}"))
    for name, rule in _rules(facts).items():
        rows.append((f"rule: {name.replace('_', ' ')}", f"{'on' if rule['on'] else 'off'} ({rule['found']})"))
    return rows


def _yes(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "no"


def _cost_line(reports: Sequence[ReplicaReport]) -> str:
    costs = [one.cost for report in reports for one in report.models]
    calls, tokens = sum(cost.calls for cost in costs), sum(cost.tokens for cost in costs)
    usd = format_usd(sum(cost.nano for cost in costs))
    return f"The probe took {calls} calls and {tokens:,} tokens, ${usd}; they are booked to the task probe.\n"
