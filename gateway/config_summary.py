"""What a configuration says, in short, for `ctxgate check`: no secret, no hash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxgate.compression.policy import Level, Policy
from ctxgate.inference.rates import format_usd
from ctxgate.routing.policies import CTXGATE
from ctxgate.routing.tiers import DEFAULTS, TEAMLESS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ctxgate.gateway.config import Config, Listen, Pool, Team
    from ctxgate.inference.rates import Rates
    from ctxgate.routing.snapshot import LatencyBudget
    from ctxgate.routing.tiers import Classes

_SHARED: Final = {"team": "within a team", "organisation": "within an organisation", "none": "by everybody"}


def as_text(config: Config, file: str) -> str:
    """A readable summary; ends with a line feed."""
    return "\n".join(_lines(config, file)) + "\n"


def as_json(config: Config) -> dict[str, object]:
    """The same facts as plain values; prices are decimal strings in US dollars per million tokens."""
    return {
        "listen": {"host": config.listen.host, "port": config.listen.port},
        "store": {"sqlite": str(config.store)},
        "pools": {name: _pool_json(pool) for name, pool in config.pools.items()},
        "models": {
            name: {
                "pools": list(model.pools),
                "served_name": model.served_name or name,
                "window": model.window,
                "routing": model.routing,
            }
            for name, model in config.models.items()
        },
        "teams": {name: _team_json(team) for name, team in config.teams.items()},
        "keys": [{"id": key.key_id, "team": key.team} for key in config.keys],
        "docs": config.docs,
    }


def address(listen: Listen) -> str:
    """The URL of a listening address; IPv6 in brackets."""
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"http://{host}:{listen.port}"


def _pool_json(pool: Pool) -> dict[str, object]:
    return {
        "replicas": [{"name": replica.name, "url": replica.url} for replica in pool.replicas],
        "rates": [_rates_json(rates) for version in pool.rates.versions for rates in version],
        "provider": None if pool.provider is None else pool.provider.model,
        "sends_api_key": pool.api_key is not None or pool.provider is not None,
        "abort": pool.abort,
        "continuous_usage": pool.continuous_usage,
        "usage_convention": pool.usage_convention,
        "cache_isolation": pool.cache_isolation,
        "probe": pool.probe,
        "profile": pool.profile,
        "load": pool.load,
    }


def _team_json(team: Team) -> dict[str, object]:
    return {
        "organisation": team.organisation,
        "layout": {
            "level": team.layout,
            "volatile": [
                *({"kind": kind} for kind in sorted(team.kinds)),
                *({"pattern": pattern.pattern} for pattern in team.patterns),
            ],
        },
        "context": {name: _plain(getattr(team.context, name)) for name in team.context.__slots__},
        "classes": {"default": team.classes.default.value}
        | {job.value: _budget_json(budget) for job, budget in team.classes.budgets.items()},
    }


def _budget_json(budget: LatencyBudget) -> dict[str, object]:
    return {
        "ttft_ms": None if budget.ttft_us is None else budget.ttft_us // 1000,
        "latency_ms": None if budget.total_us is None else budget.total_us // 1000,
        "prefer": budget.prefer,
    }


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else value


def _rates_json(rates: Rates) -> dict[str, object]:
    return {
        "effective": rates.effective.isoformat(),
        "above_prompt_tokens": rates.above_prompt_tokens,
        "usd_per_million_uncached": format_usd(rates.uncached),
        "usd_per_million_cached": format_usd(rates.cached),
        "usd_per_million_output": format_usd(rates.output),
        "usd_per_million_written": format_usd(rates.written),
    }


def _lines(config: Config, file: str) -> Iterator[str]:
    yield f"{file} is valid"
    yield f"  listen  {address(config.listen)}"
    yield f"  ledger  {config.store}"
    yield ""
    yield "pools (US dollars per million tokens)"
    for pool in config.pools.values():
        yield from _pool_lines(pool)
    yield ""
    yield "models"
    for model in config.models.values():
        served = f", served as {model.served_name}" if model.served_name else ""
        policy = f", routed by {model.routing}" if model.routing != CTXGATE else ""
        yield f"  {model.name}: {', '.join(model.pools)}{served}{policy}"
    yield ""
    yield "teams"
    yield from _team_lines(config)
    for team in config.teams.values():
        if team.classes != TEAMLESS:
            yield f"  {team.name}, by class of job: {_classes_text(team.classes)}"
    yield ""
    yield "keys"
    yield from _key_lines(config)


def _pool_lines(pool: Pool) -> Iterator[str]:
    yield f"  {pool.name}" if pool.profile is None else f"  {pool.name}, tuned {pool.profile}"
    notes = [
        "aborts by request id" if pool.abort else "no abort: the usage of broken-off calls is estimated",
        "sends an API key" if pool.api_key is not None or pool.provider is not None else "sends no API key",
    ]
    yield f"    {'; '.join(notes)}"
    if pool.provider is not None:
        yield f"    hosted: {pool.provider.model}, through LiteLLM"
    else:
        yield f"    cached prompts are shared {_SHARED[pool.cache_isolation]}"
    width = max(len(replica.name) for replica in pool.replicas)
    for replica in pool.replicas:
        yield f"    {replica.name:<{width}}  {replica.url}"
    yield from _table(
        ("from", "prompt above", "uncached", "cached", "output"),
        [
            (
                rates.effective.isoformat(),
                f"{rates.above_prompt_tokens:,}",
                format_usd(rates.uncached),
                format_usd(rates.cached),
                format_usd(rates.output),
            )
            for version in pool.rates.versions
            for rates in version
        ],
    )


def _team_lines(config: Config) -> Iterator[str]:
    if not config.teams:
        yield "  none"
        return
    rows = [
        (team.name, team.organisation, _context_text(team), _layout_text(team))
        for team in config.teams.values()
    ]
    yield from _table(("name", "organisation", "compaction", "layout"), rows, indent="  ", right=False)


def _classes_text(classes: Classes) -> str:
    """The class of requests that name none, and of the others those that differ from what is usual."""
    told = [f"{classes.default.value} by default"]
    for job, budget in classes.budgets.items():
        if budget == DEFAULTS[job]:
            continue
        bounds = [
            f"{what} in {bound_us / 1e6:g} s"
            for what, bound_us in (("first token", budget.ttft_us), ("all", budget.total_us))
            if bound_us is not None
        ]
        told.append(f"{job.value} {', '.join([*bounds, f'prefers {budget.prefer}'])}")
    return "; ".join(told)


def _context_text(team: Team) -> str:
    """When conversations are compacted, and by whom where that is another than usual."""
    context = team.context
    if context.compaction == "off" or context.summarizer == "warm_suffix":
        return context.compaction
    return f"{context.compaction}, {'no summary' if context.summarizer == 'off' else context.summarizer}"


def _layout_text(team: Team) -> str:
    """The level, and what is declared volatile where the level moves it."""
    declared: list[str] = sorted(team.kinds)
    if team.patterns:
        declared.append(f"{len(team.patterns)} expression{'' if len(team.patterns) == 1 else 's'}")
    if not declared or not Policy(Level(team.layout)).moves():
        return team.layout
    return f"{team.layout}; volatile: {', '.join(declared)}"


def _key_lines(config: Config) -> Iterator[str]:
    if not config.keys:
        yield "  none"
        return
    rows = [(key.key_id, key.team, key.organisation) for key in config.keys]
    yield from _table(("id", "team", "organisation"), rows, indent="  ", right=False)


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "    ", right: bool = True
) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [
            f"{cell:>{width}}" if right and column else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield (indent + "  ".join(cells)).rstrip()
